"""The body of the forward kernel: the online softmax of a query block over the key blocks that it visits.

FlashAttention-2 (Dao, arXiv 2307.08691): each warp holds 16 queries, once or twice, and the sums of P V for them. Every step
computes the logits of a key block, their softmax and P V. With one stage, values are loaded under Q K^T and the next keys
under the softmax and P V; with two, the next keys and values under the whole step.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.dropout import HeadDropout
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.logits import Place, logits
from pallas_fa.backends.gpu.online_softmax import finish, online_softmax
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.mma.cta import Cta
from pallas_fa.backends.mma.forward.plan import ForwardPlan
from pallas_fa.backends.mma.query_block import QueryBlock


class Refs(NamedTuple):
    """Device memory.

    `arrays`: of score and mask; `visit_table`: None where the mask has no arrays; `sinks`: [B|1, N]; `dropout`: see there.
    """

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]
    visit_table: Any
    sinks: Any
    dropout: Any
    out: Any
    lse: Any


class Forward(QueryBlock):
    """What a warpgroup does for its queries of one query block."""

    def __init__(self, plan: ForwardPlan, gmem: Refs, scratch: dict[str, Any]):
        at = plan.grid.place()
        # Under most masks later queries see more keys: the CTAs with the most work come first.
        number = plan.query_blocks - 1 - at.cta if plan.problem.mask is not None else at.cta
        wgs = plan.config.wgs
        super().__init__(plan, gmem, scratch, Cta(wgs, scratch, plan.interpret), at, number, wgs)
        if plan.visit_lists:
            self.steps = Steps.of_list(plan.list_of(gmem.visit_table, self.b, self.n, self.block))
        else:
            self.steps = Steps.of(self.visits())
        self.dropout = None
        if plan.problem.dropout is not None:
            self.dropout = HeadDropout.load(plan.problem.dropout, gmem.dropout, self.b, self.n, plan.interpret)

    def run(self) -> None:
        """Computes the query block and stores its results."""
        self._load_queries()
        start = lax.mul(lax.axis_index(AXIS), jnp.int32(0))  # Pallas refuses a static tile that reaches past the end
        self._load_k(start)
        if self.plan.config.stages > 1:
            self._load_v(start)
        self._finish(*self.steps.loop(self._step, self.nothing_yet(self.plan.config.rows)))

    def _step(self, i, carry, is_boundary):
        acc, m, l = carry
        plan, scratch, i = self.plan, self.scratch, jnp.asarray(i, jnp.int32)
        slot = self._slot(i)
        self.cta.wait_for_copies()
        if plan.config.stages > 1:
            self._load_next(i, self._load_k, self._load_v)
        else:
            self._load_v(i)
        x = self.mma.inner_products(scratch["q_smem"].at[self.cta.wg], scratch["k_smem"].at[slot])
        if plan.config.stages == 1:
            self.cta.wait_for_copies()
            self._load_next(i, self._load_k)
        s0 = self.first_key(i)
        at = Place(self.b, self.n, self.t0, s0)
        x, self.factor = logits(plan, x, at, is_boundary, lambda: self._arrays(x.shape, i, is_boundary))
        l, p, *of_max = online_softmax(plan, self.mma.as_tile(x), self.factor, m, l, is_boundary)
        if of_max:
            m, rescale = of_max
            acc = self.mma.times_rows(acc, rescale)
        p = p.astype(plan.problem.dtype)
        if self.dropout is not None:
            p = self.dropout.draw(p.shape, self.t0, s0, rounded=True).select(p)
        return self.mma.plus_product(acc, p, scratch["v_smem"].at[slot]), m, l

    def _finish(self, acc, m, l):
        plan, scratch, copies, sink = self.plan, self.scratch, self.cta.copies, None
        if self.gmem.sinks is not None:
            sink = self.gmem.sinks[self.b if self.gmem.sinks.shape[0] > 1 else 0, self.n]
        unit = 1 / LOG2E if plan.problem.score is None else self.factor  # see online_softmax
        factor, lse = finish(plan, m, l, unit, sink)
        out = self.mma.accumulated(self.mma.times_rows(acc, factor))
        smem = scratch.get("out_smem", scratch["q_smem"]).at[self.cta.wg]
        self.cta.meet()
        smem[...] = out.astype(plan.problem.dtype)
        self.gmem.lse[self.b, self.n, pl.ds(self.t0, plan.config.rows)] = lse
        self.cta.meet()
        plan.tiles.out.store(copies, smem, self.gmem.out, self.b, self.t0, self.n)

    def _slot(self, i):
        stages = self.plan.config.stages
        return lax.rem(i, jnp.int32(stages)) if stages > 1 else 0

    def _load_queries(self):
        plan, copies = self.plan, self.cta.copies
        smem = self.scratch["q_smem"].at[self.cta.wg]
        plan.tiles.q.load(copies, self.gmem.q, self.b, self.t0, self.n, smem)
        for a in plan.arrays.of_kind("column"):
            self.load_array(a, 0, self.scratch[f"array{a}_smem"].at[self.cta.wg])

    def _load_next(self, i, *loads):
        @pl.when(i + 1 < self.steps.end)
        def _():
            for load in loads:
                load(i + 1)

    def _load_k(self, i):
        """Starts loading the keys of step i, and its arrays."""
        plan, s0 = self.plan, self.first_key(i)
        self.cta.only(0, lambda: self._load_keys_or_values("k", i, s0))
        if not plan.arrays.streamed:
            return
        if plan.score_streams:
            self._load_arrays(i, s0)
        else:
            pl.when(self.steps.is_boundary(i))(lambda: self._load_arrays(i, s0))

    def _load_v(self, i):
        self.cta.only(-1, lambda: self._load_keys_or_values("v", i, self.first_key(i)))

    def _load_keys_or_values(self, name, i, s0):
        tiles, gmem = getattr(self.plan.tiles, name), getattr(self.gmem, name)
        smem = self.scratch[f"{name}_smem"].at[self._slot(jnp.asarray(i, jnp.int32))]
        tiles.load(self.cta.copies, gmem, self.b, s0, self.kv_head, smem, self.key_length())

    def _load_arrays(self, i, s0):
        plan, slot = self.plan, self._array_slot(i)
        for a in plan.arrays.streamed:
            smem = self.scratch[f"array{a}_smem"].at[slot]
            if plan.arrays[a].kind == "tile":
                self.load_array(a, s0, smem.at[self.cta.wg])
            else:
                self.cta.only(0, lambda a=a, smem=smem: self.load_array(a, s0, smem))

    def _array_slot(self, i):
        return lax.rem(jnp.asarray(i, jnp.int32), jnp.int32(self.plan.array_stages))

    def _arrays(self, shape, i, is_boundary):
        """(score, mask) with their arrays for step i; None where not loaded."""
        plan, uses_streamed = self.plan, self.plan.score_streams or is_boundary
        slot = self._array_slot(i) if plan.arrays.streamed else 0

        def loaded(a):
            array = plan.arrays[a]
            if array.kind == "scalar":
                return self.scalars[a]
            if array.kind == "word":
                place = *array.index(self.b, self.n), self.block, self.steps.key_block(i)
                return self.gmem.arrays[a][place] if is_boundary else None
            smem = self.scratch[f"array{a}_smem"]
            if array.kind == "column":
                return array.load(smem.at[self.cta.wg], shape, TILE)
            if not uses_streamed:
                return None
            return array.load(smem.at[slot] if array.kind == "row" else smem.at[slot, self.cta.wg], shape, TILE)

        return plan.arrays.unflatten([loaded(a) for a in range(len(plan.arrays))])
