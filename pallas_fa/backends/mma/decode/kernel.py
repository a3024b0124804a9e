"""The body of the kernel for few queries: the online softmax of a query block over its part of the keys.

A CTA is one warpgroup. Its warps split the keys of each key block (`KeyParts`). Keys and values of a step are loaded
`stages - 1` steps before they are used. At the end the sums of all parts are merged in shared memory.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.grid import AXIS, quotient_and_remainder
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.logits import Place, logits
from pallas_fa.backends.gpu.online_softmax import online_softmax
from pallas_fa.backends.gpu.page_numbers import page_numbers
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.mma import narrow
from pallas_fa.backends.mma.cta import Cta
from pallas_fa.backends.mma.decode.key_parts import ROWS, KeyParts
from pallas_fa.backends.mma.decode.plan import DecodePlan
from pallas_fa.backends.mma.query_block import QueryBlock


class Refs(NamedTuple):
    """Device memory.

    `arrays`: of score and mask; `visit_table`: None where the mask has no arrays; `page_table`: None where keys and values
    are not in pages.
    """

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]
    visit_table: Any
    page_table: Any
    out: Any
    lse: Any


class Decode(QueryBlock):
    """What a CTA does for one query block and one part of its keys."""

    def __init__(self, plan: DecodePlan, gmem: Refs, scratch: dict[str, Any]):
        at, splits = plan.grid.place(), plan.config.kv_splits
        number, self.split = quotient_and_remainder(at.cta, splits) if splits > 1 else (at.cta, 0)
        super().__init__(plan, gmem, scratch, Cta(1, scratch, plan.interpret), at, number, wgs=None)
        self.parts = KeyParts(plan.config.rows, self.mma)
        visits = self.visits()
        if splits > 1:
            visits = schedule.part_of(visits, (self.split, self.split + 1), splits, plan.kv_blocks)
        self.steps = Steps.of(visits)

    def run(self) -> None:
        """Computes the results of the query block and stores them."""
        ahead = self.plan.config.stages - 1
        self._load_queries()
        if self.plan.reorders_columns:
            self.cta.copies.commit()
        start = lax.mul(lax.axis_index(AXIS), jnp.int32(0))  # Pallas refuses a static tile that reaches past the end
        for i in range(ahead):
            pl.when(i < self.steps.end)(lambda i=i: self._load(start + i, self._pages(start + i)))
            if i + 1 < ahead:
                self.cta.copies.commit()
        if self.plan.reorders_columns:
            self.cta.copies.wait_for_committed(under_way=ahead - 1)
            self.cta.meet()
            narrow.reorder_queries(self.scratch["q_smem"], self.plan.tiles.q.width)  # seen after the next meeting
        acc, m, l, _ = self.steps.loop(self._step, (*self.nothing_yet(ROWS), self._pages(ahead)))
        self._finish(acc, m, l)

    def _step(self, i, carry, is_boundary):
        acc, m, l, pages = carry
        plan, scratch, i = self.plan, self.scratch, jnp.asarray(i, jnp.int32)
        slot, stages = self._slot(i), plan.config.stages
        self.cta.wait_for_copies(under_way=stages - 2)
        later = i + (stages - 1)
        pl.when(later < self.steps.end)(lambda: self._load(later, pages))
        pages = self._pages(later + 1)  # now, so that the next step need not wait for the table
        x = self.parts.inner_products(scratch["q_smem"], scratch["k_smem"].at[slot])
        at = Place(self.b, self.n, self.t0, self.first_key(i), queries=plan.config.rows)
        x, self.factor = logits(plan, x, at, is_boundary, lambda: self._arrays(x.shape, slot))
        l, p, *of_max = online_softmax(plan, self.mma.as_tile(x), self.factor, m, l, is_boundary)
        if of_max:
            m, rescale = of_max
            acc = self.mma.times_rows(acc, rescale)
        return self.parts.plus_product(acc, p, scratch["v_smem"].at[slot]), m, l, pages

    def _finish(self, acc, m, l):
        plan, gmem, rows, out_smem = self.plan, self.gmem, self.plan.config.rows, self.scratch["out_smem"]
        self.cta.meet()  # the keys and values of the last step are read
        unit = 1 / LOG2E if plan.problem.score is None else self.factor  # see online_softmax
        factor, lse = self._merged(m, l.sum(axis=1), unit)
        place = self.b * plan.config.kv_splits + self.split, self.n, self.block
        gmem.lse[place] = lse
        out = self.mma.accumulated(self.mma.times_rows(acc, factor))
        stored, columns = plan.stored_rows, plan.out_columns
        layout = plgpu.Layout.WG_STRIDED((stored, columns), vec_size=math.gcd(stored * columns // 128, 2))
        for start in range(0, out.shape[1], columns):
            if start:
                self.cta.meet()  # the columns before are read
            part = out[:, start : start + columns]
            out_smem[...] = narrow.in_order(part) if plan.reorders_columns else part
            self.cta.meet()
            parts = [plgpu.load(out_smem.at[pl.ds(i, stored)], layout=layout) for i in range(0, ROWS, rows)]
            target = gmem.out.at[(*place, slice(None), pl.ds(start, columns))]
            target[...] = functools.reduce(jnp.add, parts).astype(plan.out_dtype)

    def _merged(self, m, total, unit):
        """Returns (the factor of the sums of P V, lse) of each row, for statistics of all parts."""
        smem = self.scratch["statistics_smem"]
        top = self._over_parts(jnp.maximum, m, smem.at[0])
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        weight = jnp.exp2((m - finite) * (unit * LOG2E))
        total = self._over_parts(jnp.add, total * weight, smem.at[1])
        empty = total == 0
        factor = jnp.where(empty, 0.0, weight / jnp.where(empty, 1.0, total))
        return factor, jnp.where(empty, -jnp.inf, finite * unit + jnp.log(jnp.where(empty, 1.0, total)))

    def _over_parts(self, combine, x, smem):
        for i in range(2):
            smem[pl.ds(i * ROWS, ROWS)] = x
        self.cta.meet()
        return self.parts.merged(combine, x, smem)

    def _slot(self, i):
        return lax.rem(jnp.asarray(i, jnp.int32), jnp.int32(self.plan.config.stages))

    def _load_queries(self):
        plan, copies, rows = self.plan, self.cta.copies, self.plan.config.rows
        for start in range(0, ROWS, rows):
            smem = self.scratch["q_smem"].at[pl.ds(start, rows)]
            plan.tiles.q.load(copies, self.gmem.q, self.b, self.t0, self.n, smem)
            for a in plan.arrays.of_kind("column"):
                self.load_array(a, 0, self.scratch[f"array{a}_smem"].at[pl.ds(start, rows)])

    def _load(self, i, pages):
        """Starts loading keys, values and arrays of step i. `pages`: `_pages(i)`."""
        # Opaque, so that no addresses are carried from step to step: with fewer registers, more CTAs share a multiprocessor.
        plan, s0, slot = self.plan, opaque(self.first_key(i), self.plan.interpret), self._slot(i)
        length = self.key_length()
        if length is None and plan.has_padding_keys:
            length = plan.problem.dims.S
        for name in ("k", "v"):
            for key in range(0, plan.config.block_kv, plan.box):
                part, row = divmod(key, plan.keys_of_part)
                target = self.scratch[f"{name}_smem"].at[slot, part, pl.ds(row, plan.box)]
                self._load_box(name, s0 + key, pages[key // plan.box % len(pages)] if pages else None, target, length)
        for a in plan.arrays.streamed:
            smem = self.scratch[f"array{a}_smem"].at[slot]
            if plan.arrays[a].kind == "row":
                self.load_array(a, s0, smem)
                continue
            for part in range(self.parts.count):
                rows = pl.ds(part * plan.config.rows, plan.config.rows)
                self.load_array(a, s0 + part * plan.keys_of_part, smem.at[rows])

    def _load_box(self, name, first, page, smem, length):
        plan, gmem, tiles = self.plan, getattr(self.gmem, name), getattr(self.plan.tiles, name)
        pages = plan.problem.pages
        if pages is None:
            tiles.load(self.cta.copies, gmem, self.b, first, self.kv_head, smem, length)
            return
        head = self.kv_head if pages.interleaved is None else 2 * self.kv_head + int(name == "v")
        rows = pl.ds(lax.rem(first, jnp.int32(pages.size)), plan.box)
        place = (page, rows, head) if pages.layout == "PSKH" else (head, page, rows)
        tiles.load_from(self.cta.copies, gmem.at[place], smem, length - first)

    def _pages(self, i):
        """Returns the numbers of the pages of step i: of each box, or one where the key block lies in one page."""
        pages = self.plan.problem.pages
        if pages is None:
            return ()
        block_kv = self.plan.config.block_kv
        box = block_kv if pages.size % block_kv == 0 else self.plan.box
        first = jnp.maximum(self.first_key(jnp.asarray(i, jnp.int32)), 0)  # past the last step
        return tuple(page_numbers(pages, self.gmem.page_table, self.b, first, block_kv, box))

    def _arrays(self, shape, slot):
        """(score, mask) with their arrays for a step."""
        plan = self.plan

        def loaded(a):
            array = plan.arrays[a]
            if array.kind == "scalar":
                return self.scalars[a]
            smem = self.scratch[f"array{a}_smem"]
            if array.kind == "row":
                return self.parts.row_array(array, smem.at[slot], shape)
            return array.load(smem if array.kind == "column" else smem.at[slot], shape, TILE)

        return plan.arrays.unflatten([loaded(a) for a in range(len(plan.arrays))])
