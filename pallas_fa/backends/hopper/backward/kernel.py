"""What the threads of the backward kernel do.

In the memory warpgroup one warp loads: the block's own operands once, then those of the other sequence, row statistics
and arrays, step by step; one or two others add tiles of dQ to device memory. The compute warpgroups hold 64 keys each. In
a step they compute S^T = K Q^T and dP^T = V dO^T, whose accumulators start at -lse / scale and -delta, so that P = exp2(
scale log2(e) S) and dS = P dP without a subtraction; P^T and dS^T stay in registers as left operands of dV += P^T dO and
dK += dS^T Q. dS^T also goes through shared memory, as operand of dQ = dS K, which needs the keys of both warpgroups. A
pass for dQ alone is the same with the roles of the two sequences exchanged (see `Plan`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import masks
from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.hopper.backward import memory, work
from pallas_fa.backends.hopper.backward.plan import Plan
from pallas_fa.backends.hopper.backward.tile import PER_OTHER, PER_OWN, TILE, Step, TileOfLogits
from pallas_fa.backends.hopper.registers import anew
from pallas_fa.backends.hopper.tma import add_to_gmem, fence_async_proxy
from pallas_fa.backends.hopper.wgmma import Wgmma


def kernel(plan: Plan, *refs: Any, **scratch: Any) -> None:
    """The body: `refs` are the operands and results of a pass of `backward`, `scratch` is `plan.scratch()`."""
    gmem, c = memory.named(plan, refs), plan.config
    block = work.block_here(plan)
    wg = lax.axis_index("wg")
    compute_registers, memory_registers = c.registers

    @pl.when(wg < c.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        _Compute(plan, block, wg, gmem, scratch).run()
        if plan.fused:
            plan.barriers(scratch)["dq_free"].wait(wg)  # the last arrival, which no step waited for
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(wg == c.compute_wgs)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: memory.load(plan, block, gmem, scratch))
            if plan.fused:
                stores = (warp >= 1) & (warp <= plan.store_warps)
                pl.when(stores)(lambda: memory.store_dq(plan, block, warp - 1, gmem, scratch))


class _Compute:
    """One compute warpgroup: its 64 positions against every visited tile of the other sequence."""

    def __init__(self, plan, block, wg, gmem, scratch):
        self.plan, self.block, self.wg, self.gmem, self.scratch = plan, block, wg, gmem, scratch
        self.wgmma = Wgmma(plan.interpret)
        self.barriers = plan.barriers(scratch)
        self.rows = pl.ds(wg * 64, 64)
        matrix = lambda name: getattr(plan, name).views(scratch[f"{name}_smem"])[0]
        self.own_a, self.other_a, self.other_b = (matrix(name) for name in ("own_a", "other_a", "other_b"))
        self.own_b = matrix("own_b") if "own_b_smem" in scratch else self.own_a

    def run(self):
        plan, scratch = self.plan, self.scratch
        plgpu.barrier_wait(scratch["own_a_ready"])
        if plan.zeroes_own:
            self._zero_own()
        if plan.gives_a:
            plgpu.barrier_wait(scratch["own_b_ready"])
        given = [tiles for tiles, gives in ((plan.own_a, plan.gives_a), (plan.own_b, plan.gives_b)) if gives]

        def steps(*accs):
            a_accs = accs[: plan.own_a.chunks] if plan.gives_a else ()
            b_accs = accs[len(a_accs) :]
            if plan.by_tile:
                self._all_heads(a_accs, b_accs)
            else:
                work.for_heads(plan, self.block, lambda n, done: self._head(n, done, a_accs, b_accs))
            return tuple(acc[...] for acc in accs)

        stand_ins = []
        for name, tiles, gives in (("a", plan.own_a, plan.gives_a), ("b", plan.own_b, plan.gives_b)):
            if plan.interpret and gives:
                stand_ins += [scratch[f"d_{name}_stand_in"].at[self.wg, i] for i in range(tiles.chunks)]
        shapes = [(64, tiles.chunk) for tiles in given for _ in range(tiles.chunks)]
        results = list(self.wgmma.across_loops(steps, stand_ins, *shapes))
        d_a = [results.pop(0) for _ in range(plan.own_a.chunks)] if plan.gives_a else None
        self._store(d_a, results)

    def _store(self, d_a, d_b):
        """Stores the gradients of the own operands through their shared memory."""
        plan, block, dtype = self.plan, self.block, self.plan.problem.dtype
        stores = []
        if d_b:
            for i, x in enumerate(d_b):  # no other warpgroup reads these rows
                self.own_b[i, self.rows] = x.astype(dtype)
            smem = "own_b_smem" if "own_b_smem" in self.scratch else "own_a_smem"
            stores.append((plan.own_b, smem, self.gmem.gradients["dv"]))
        if d_a:
            if plan.fused:
                self.barriers["wgs_meet"].wait()  # from here on nobody reads keys
            for i, x in enumerate(d_a):
                self.own_a[i, self.rows] = (x * plan.problem.scale).astype(dtype)
            stores.append((plan.own_a, "own_a_smem", self.gmem.gradients["dk" if plan.by_keys else "dq"]))
        plgpu.commit_smem()
        for tiles, smem, gmem in stores:
            copied = tiles.views(self.scratch[smem])[1].at[:, self.rows]
            tiles.store(copied, gmem, block.b, pl.ds(block.start + self.wg * 64, 64), block.head)

    def _all_heads(self, a_accs, b_accs):
        """All steps, tile after tile."""
        plan, block = self.plan, self.block
        visits = work.visits_of_warpgroup(plan, block, self.gmem.visit_table, None, self.wg)
        at_start, at_end = (visits.first, visits.full_first), (visits.full_last, visits.last)
        either = lambda down, up: (jnp.where(block.down, d, u) for d, u in zip(down, up, strict=True))
        done = jnp.int32(0)
        for (start, end), is_cut in (
            (either(at_end, at_start), True),
            ((visits.full_first, visits.full_last), False),
            (either(at_start, at_end), True),
        ):

            def step(tile, n, before, is_cut=is_cut):
                at = Step(block.b, n, block.start + self.wg * 64, tile * plan.config.width, self.wg, is_cut, {})
                self._step(at, before, (), a_accs, b_accs)

            done = work.for_tiles(plan, block, start, end, done, step)

    def _head(self, n, done, a_accs, b_accs):
        """All steps of query head n; `done`: steps before, of other heads. Returns the steps after."""
        plan, block, table = self.plan, self.block, self.gmem.visit_table
        first, last = work.visits_of_block(plan, block, table, n)
        own = work.visits_of_warpgroup(plan, block, table, n, self.wg)
        scalars = self._scalars(n)
        sums = tuple(plgpu.layout_cast(jnp.zeros((64,), jnp.float32), PER_OWN) for _ in plan.summed)

        # Loops from 0 take fewer registers. Tried: the tiles that the mask cuts first, in one loop, then the others in a
        # second; it was 4 to 10% slower than three loops where both ends are cut.
        def over(start, end, step, sums):
            """step(tile, steps before it, sums) over tiles [start, end)."""
            if schedule.is_equal(start, end):
                return sums
            before = done + (start - first)
            return lax.fori_loop(0, end - start, lambda i, sums: step(start + i, before + i, sums), sums)

        def run(start, end, is_cut, sums):
            def step(tile, before, sums):
                other = work.turned(plan, block, tile) * plan.config.width
                at = Step(block.b, n, block.start + self.wg * 64, other, self.wg, is_cut, scalars)
                return self._step(at, before, sums, a_accs, b_accs)

            return over(start, end, step, sums)

        def sit_out(start, end):
            if plan.shares > 1:
                over(start, end, lambda tile, before, _: self._sit_out_step(before), None)

        sit_out(first, own.first)
        sums = run(own.first, own.full_first, True, sums)
        sums = run(own.full_first, own.full_last, False, sums)
        sums = run(own.full_last, own.last, True, sums)
        sit_out(own.last, last)
        if sums:
            self._store_sums(n, sums)
        return done + (last - first)

    def _store_sums(self, n, sums):
        """Stores gradients of arrays, one value per own position."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, x in zip(self.plan.summed, sums, strict=True):
            self.scratch[f"gradient{i}_smem"][self.wg] = x
        plgpu.commit_smem()
        for i in self.plan.summed:
            own = pl.ds(self.block.start + self.wg * 64, 64)
            smem = self.scratch[f"gradient{i}_smem"].at[self.wg]
            plgpu.copy_smem_to_gmem(smem, self.gmem.summed[i].at[self.block.b, n, own])

    def _step(self, at, done, sums, a_accs, b_accs):
        """One tile of the other sequence: adds to the accumulators, to `sums` (returned) and, through memory, to dQ."""
        plan, wgmma = self.plan, self.wgmma
        wg = anew(self.wg, plan.interpret)
        rows = pl.ds(wg * 64, 64)
        slot_a, slot_b = self._arrived(done)
        other_a, other_b = self.other_a.at[slot_a], self.other_b.at[slot_b]
        if plan.zeroes_other and at.cut:
            self._zero_other(at, other_a, other_b)

        p, ds, sums = self._logits(at, rows, slot_a, slot_b, other_a, other_b, sums)
        release_a, release_b = self._releases(slot_a, slot_b)
        if not plan.fused:
            wgmma.weighted_sums(b_accs, p, other_b)
            wgmma.weighted_sums(a_accs, ds, other_a)
            wgmma.wait(len(a_accs))
            release_b()
            wgmma.wait(0)
            release_a()
            return sums

        ds_smem = self._ds_smem(done)
        # For dV first: measured better where the mask cuts, worse where it does not.
        dv_first = plan.problem.mask is not None
        if dv_first:
            wgmma.weighted_sums(b_accs, p, other_b)
        ds_smem[rows] = ds
        if not dv_first:
            wgmma.weighted_sums(b_accs, p, other_b)
        fence_async_proxy(plan.interpret)
        self.barriers["wgs_meet"].wait()
        self._add_dq(wg, done, ds_smem, a_accs, ds, other_a, release_b)
        wgmma.wait(0)  # dK is done
        release_a()
        return sums

    def _sit_out_step(self, done):
        """A tile that only the other warpgroups visit: this one takes its part in dQ, as if its own dS were 0."""
        plan = self.plan
        release_a, release_b = self._releases(*self._arrived(done))
        if plan.fused:
            wg = anew(self.wg, plan.interpret)
            ds_smem = self._ds_smem(done)
            zeros = jnp.zeros((64, plan.config.width), plan.problem.dtype)
            ds_smem[pl.ds(wg * 64, 64)] = plgpu.layout_cast(zeros, TILE)
            fence_async_proxy(plan.interpret)
            self.barriers["wgs_meet"].wait()
            self._add_dq(wg, done, ds_smem, (), None, None, release_b)
        else:
            release_b()
        release_a()

    def _arrived(self, done):
        """The slots of tile `done` of both operands, which are there."""
        slots = tuple(lax.rem(done, jnp.int32(stages)) for stages in self.plan.config.stages)
        for name, slot in zip(("other_a_ready", "other_b_ready"), slots, strict=True):
            plgpu.barrier_wait(self.scratch[name].at[slot])
        return slots

    def _releases(self, *slots):
        """What to call once a tile of the first, of the second operand is not read any more."""
        return [
            lambda name=name, slot=slot: self.barriers[name].arrive(slot)
            for name, slot in zip(("other_a_free", "other_b_free"), slots, strict=True)
        ]

    def _ds_smem(self, done):
        """Where step `done` puts dS; nobody reads it any more."""
        c = self.plan.config
        if c.ds_stages == 1 and c.compute_wgs > 1:
            self.barriers["wgs_meet"].wait()
        return self.scratch["ds_smem"].at[lax.rem(done, jnp.int32(c.ds_stages))]

    def _add_dq(self, wg, done, ds_smem, a_accs, ds, other_a, release_b):
        """dQ = dS K, staged for a store warp, and under it the matmul of dK, which stays under way."""
        plan, wgmma, wgs = self.plan, self.wgmma, self.plan.config.compute_wgs
        if plan.dq_by_rows:
            ds_smem = ds_smem.at[:, pl.ds(wg * 64, 64)] if wgs > 1 else ds_smem
            keys = [self.own_a.at[i] for i in range(plan.own_a.chunks)]
        elif plan.own_a.chunks > 1:
            keys = [self.own_a.at[wg]]
        else:
            keys = [self.own_a.at[0, :, pl.ds(wg * plan.dq_columns, plan.dq_columns)]]

        def dq(*dq_accs):
            for acc, k in zip(dq_accs, keys, strict=True):
                wgmma.matmul(acc, ds_smem, k, transpose_a=True)
            wgmma.wait(len(keys))  # dV is done
            release_b()
            wgmma.weighted_sums(a_accs, ds, other_a)
            return tuple(wgmma.result(acc, len(a_accs)) for acc in dq_accs)

        parts = wgmma.scoped(dq, *((64, k.shape[1]) for k in keys))
        self.barriers["dq_free"].wait(wg)
        for i, x in enumerate(parts):
            self.scratch["dq_smem"][wg, :, i * x.shape[1] : (i + 1) * x.shape[1]] = x
        fence_async_proxy(plan.interpret)
        self.barriers["dq_ready"].arrive(lax.rem(done, jnp.int32(self.plan.store_warps)) * wgs + wg)

    def _logits(self, at, rows, slot_a, slot_b, other_a, other_b, sums):
        """(P, dS) as operands of matmuls, None where not needed, and `sums` with the gradients of this tile."""
        plan, wgmma, scratch = self.plan, self.wgmma, self.scratch
        shape, dtype = (64, plan.config.width), plan.problem.dtype

        def statistic(name, slot):
            smem = scratch[f"{name}_smem"]
            if plan.by_keys:
                return lax.broadcast_in_dim(plgpu.load(smem.at[slot], layout=PER_OTHER), shape, [1])
            return lax.broadcast_in_dim(plgpu.load(smem.at[0, rows], layout=PER_OWN), shape, [0])

        def body(s_acc, dp_acc: Any = None):
            # Both start before the first matmul: ptxas would make them wait for it.
            if not plan.scored:
                s_acc[...] = statistic("start", slot_a)
            if plan.gives_a:
                dp_acc[...] = statistic("delta", slot_b)
            wgmma.inner_products(s_acc, [self.own_a.at[i, rows] for i in range(plan.own_a.chunks)], other_a)
            if plan.gives_a:
                own_b = [self.own_b.at[i, rows] for i in range(plan.own_b.chunks)]
                wgmma.inner_products(dp_acc, own_b, other_b)
            s = wgmma.result(s_acc, plan.own_b.chunks if plan.gives_a else 0)
            tile = TileOfLogits.load(plan, at, self.gmem.arrays, scratch, slot_a)
            if plan.scored:
                x = s * plan.problem.scale
                # In this order: a bias such as -1e10 in place of a mask leaves no digits for a rounded product.
                p = jnp.exp2((tile.scores(x) + statistic("start", slot_a)) * LOG2E)
            else:
                x, p = None, jnp.exp2(s * (plan.problem.scale * LOG2E))
            p = tile.zero_where_masked(p)
            p_operand = p.astype(dtype) if plan.gives_b else None
            if not plan.gives_a:
                return p_operand, None, sums
            ds = p * wgmma.result(dp_acc, 0)
            if plan.has_padding or plan.scored:
                ds = tile.zero_where_masked(ds)  # behind the mask there may be NaN, and 0 * NaN is NaN
            new_sums = sums
            if plan.problem.score is not None:
                ds, *gradients = map(tile.zero_where_masked, tile.pullback(x, ds))
                new_sums = self._add_gradients(at, gradients, sums)
            return p_operand, ds.astype(dtype), new_sums

        return wgmma.scoped(body, *(shape,) * (2 if plan.gives_a else 1))

    def _add_gradients(self, at, gradients, sums):
        """`sums` with the gradients of a tile; those of tiles are added in device memory."""
        plan = self.plan
        by_array = dict(zip(plan.float_arrays, gradients, strict=True))
        sums = tuple(old + by_array[i].sum(axis=1) for i, old in zip(plan.summed, sums, strict=True))
        if not plan.added:
            return sums
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in plan.added:
            self.scratch[f"gradient{i}_smem"][self.wg] = by_array[i]
        plgpu.commit_smem()
        for i in plan.added:
            lead = (at.b, at.n) if plan.interpret else plan.arrays[i].index(at.b, at.n)
            target = self.gmem.added[i].at[(*lead, pl.ds(at.own, 64), pl.ds(at.other, plan.config.width))]
            add_to_gmem(self.scratch[f"gradient{i}_smem"].at[self.wg], target, plan.interpret)
        return sums

    # ---- padding ----

    def _scalars(self, n):
        """Arrays without positions, for query head n."""
        return {i: self.gmem.arrays[i][self.plan.arrays[i].index(self.block.b, n)] for i in self.plan.of_kind("scalar")}

    def _lengths(self, n):
        scalars = self._scalars(n)
        _, mask = jax.tree.unflatten(self.plan.tree, [scalars.get(i) for i in range(len(self.plan.arrays))])
        return masks.lengths_of(mask)

    def _zero_own(self):
        """Zeroes keys past the key length, the longest of the group."""
        group = self.plan.problem.group
        per_head = masks.lengths_of(self.plan.problem.mask).kv_lengths.shape[1] > 1
        lengths = [self._lengths(self.block.head * group + g).kv_lengths for g in range(group if per_head else 1)]
        length = lengths[0]
        for other in lengths[1:]:
            length = jnp.maximum(length, other)
        start = self.block.start

        @pl.when(start + self.plan.config.block > length)
        def _():
            self._zero_rows(self.own_a, self.plan.own_a, self.wg * 64, length - start)
            plgpu.commit_smem()
            self.barriers["wgs_meet"].wait()

    def _zero_other(self, at, other_a, other_b):
        """Zeroes a tile's rows past the length of their sequence, of right operands of matmuls that sum over them."""
        plan, c = self.plan, self.plan.config
        lengths = self._lengths(at.n)
        length = lengths.q_lengths if plan.by_keys else lengths.kv_lengths

        @pl.when(at.other + c.width > length)
        def _():
            for ref, tiles, gives in ((other_a, plan.other_a, plan.gives_a), (other_b, plan.other_b, plan.gives_b)):
                for part in range(c.width // 64 if gives else 0):  # the warpgroups take turns
                    mine = self.wg == part % c.compute_wgs
                    zero = lambda ref=ref, tiles=tiles, part=part: self._zero_rows(
                        ref, tiles, part * 64, length - at.other
                    )
                    pl.when(mine)(zero) if c.compute_wgs > 1 else zero()
            plgpu.commit_smem()
            self.barriers["wgs_meet"].wait()

    @staticmethod
    def _zero_rows(ref, tiles, first, length):
        """Zeroes rows at and past `length` among the 64 rows from row `first` of a tile."""
        for chunk in range(tiles.chunks):
            for column in range(0, tiles.chunk, 64):
                piece = ref.at[chunk, pl.ds(first, 64), pl.ds(column, 64)]
                row = first + plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=TILE)
                values = plgpu.load(piece, layout=TILE)
                piece[...] = jnp.where(row < length, values, jnp.zeros((), values.dtype))
