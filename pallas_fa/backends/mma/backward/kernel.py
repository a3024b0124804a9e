"""The body of a pass of the backward kernels: the gradients of a stationary block, and of a score's arrays.

FlashAttention-2 (Dao, arXiv 2307.08691) in two or three kernels. The following is for keys as the stationary operand; the
pass for dQ has the roles of queries and keys exchanged. In a step a warpgroup computes S^T = K Q^T, adds P^T dO to dV,
computes dP^T = V dO^T and adds dS^T Q to dK. P^T and dS^T go from accumulators to left operands in registers.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.dropout import HeadDropout
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.gradient_tile import TileOfLogits, TilePlace
from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.gpu.layouts import PER_COLUMN, PER_ROW, TILE
from pallas_fa.backends.gpu.schedule import is_equal
from pallas_fa.backends.gpu.skewed import ROWS
from pallas_fa.backends.mma import arrays
from pallas_fa.backends.mma.backward.gmem import Refs
from pallas_fa.backends.mma.backward.plan import BackwardPlan
from pallas_fa.backends.mma.cta import Cta
from pallas_fa.backends.mma.matmuls import Mma
from pallas_fa.masks.lengths import lengths_of


class Sums(NamedTuple):
    """What accumulates in registers: the gradients of the stationary operands, and arrays with one value per row of these.

    None, or nothing, where the pass does not give it.
    """

    qk: Any
    pv: Any
    arrays: tuple[Any, ...]


class Head(NamedTuple):
    """What a query head brings to each of its steps."""

    n: Any
    scalars: dict[int, Any]
    dropout: HeadDropout | None
    first: Any  # of its steps
    last: Any


class Backward:
    """What a warpgroup does for its rows of one stationary block."""

    def __init__(self, plan: BackwardPlan, gmem: Refs, scratch: dict[str, Any]):
        self.plan, self.gmem, self.scratch = plan, gmem, scratch
        self.cta = Cta(plan.config.wgs, scratch, plan.interpret)
        self.mma = Mma(plan.problem.dtype, plan.interpret)
        at, c = plan.grid.place(), plan.config
        self.b, self.head, self.number = at.b, at.head, at.cta
        if not plan.kind.keys_stationary and plan.problem.mask is not None:
            self.number = plan.visits.blocks - 1 - at.cta  # under most masks later queries see more keys: longest first
        self.start = self.number * c.block + self.cta.wg * c.rows
        self.first_streamed = 0  # of this warpgroup, in a streamed tile
        self.sharer = 0  # its number among the warpgroups that hold the same stationary positions
        self.holder = self.cta.wg  # the number of its stationary tiles in shared memory

    def run(self) -> None:
        """Computes the gradients of the block and stores them."""
        group = self.plan.group
        self._load_stationary()
        sums = self._no_sums()
        if group > 1:
            sums = lax.fori_loop(0, group, lambda g, sums: self._head(self.head * group + g, sums), sums)
        else:
            sums = self._head(self.head, sums)
        self.cta.wait_for_copies()
        if self.plan.has_head_parts:
            self._store_parts(sums)
        else:
            self._store(sums)

    def _no_sums(self):
        plan, kind = self.plan, self.plan.kind
        shape = lambda tiles: (plan.config.rows, tiles.padded_dim)
        return Sums(
            self.mma.accumulator(*shape(plan.tiles.stationary_qk)) if kind.accumulates_qk else None,
            self.mma.accumulator(*shape(plan.tiles.stationary_pv)) if kind.accumulates_pv else None,
            (),
        )

    def _head(self, n, sums):
        """Adds all steps of query head n: boundary tiles, full tiles, boundary tiles."""
        plan, table = self.plan, self.gmem.visit_table
        visits = plan.visits.of_part(table, self.b, n, self.number, 0)
        dropout = plan.problem.dropout
        dropout = dropout and HeadDropout.load(dropout, self.gmem.dropout, self.b, n, plan.interpret)
        # Pallas refuses a static tile that reaches past the end.
        first = visits.first + lax.mul(lax.axis_index(AXIS), jnp.int32(0))
        head = Head(n, self._scalars(n), dropout, first, visits.last)
        self.cta.meet()  # the tiles of the head before are no longer read

        @pl.when(first < visits.last)
        def _():
            for a in plan.arrays.of_kind("column"):
                self._load_array(head, a, 0, 0)
            self._load_streamed(head, first)

        of_arrays = tuple(self.mma.zeros(plan.config.rows) for _ in plan.score_gradients.summed)
        sums = sums._replace(arrays=of_arrays)
        bounds = visits.first, visits.full_first, visits.full_last, visits.last
        for i, is_boundary in enumerate((True, False, True)):
            if not is_equal(bounds[i], bounds[i + 1]):
                step = functools.partial(self._step, head, is_boundary)
                sums = lax.fori_loop(bounds[i], bounds[i + 1], step, sums)
        for i, x in zip(plan.score_gradients.summed, sums.arrays, strict=True):
            self.gmem.summed[i][self.sharer, self.b, n, pl.ds(self.start, plan.config.rows)] = x
        return sums._replace(arrays=())

    def _step(self, head, is_boundary, i, sums):
        i = jnp.asarray(i, jnp.int32)
        slot = self._slot(head, i)
        self.cta.wait_for_copies()
        load_next = lambda: pl.when(i + 1 < head.last)(lambda: self._load_streamed(head, i + 1))

        def release():
            """The tile's slot is no longer read, and gets the next tile where there is no other slot."""
            if self.plan.config.stages == 1:
                self.cta.meet()
                load_next()

        if self.plan.config.stages > 1:
            load_next()
        return self._plus_products(self._place(head, is_boundary, i), slot, sums, release)

    def _plus_products(self, at, slot, sums, release):
        """`sums` plus what the tile at `at` gives, whose streamed operands are in `slot`."""
        plan, kind = self.plan, self.plan.kind
        streamed_qk, streamed_pv = self._streamed("qk", slot), self._streamed("pv", slot)
        kept = at.kept(plan)  # before tiles of logits fill the registers
        drop = lambda x: x if kept is None else kept.select(x)
        s = self.mma.inner_products(self._stationary("qk"), streamed_qk)
        tile, p = self._probabilities(at, s, slot)
        if kind.accumulates_pv:
            sums = sums._replace(pv=self.mma.plus_product(sums.pv, drop(p), streamed_pv))
        if kind.accumulates_qk:
            dp = drop(self.mma.inner_products(self._stationary("pv"), streamed_pv))
            ds, *gradients = self._gradients_of_logits(tile, s, p, dp, slot)
            sums = sums._replace(arrays=self._plus_gradients(tile.at, gradients, sums.arrays))
            sums = sums._replace(qk=self.mma.plus_product(sums.qk, ds, streamed_qk))
        release()
        return sums

    def _stationary(self, name):
        """The stationary tile that this warpgroup multiplies; that of "qk" where "pv" has none of its own."""
        own = f"stationary_{name}_smem"
        return self.scratch[own if own in self.scratch else "stationary_qk_smem"].at[self.holder]

    def _streamed(self, name, slot):
        return self.scratch[f"streamed_{name}_smem"].at[slot]

    def _gradients_of_logits(self, tile, s, p, dp, slot):
        """[dS, gradients of the score's arrays] of a tile."""
        ds = p * (dp + self._statistic("delta", slot, p.shape))
        found = [self.mma.as_tile(x) for x in tile.pullback(s, ds, self.plan.problem.scale)]
        return tile.without_nan(found, may_be_nan=self.plan.scored)

    def _place(self, head, is_boundary, i):
        number = self._tile(head, i)
        scalars = head.scalars
        if is_boundary:
            scalars = scalars | self.plan.arrays.words(self.gmem.arrays, self.b, head.n, self.number, number)
        streamed = number * self.plan.tile + self.first_streamed
        return TilePlace(self.b, head.n, self.start, streamed, is_boundary, scalars, head.dropout)

    def _probabilities(self, at, s, slot):
        """(the tile, P)"""
        plan, scale = self.plan, self.plan.problem.scale
        tile = TileOfLogits.of(plan, at, lambda a: self._array(a, slot, s.shape))
        neg_lse = self._statistic("neg_lse", slot, s.shape)
        if plan.problem.score is None:  # in units of log 2
            p = jnp.exp2(s * (scale * LOG2E) + neg_lse)
        else:
            y, factor = tile.scores(s, scale)
            # In this order: a bias such as -1e10 in the place of a mask leaves no digits for a rounded product.
            p = jnp.exp2((y * factor + neg_lse) * LOG2E)
        return tile, tile.zero_where_masked(p)

    def _plus_gradients(self, at, gradients, sums):
        """`sums` plus the gradients of a tile. Those of arrays [T, S] are added in device memory."""
        if not gradients:
            return sums
        plan, scores = self.plan, self.plan.score_gradients
        by_array = dict(zip(scores.floats, gradients, strict=True))
        for i in scores.added:
            for first in range(0, plan.config.rows, ROWS):  # the skewed form has tiles of so many rows
                place = plan.added_place(i, at._replace(stationary=at.stationary + first), ROWS)
                self._add(self.gmem.added[i].at[place], by_array[i][first : first + ROWS])
        return tuple(old + by_array[i].sum(axis=1) for i, old in zip(scores.summed, sums, strict=True))

    def _add(self, gmem, x):
        if self.plan.interpret:  # each tile is added to once
            gmem[...] = x
        else:
            plgpu.atomic_add(gmem, x)

    def _store(self, sums):
        plan, kind = self.plan, self.plan.kind
        stores = []
        if kind.accumulates_pv:
            target = self._stationary("pv")
            target[...] = self._values_gradient(sums).astype(plan.problem.dtype)
            stores.append((plan.tiles.stationary_pv, target, "dv"))
        if kind.accumulates_qk:
            target = self._stationary("qk")
            target[...] = self._qk_gradient(sums).astype(plan.problem.dtype)
            stores.append((plan.tiles.stationary_qk, target, "dk" if kind.keys_stationary else "dq"))
        self.cta.meet()
        for store in stores:
            self._store_tile(*store)

    def _values_gradient(self, sums):
        dv, scale = self.mma.accumulated(sums.pv), self.plan.dropout_scale
        return dv if scale is None else dv * scale

    def _qk_gradient(self, sums):
        return self.mma.accumulated(sums.qk) * self.plan.qk_scale

    def _store_parts(self, sums):
        """Stores gradients in float32, from registers: the query heads are those of a part of a key head."""
        rows, kind = pl.ds(self.start, self.plan.config.rows), self.plan.kind

        def store(name, x):
            self.gmem.gradients[name][self.b, self.head, rows, self._own_columns(x.shape[1])] = x

        if kind.accumulates_pv:
            store("dv", self._values_gradient(sums))
        if kind.accumulates_qk:
            store("dk", self._qk_gradient(sums))

    def _own_columns(self, count):
        """Those of which this warpgroup holds the gradients, `count`."""
        return pl.ds(0, count)

    def _store_tile(self, tiles, source, name):
        tiles.store(self.cta.copies, source, self.gmem.gradients[name], self.b, self.start, self.head)

    def _slot(self, head, i):
        stages = self.plan.config.stages
        return lax.rem(i - head.first, jnp.int32(stages)) if stages > 1 else 0

    def _tile(self, head, i):
        """The number of the tile that step i visits."""
        listed = self.plan.visits.listed
        return self.plan.visits.list_of(self.gmem.visit_table, self.b, head.n, self.number).tile(i) if listed else i

    def _load_stationary(self):
        # Padding may hold NaN, which would meet the zeros of P and dS.
        length = self._stationary_length()
        for name in ("qk", "pv") if self.plan.kind.accumulates_qk else ("qk",):
            self._load_stationary_tile(name, length)
        if not self.plan.kind.keys_stationary:
            for name in ("neg_lse", "delta"):
                gmem = getattr(self.gmem, name).at[self.b, self.head]
                self._load_row(gmem, self.start, self.scratch[f"{name}_smem"].at[self.cta.wg])

    def _load_stationary_tile(self, name, length):
        tiles, gmem = getattr(self.plan.tiles, f"stationary_{name}"), getattr(self.gmem, f"stationary_{name}")
        head = self.plan.head_in_memory(self.head)
        tiles.load(self.cta.copies, gmem, self.b, self.start, head, self._stationary(name), length)

    def _load_row(self, gmem, first, smem):
        (count,), length = smem.shape, gmem.shape[0]
        limit = None if length % (count * self.plan.config.wgs) == 0 else length - first
        self.cta.copies.row(gmem.at[pl.ds(first, count)], smem, limit)

    def _load_streamed(self, head, i):
        plan, slot = self.plan, self._slot(head, i)
        first = self._tile(head, i) * plan.tile
        by_keys = plan.kind.keys_stationary
        of_head = head.n if by_keys else lax.div(head.n, jnp.int32(plan.problem.group))
        length = self._length(head.scalars, streamed=True)

        def load(name):
            tiles, gmem = getattr(plan.tiles, f"streamed_{name}"), getattr(self.gmem, f"streamed_{name}")
            tiles.load(self.cta.copies, gmem, self.b, first, of_head, self._streamed(name, slot), length)

        self.cta.only(0, lambda: load("qk"))
        self.cta.only(-1, lambda: load("pv"))
        if by_keys:
            for name in ("neg_lse", "delta") if plan.kind.accumulates_qk else ("neg_lse",):
                gmem, smem = getattr(self.gmem, name).at[self.b, head.n], self.scratch[f"{name}_smem"].at[slot]
                self.cta.only(0, lambda gmem=gmem, smem=smem: self._load_row(gmem, first, smem))
        for a in plan.arrays.streamed:
            self._load_array(head, a, first, slot)

    def _load_array(self, head, a, first, slot):
        array, wgs = self.plan.arrays[a], self.plan.config.wgs
        gmem, smem = self.gmem.arrays[a].at[array.index(self.b, head.n)], self._array_smem(a, slot)
        load = lambda: arrays.load(self.cta.copies, array, gmem, self.start, first + self.first_streamed, smem, wgs)
        if array.kind == "row" and not self.plan.kind.fused:  # all warpgroups read the same
            self.cta.only(0, load)
        else:
            load()

    def _array(self, a, slot, shape):
        return self.plan.arrays[a].load(self._array_smem(a, slot), shape, TILE)

    def _array_smem(self, a, slot):
        kind, wg = self.plan.arrays[a].kind, self.cta.wg
        row = (slot, wg) if self.plan.kind.fused else (slot,)
        return self.scratch[f"array{a}_smem"].at[dict(row=row, column=(wg,), tile=(slot, wg))[kind]]

    def _statistic(self, name, slot, shape):
        """-lse or -delta, broadcast to a tile."""
        by_keys = self.plan.kind.keys_stationary
        values = plgpu.load(self._statistic_ref(name, slot), layout=PER_COLUMN if by_keys else PER_ROW)
        return lax.broadcast_in_dim(values, shape, [1 if by_keys else 0])

    def _statistic_ref(self, name, slot):
        return self.scratch[f"{name}_smem"].at[slot if self.plan.kind.keys_stationary else self.cta.wg]

    def _scalars(self, n):
        """The arrays without positions, by number."""
        of = self.plan.arrays
        return {i: self.gmem.arrays[i][of[i].index(self.b, n)] for i in of.of_kind("scalar")}

    def _length(self, scalars, streamed) -> Any:
        """The length of the streamed or the stationary sequence; None where that is not shorter than its array."""
        plan = self.plan
        of_queries = plan.kind.keys_stationary == streamed
        _, mask = plan.arrays.with_scalars(scalars)
        lengths = lengths_of(mask)
        length = lengths.q_lengths if of_queries else lengths.kv_lengths
        return None if length is None else jnp.minimum(length, plan.streamed if streamed else plan.stationary)

    def _stationary_length(self) -> Any:
        """That of the stationary sequence: the longest of the query heads that share it."""
        group = self.plan.group
        lengths = lengths_of(self.plan.problem.mask).kv_lengths
        heads = group if lengths is not None and lengths.shape[1] > 1 else 1
        longest, *others = (self._length(self._scalars(self.head * group + g), streamed=False) for g in range(heads))
        for other in others:
            longest = jnp.maximum(longest, other)
        return longest
