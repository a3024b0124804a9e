"""What the threads of the backward kernel do.

In the memory warpgroup one warp loads: keys and values once, then queries, gradients of the output, row statistics and
arrays, step by step; another adds tiles of dQ to device memory. The compute warpgroups hold 64 keys each. In a step they
compute S^T = K Q^T and dP^T = V dO^T, whose accumulators start at -lse / scale and -delta, so that P = exp2(scale log2(e)
S) and dS = P dP without a subtraction; P^T and dS^T stay in registers as left operands of dV += P^T dO and dK += dS^T Q.
dS^T also goes through shared memory, as operand of dQ = dS K, which needs the keys of both warpgroups.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import masks
from pallas_fa.mosaic_gpu import elementwise, schedule
from pallas_fa.mosaic_gpu.backward_plan import Plan
from pallas_fa.mosaic_gpu.backward_preprocess import LOG2E
from pallas_fa.scores import float_arrays, with_float_arrays

_TILE, _PER_KEY, _PER_QUERY = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class _Work(NamedTuple):
    """What one block of threads does: batch entry, key head, block of keys, and its first key."""

    b: Any
    kv_head: Any
    block: Any
    s0: Any


class _Refs(NamedTuple):
    """Device memory. `arrays`: of score and mask, then the visit table; `added`: their gradients and dQ's sums."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    start: Any
    delta: Any
    arrays: tuple[Any, ...]
    dq: Any
    added: dict[int, Any]
    dk: Any
    dv: Any
    summed: dict[int, Any]


def kernel(plan: Plan, section: int, *refs: Any, **scratch: Any) -> None:
    """The body: `refs` are the operands and results of `backward`, `scratch` is `plan.scratch()`."""
    gmem = _named(plan, refs)
    head = lax.axis_index("heads") * section + lax.axis_index("head_in_section")
    heads, block = jnp.int32(plan.problem.K), lax.axis_index("block")
    work = _Work(lax.div(head, heads), lax.rem(head, heads), block, block * plan.config.block_kv)
    wg = lax.axis_index("wg")
    compute_registers, memory_registers = plan.config.registers

    @pl.when(wg < plan.config.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        _Compute(plan, work, wg, gmem, scratch).run()

    @pl.when(wg == plan.config.compute_wgs)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: _load(plan, work, gmem, scratch))
            pl.when(warp == 1)(lambda: _store(plan, work, gmem, scratch))


def _named(plan, refs):
    arrays = len(plan.arrays) + plan.visit_table
    operands, refs = refs[:6], refs[6:]
    arrays, (dq, *rest) = refs[:arrays], refs[arrays:]
    added, (dk, dv, *summed) = rest[: len(plan.added)], rest[len(plan.added) :]
    return _Refs(
        *operands, arrays, dq, dict(zip(plan.added, added, strict=True)), dk, dv,
        dict(zip(plan.summed, summed, strict=True)),
    )  # fmt: skip


def _visits(plan, work, gmem, n) -> schedule.Visits:
    """Tiles of queries of head n that the block's keys are seen by."""
    dims, c, mask = plan.problem.dims, plan.config, plan.problem.mask
    ragged_keys = dims.S % c.block_kv
    # The statistics of rows past the end make their probabilities 0, whatever the mask; a score could make NaN there.
    size = dims.T if plan.scored else plan.padded(dims.T, c.block_q)
    if plan.visit_table:
        table = gmem.arrays[-1]
        at = zip((work.b, n, work.block), table.shape, strict=False)
        at = tuple(i if extent > 1 else 0 for i, extent in at)
        return schedule.Visits(*(table[(*at, i)] for i in range(4)))
    if mask is None:
        visited = full = (0, size)
    else:
        keys = work.s0, jnp.minimum(work.s0 + c.block_kv, dims.S)
        visited, full = mask.q_range(*keys), mask.full_q_range(*keys)
    if ragged_keys:  # in the last block no tile is full: its tail holds no keys
        full = full[0], jnp.where(work.block == plan.blocks - 1, full[0], full[1])
    return schedule.visits(visited, full, size, c.block_q, 0)


def _for_heads(plan, work, body) -> Any:
    """`body(n, steps before)` -> steps after, for each query head of the group; returns the number of all steps."""
    group = plan.problem.group
    first = work.kv_head * group
    return lax.fori_loop(0, group, lambda g, done: body(first + g, done), jnp.int32(0)) if group > 1 else body(first, jnp.int32(0))


def _load(plan, work, gmem, scratch):
    """The load warp."""
    c, b = plan.config, work.b
    (_, q_smem), (_, do_smem) = plan.q.views(scratch["q_smem"]), plan.d_out.views(scratch["do_smem"])
    (_, k_smem), (_, v_smem) = plan.k.views(scratch["k_smem"]), plan.v.views(scratch["v_smem"])
    q_ready, do_ready, q_free, do_free = (scratch[x] for x in ("q_ready", "do_ready", "q_free", "do_free"))
    load = plgpu.copy_gmem_to_smem
    keys = pl.ds(work.s0, c.block_kv)
    plan.k.load(gmem.k, b, keys, work.kv_head, k_smem, scratch["k_ready"])
    plan.v.load(gmem.v, b, keys, work.kv_head, v_smem, scratch["v_ready"])

    def load_array(a, n, slot, queries):
        array, smem = plan.arrays[a], scratch[f"array{a}_smem"].at[slot]
        source, ready = gmem.arrays[a].at[array.index(b, n)], q_ready.at[slot]
        if array.kind != "tile":
            load(source.at[queries if array.kind == "row" else keys], smem, ready)
            return
        for wg in range(c.compute_wgs):
            load(source.at[pl.ds(work.s0 + wg * 64, 64), queries], smem.at[wg], ready)

    def head(n, done):
        found = _visits(plan, work, gmem, n)

        def step(tile, done):
            slot, queries = lax.rem(done, jnp.int32(c.stages)), pl.ds(tile * c.block_q, c.block_q)

            @pl.when(done >= c.stages)
            def _():
                plgpu.barrier_wait(q_free.at[slot])

            plan.q.load(gmem.q, b, queries, n, q_smem.at[slot], q_ready.at[slot])
            load(gmem.start.at[b, n, queries], scratch["start_smem"].at[slot], q_ready.at[slot])
            for a in plan.of_kind("row", "column", "tile"):
                load_array(a, n, slot, queries)

            @pl.when(done >= c.stages)
            def _():
                plgpu.barrier_wait(do_free.at[slot])

            plan.d_out.load(gmem.d_out, b, queries, n, do_smem.at[slot], do_ready.at[slot])
            load(gmem.delta.at[b, n, queries], scratch["delta_smem"].at[slot], do_ready.at[slot])
            return done + 1

        return lax.fori_loop(found.first, found.last, step, done)

    steps = _for_heads(plan, work, head)
    for slot in range(c.stages):  # every completed phase of a barrier is waited for before the block ends

        @pl.when(slot < steps)
        def _(slot=slot):
            plgpu.barrier_wait(q_free.at[slot])
            plgpu.barrier_wait(do_free.at[slot])


def _store(plan, work, gmem, scratch):
    """The store warp: adds the tiles of dQ that the compute warpgroups stage."""
    c = plan.config
    dq_smem, dq_ready, dq_free = scratch["dq_smem"], scratch["dq_ready"], scratch["dq_free"]
    for wg in range(c.compute_wgs):
        plgpu.barrier_arrive(dq_free.at[wg])

    def head(n, done):
        found = _visits(plan, work, gmem, n)

        def step(tile, done):
            for wg in range(c.compute_wgs):
                plgpu.barrier_wait(dq_ready.at[wg])
                row = tile * c.block_q + (wg * 64 if plan.by_rows else 0)
                column = 0 if plan.by_rows else wg * plan.dq_columns
                dq = gmem.dq.at[work.block] if plan.interpret else gmem.dq
                dq = dq.at[work.b, pl.ds(row, plan.dq_rows), n, pl.ds(column, plan.dq_columns)]
                plan.tensor_core.store_add(dq_smem.at[wg], dq)
            for wg in range(c.compute_wgs):
                plgpu.wait_smem_to_gmem(c.compute_wgs - 1 - wg, wait_read_only=True)
                plgpu.barrier_arrive(dq_free.at[wg])
            return done + 1

        return lax.fori_loop(found.first, found.last, step, done)

    _for_heads(plan, work, head)
    plgpu.wait_smem_to_gmem(0)


class _Compute:
    """One compute warpgroup: 64 keys against every visited tile of queries."""

    def __init__(self, plan, work, wg, gmem, scratch):
        self.plan, self.work, self.wg, self.gmem, self.scratch = plan, work, wg, gmem, scratch
        self.core = plan.tensor_core
        self.keys = pl.ds(wg * 64, 64)
        self.q, self.do, self.k, self.v = (
            tiles.views(scratch[name])[0]
            for tiles, name in ((plan.q, "q_smem"), (plan.d_out, "do_smem"), (plan.k, "k_smem"), (plan.v, "v_smem"))
        )

    def run(self):
        plan, scratch = self.plan, self.scratch
        plgpu.barrier_wait(scratch["k_ready"])
        if plan.zeroes_keys:
            self._zero_keys()
        plgpu.barrier_wait(scratch["v_ready"])

        def steps(*accs):
            dk_accs, dv_accs = accs[: plan.k.chunks], accs[plan.k.chunks :]
            _for_heads(plan, self.work, lambda n, done: self._head(n, done, dk_accs, dv_accs))
            return tuple(acc[...] for acc in accs)

        stand_ins = []
        if plan.interpret:
            stand_ins = [scratch["dk_stand_in"].at[self.wg, i] for i in range(plan.k.chunks)]
            stand_ins += [scratch["dv_stand_in"].at[self.wg, i] for i in range(plan.v.chunks)]
        shapes = ((64, plan.k.chunk),) * plan.k.chunks + ((64, plan.v.chunk),) * plan.v.chunks
        results = self.core.across_loops(steps, stand_ins, *shapes)
        self._store(results[: plan.k.chunks], results[plan.k.chunks :])

    def _store(self, dk, dv):
        """Stores dK and dV through the shared memory of keys and values."""
        plan, work = self.plan, self.work
        for i, x in enumerate(dv):  # no other warpgroup reads these values
            self.v[i, self.keys] = x.astype(plan.problem.dtype)
        self._meet()  # from here on nobody reads keys
        for i, x in enumerate(dk):
            self.k[i, self.keys] = (x * plan.problem.scale).astype(plan.problem.dtype)
        plgpu.commit_smem()
        rows = pl.ds(work.s0 + self.wg * 64, 64)
        for tiles, smem, gmem in ((plan.v, "v_smem", self.gmem.dv), (plan.k, "k_smem", self.gmem.dk)):
            copied = tiles.views(self.scratch[smem])[1]
            tiles.store(copied.at[:, self.keys], gmem, work.b, rows, work.kv_head)
        plgpu.barrier_wait(self.scratch["dq_free"].at[self.wg])  # the last completion, which no step waited for
        plgpu.wait_smem_to_gmem(0)

    def _meet(self):
        """Waits for the other compute warpgroups."""
        plgpu.barrier_arrive(self.scratch["wgs_meet"])
        plgpu.barrier_wait(self.scratch["wgs_meet"])

    def _head(self, n, done, dk_accs, dv_accs):
        """All steps of query head n; `done`: steps before, of other heads. Returns the steps after."""
        plan, work = self.plan, self.work
        found = _visits(plan, work, self.gmem, n)
        scalars = {i: self.gmem.arrays[i][plan.arrays[i].index(work.b, n)] for i in plan.of_kind("scalar")}
        zero = lambda: plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _PER_KEY)
        sums = tuple(zero() for _ in plan.summed)

        def run(first, last, cut, sums):
            def step(tile, sums):
                at = _Step(n, tile, done + (tile - found.first), cut, scalars)
                return self._step(at, sums, dk_accs, dv_accs)

            return lax.fori_loop(first, last, step, sums)

        if not schedule.is_equal(found.first, found.full_first):
            sums = run(found.first, found.full_first, True, sums)
        sums = run(found.full_first, found.full_last, False, sums)
        if not schedule.is_equal(found.full_last, found.last):
            sums = run(found.full_last, found.last, True, sums)
        if sums:
            self._store_sums(n, sums)
        return done + (found.last - found.first)

    def _store_sums(self, n, sums):
        """Stores gradients of arrays with one value per key."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, x in zip(self.plan.summed, sums, strict=True):
            self.scratch[f"gradient{i}_smem"][self.wg] = x
        plgpu.commit_smem()
        for i in self.plan.summed:
            keys = pl.ds(self.work.s0 + self.wg * 64, 64)
            smem = self.scratch[f"gradient{i}_smem"].at[self.wg]
            plgpu.copy_smem_to_gmem(smem, self.gmem.summed[i].at[self.work.b, n, keys])

    def _step(self, at, sums, dk_accs, dv_accs):
        """One tile of queries: adds to dK, dV, the sums of array gradients (returned) and, through memory, to dQ."""
        plan, core, scratch, c = self.plan, self.core, self.scratch, self.plan.config
        slot, ds_slot = lax.rem(at.done, jnp.int32(c.stages)), lax.rem(at.done, jnp.int32(c.ds_stages))
        q, do = self.q.at[slot], self.do.at[slot]
        plgpu.barrier_wait(scratch["q_ready"].at[slot])
        plgpu.barrier_wait(scratch["do_ready"].at[slot])
        if plan.zeroes_queries and at.cut:
            self._zero_queries(at, q, do)

        p, ds, sums = self._logits(at, slot, q, do, sums)

        if c.ds_stages == 1 and c.compute_wgs > 1:
            self._meet()  # nobody reads the last step's dS any more
        ds_smem = scratch["ds_smem"].at[ds_slot]
        # For dV first: measured better where the mask cuts, worse where it does not.
        dv_first = plan.problem.mask is not None
        if dv_first:
            self._times(dv_accs, p, do)
        ds_smem[self.keys] = ds
        if not dv_first:
            self._times(dv_accs, p, do)
        plgpu.commit_smem()
        self._meet()

        chunks = 1 if not plan.by_rows and c.compute_wgs > 1 else plan.k.chunks
        widths = (plan.dq_columns // chunks,) * chunks

        def dq(*dq_accs):
            self._issue_dq(dq_accs, ds_smem)
            core.wait(chunks)  # dV is done
            plgpu.barrier_arrive(scratch["do_free"].at[slot])
            self._times(dk_accs, ds, q)
            return tuple(core.result(acc, plan.q.chunks) for acc in dq_accs)

        parts = core.scoped(dq, *((plan.dq_rows, width) for width in widths))
        plgpu.barrier_wait(scratch["dq_free"].at[self.wg])
        for i, x in enumerate(parts):
            scratch["dq_smem"][self.wg, :, i * widths[0] : (i + 1) * widths[0]] = x
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["dq_ready"].at[self.wg])
        core.wait(0)  # dK is done
        plgpu.barrier_arrive(scratch["q_free"].at[slot])
        return sums

    def _times(self, accs, a, tiles):
        """accs += a tiles, chunk by chunk."""
        for i, acc in enumerate(accs):
            self.core.matmul(acc, a, tiles.at[i])

    def _issue_dq(self, accs, ds_smem):
        """This warpgroup's part of dQ = dS K."""
        plan, wgs = self.plan, self.plan.config.compute_wgs
        if plan.by_rows:
            ds_smem = ds_smem.at[:, pl.ds(self.wg * 64, 64)] if wgs > 1 else ds_smem
            for i, acc in enumerate(accs):
                self.core.matmul(acc, ds_smem, self.k.at[i], transpose_a=True)
            return
        if plan.k.chunks > 1:
            k = self.k.at[self.wg]
        else:
            k = self.k.at[0, :, pl.ds(self.wg * plan.dq_columns, plan.dq_columns)]
        self.core.matmul(accs[0], ds_smem, k, transpose_a=True)

    def _logits(self, at, slot, q, do, sums):
        """(P^T, dS^T) as operands of matmuls, and `sums` with the gradients of this tile."""
        plan, core, scratch = self.plan, self.core, self.scratch
        shape = (64, plan.config.block_q)
        per_query = lambda ref: lax.broadcast_in_dim(plgpu.load(ref, layout=_PER_QUERY), shape, [1])
        dtype = plan.problem.dtype

        def body(s_acc, dp_acc):
            # Both start before the first matmul: ptxas would make them wait for it.
            if not plan.scored:
                s_acc[...] = per_query(scratch["start_smem"].at[slot])
            dp_acc[...] = per_query(scratch["delta_smem"].at[slot])
            for i in range(plan.k.chunks):
                core.matmul(s_acc, self.k.at[i, self.keys], q.at[i], transpose_b=True)
            for i in range(plan.v.chunks):
                core.matmul(dp_acc, self.v.at[i, self.keys], do.at[i], transpose_b=True)
            s = core.result(s_acc, plan.v.chunks)
            tile = self._tile(at, slot, shape)
            if plan.scored:
                x = s * plan.problem.scale
                y = self._scores(at, tile, x)
                p = jnp.exp2(y * LOG2E + per_query(scratch["start_smem"].at[slot]))
            else:
                x = None
                p = jnp.exp2(s * (plan.problem.scale * LOG2E))
            if tile.ok is not None:
                p = jnp.where(tile.ok, p, 0.0)
            p_operand = p.astype(dtype)
            ds = p * core.result(dp_acc, 0)
            new_sums = sums
            if tile.ok is not None and (plan.scored or plan.zeroes_keys or plan.zeroes_queries):
                ds = jnp.where(tile.ok, ds, 0.0)  # behind the mask there may be NaN, and 0 * NaN is NaN
            if plan.problem.score is not None:
                ds, gradients = self._pullback(at, tile, x, ds)
                if tile.ok is not None:
                    ds, *gradients = (jnp.where(tile.ok, z, 0.0) for z in (ds, *gradients))
                new_sums = self._add_gradients(at, gradients, sums)
            return p_operand, ds.astype(dtype), new_sums

        return core.scoped(body, shape, shape)

    def _tile(self, at, slot, shape):
        """Indices, arrays and the mask of a tile; only what the step needs."""
        plan, dims = self.plan, self.plan.problem.dims
        if plan.problem.score is None and not at.cut:
            return _Tile(None, None, None, None)
        t = at.tile * plan.config.block_q + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TILE)
        s = self.work.s0 + self.wg * 64 + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_TILE)
        in_score = len(jax.tree.leaves(plan.problem.score))
        needed = [i < in_score or at.cut for i in range(len(plan.arrays))]
        loaded = [self._array(i, at, slot, shape, i < in_score) if need else None for i, need in enumerate(needed)]
        score, mask = jax.tree.unflatten(plan.tree, loaded)
        ok = None
        if at.cut:
            tests = []
            if dims.S % plan.config.block_kv:
                tests.append(s < dims.S)
            if plan.scored and dims.T % plan.config.block_q:
                tests.append(t < dims.T)
            if mask is not None:
                allowed = lambda t, s, mask: mask.allowed(self.work.b, at.n, t, s)
                tests.append(jnp.broadcast_to(elementwise.inline(allowed, t, s, mask), shape))
            for test in tests:
                ok = test if ok is None else ok & test
        return _Tile(t, s, score, ok)

    def _array(self, i, at, slot, shape, in_score):
        """Array i for this tile: broadcast to it, or a scalar of a mask."""
        array = self.plan.arrays[i]
        if array.kind == "scalar":
            x = array.restore(at.scalars[i])
            return lax.broadcast_in_dim(x, shape, []) if in_score else x
        smem = self.scratch[f"array{i}_smem"].at[slot]
        if array.kind == "row":
            return array.restore(lax.broadcast_in_dim(plgpu.load(smem, layout=_PER_QUERY), shape, [1]))
        if array.kind == "column":
            return array.restore(lax.broadcast_in_dim(plgpu.load(smem.at[self.keys], layout=_PER_KEY), shape, [0]))
        return array.restore(plgpu.load(smem.at[self.wg], layout=_TILE))

    def _scores(self, at, tile, x):
        if self.plan.problem.score is None:
            return x
        apply = lambda x, t, s, score: score.apply(x, self.work.b, at.n, t, s)
        return elementwise.inline(apply, x, tile.t, tile.s, tile.score)

    def _pullback(self, at, tile, x, dy):
        """(dx, gradients of the score's float arrays), float32 and of the tile's shape."""
        pullback = lambda x, dy, t, s, score: score_pullback(x, dy, self.work.b, at.n, t, s, score)
        dx, *gradients = elementwise.inline(pullback, x, dy, tile.t, tile.s, tile.score)
        return dx, gradients

    def _add_gradients(self, at, gradients, sums):
        """`sums` with the gradients of a tile; those of rows and tiles are added in device memory."""
        plan, work = self.plan, self.work
        by_array = dict(zip(plan.differentiated, gradients, strict=True))
        sums = tuple(old + by_array[i].sum(axis=1) for i, old in zip(plan.summed, sums, strict=True))
        if not plan.added:
            return sums
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in plan.added:
            x = by_array[i]
            self.scratch[f"gradient{i}_smem"][self.wg] = x if plan.arrays[i].kind == "tile" else x.sum(axis=0)
        plgpu.commit_smem()
        queries = pl.ds(at.tile * plan.config.block_q, plan.config.block_q)
        for i in plan.added:
            array, smem, gmem = plan.arrays[i], self.scratch[f"gradient{i}_smem"].at[self.wg], self.gmem.added[i]
            lead = (work.b, at.n) if plan.interpret else array.index(work.b, at.n)
            if array.kind == "row":
                # A row is the sum over all keys, so the interpreter, which can't add, keeps one for each warpgroup.
                lead = (work.block * plan.config.compute_wgs + self.wg, *lead) if plan.interpret else lead
                plan.tensor_core.store_add(smem, gmem.at[(*lead, queries)])
            else:
                plan.tensor_core.store_add(smem, gmem.at[(*lead, pl.ds(work.s0 + self.wg * 64, 64), queries)])
        return sums

    def _padding_lengths(self, n):
        scalars = {i: self.gmem.arrays[i][self.plan.arrays[i].index(self.work.b, n)] for i in self.plan.of_kind("scalar")}
        _, mask = jax.tree.unflatten(self.plan.tree, [scalars.get(i) for i in range(len(self.plan.arrays))])
        return masks.lengths_of(mask)

    def _zero_keys(self):
        """Zeroes keys past the key length, the longest of the group: there may be NaN, and dQ = dS K would spread it."""
        group = self.plan.problem.group
        per_head = masks.lengths_of(self.plan.problem.mask).kv_lengths.shape[1] > 1
        lengths = [self._padding_lengths(self.work.kv_head * group + g).kv_lengths for g in range(group if per_head else 1)]
        length = lengths[0]
        for other in lengths[1:]:
            length = jnp.maximum(length, other)
        start = self.work.s0

        @pl.when(start + self.plan.config.block_kv > length)
        def _():
            self._zero_rows(self.k, self.plan.k, self.wg * 64, 1, length - start)
            plgpu.commit_smem()
            self._meet()

    def _zero_queries(self, at, q, do):
        """Zeroes queries and gradients of the output past the query length in a tile."""
        c = self.plan.config
        length, start = self._padding_lengths(at.n).q_lengths, at.tile * c.block_q

        @pl.when(start + c.block_q > length)
        def _():
            each = c.block_q // 64 // c.compute_wgs
            for ref, tiles in ((q, self.plan.q), (do, self.plan.d_out)):
                if each:
                    self._zero_rows(ref, tiles, self.wg * 64 * each, each, length - start)
                else:  # one part of 64 rows for two warpgroups
                    pl.when(self.wg == 0)(lambda ref=ref, tiles=tiles: self._zero_rows(ref, tiles, 0, 1, length - start))
            plgpu.commit_smem()
            self._meet()

    @staticmethod
    def _zero_rows(ref, tiles, first, parts, length):
        """Zeroes rows at and past `length` in `parts` parts of 64 rows from row `first` of a tile."""
        for part in range(parts):
            for chunk in range(tiles.chunks):
                for column in range(0, tiles.chunk, 64):
                    rows = first + part * 64
                    piece = ref.at[chunk, pl.ds(rows, 64), pl.ds(column, 64)]
                    row = rows + plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_TILE)
                    values = plgpu.load(piece, layout=_TILE)
                    piece[...] = jnp.where(row < length, values, jnp.zeros((), values.dtype))


class _Step(NamedTuple):
    """Where a step is: query head, tile of queries, steps done before, whether the mask cuts it, scalar arrays."""

    n: Any
    tile: Any
    done: Any
    cut: bool
    scalars: dict[int, Any]


class _Tile(NamedTuple):
    """Positions [key, query], the score with its arrays for this tile, allowed pairs; None: not needed, or all."""

    t: Any
    s: Any
    score: Any
    ok: Any


def score_pullback(x: Any, dy: Any, b: Any, n: Any, t: Any, s: Any, score: Any) -> tuple[Any, ...]:
    """(dx, gradients of the score's float arrays), all float32 and of the shape of x, for a gradient dy of the result."""
    apply = lambda x, arrays: with_float_arrays(score, arrays).apply(x, b, n, t, s)
    # As float32, so that no gradient is rounded before it is summed.
    arrays = tuple(a.astype(jnp.float32) for a in float_arrays(score))
    dx, gradients = jax.vjp(apply, x, arrays)[1](dy)
    return dx, *gradients
