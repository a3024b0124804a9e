"""The forward kernel for Hopper (compute capability 9.0).

FlashAttention-3 (Shah et al., arXiv 2407.08608) in Pallas: one block of threads for each block of queries of one head.
One warpgroup loads keys and values by TMA into two rings; each of the others holds 64 queries and computes, step by
step, the logits of the next tile of keys on the tensor cores, and under the matmul P V of the tile before, their
softmax. The mask says which tiles are visited and which of them it cuts (`schedule.Visits`); only those are masked
element by element.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import masks, scores
from pallas_fa.mosaic_gpu import elementwise, schedule, tensor_core
from pallas_fa.mosaic_gpu.forward_plan import SUM_COLUMNS, ForwardPlan
from pallas_fa.problem import Problem

_LOG2E = math.log2(math.e)
_TILE, _PER_QUERY, _PER_KEY = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def forward(problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any, *, interpret: bool = False):
    """(out [B, T, N, Hv], log-sum-exp [B, T, N] float32). `interpret`: for JAX's GPU interpret mode."""
    plan = ForwardPlan.of(problem, score, mask, interpret)
    dims, config = problem.dims, plan.config
    blocks = -(-dims.T // config.block_q)
    section = 1 if mask is None else schedule.section(dims.B * dims.N, config.head_section)
    arrays = [a.in_memory(x) for a, x in zip(plan.arrays, jax.tree.leaves((score, mask)), strict=True)]
    if mask is not None and plan.visit_table:
        arrays.append(schedule.visit_table(mask, config.block_q, dims.T, dims.S, config.block_kv))

    def flash_attention_forward(*refs, **scratch):
        _kernel(plan, section, *refs, **scratch)

    out, lse = plgpu.kernel(
        flash_attention_forward,
        out_type=(
            jax.ShapeDtypeStruct((dims.B, dims.T, dims.N, problem.Hv), problem.dtype),
            jax.ShapeDtypeStruct((dims.B, dims.N, blocks * config.block_q), jnp.float32),
        ),
        grid=(dims.B * dims.N * _shares(plan),),  # one axis: only the first of CUDA's three may pass 65535
        grid_names=("block",),
        num_threads=config.compute_wgs + 1,
        thread_name="wg",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )(q, k, v, *arrays)
    return out, jnp.swapaxes(lse[:, :, : dims.T], 1, 2)


class _Work(NamedTuple):
    """What one block of threads does: its head, its first query, and its steps over tiles of keys.

    Step i visits tile `last - i`; steps [0, cut_end) and [full_end, steps) are cut by the mask, those between are not.
    `done` and `arrays_done` steps, of all and of those that used arrays, were for the block of queries before this one.
    """

    b: Any
    n: Any
    t0: Any
    last: Any
    cut_end: Any
    full_end: Any
    steps: Any
    done: Any
    arrays_done: Any


def _kernel(plan: ForwardPlan, section: int, q_gmem, k_gmem, v_gmem, *refs, **scratch):
    arrays_gmem, (out_gmem, lse_gmem) = refs[:-2], refs[-2:]
    for_blocks = functools.partial(_for_blocks, plan, section, arrays_gmem)
    wg = lax.axis_index("wg")
    wgs = plan.config.compute_wgs
    compute_registers, load_registers = plan.config.registers

    @pl.when(wg < wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        for_blocks(lambda work: _compute(plan, work, wg, arrays_gmem, out_gmem, lse_gmem, **scratch))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == wgs)
    def _():
        plgpu.set_max_registers(load_registers, action="decrease")
        done, arrays_done = for_blocks(lambda work: _load(plan, work, q_gmem, k_gmem, v_gmem, arrays_gmem, **scratch))
        _wait_for_the_rest(plan, done, arrays_done, scratch)


def _blocks(plan):
    """Blocks of queries of one head."""
    return -(-plan.problem.dims.T // plan.config.block_q)


def _shares(plan):
    """Into how many parts, each for one block of threads, the blocks of queries of one head are shared out."""
    return -(-_blocks(plan) // 2) if plan.paired else _blocks(plan)


def _for_blocks(plan, section, arrays_gmem, role):
    """Calls role(work) for each block of queries of this block of threads; returns (all steps, those that used arrays).

    A pair is one from the end and one from the start: under a causal mask, all pairs are then the same work.
    """
    rest, head_in_section = _divmod(lax.axis_index("block"), section)
    sections, share = _divmod(rest, _shares(plan))
    b, n = _divmod(sections * section + head_in_section, plan.problem.dims.N)
    from_end = _blocks(plan) - 1 - share

    def one(block, done, arrays_done):
        work = _work(plan, arrays_gmem, b, n, block, done, arrays_done)
        role(work)
        return done + work.steps, _array_step(plan, work, work.steps)

    if not plan.paired:
        # Under most masks later queries see more keys: longest first.
        return one(share if plan.problem.mask is None else from_end, 0, 0)
    count = jnp.where(share == from_end, 1, 2)
    start = jnp.int32(0), jnp.int32(0)
    return lax.fori_loop(0, count, lambda i, sums: one(jnp.where(i == 0, from_end, share), *sums), start)


def _work(plan, arrays_gmem, b, n, block, done, arrays_done) -> _Work:
    dims, c, mask = plan.problem.dims, plan.config, plan.problem.mask
    t0 = block * c.block_q
    if mask is None:
        everything = (0, dims.S)
        found = schedule.visits(everything, everything, dims.S, c.block_kv)
    elif plan.visit_table:
        table = arrays_gmem[-1]
        row = (b if table.shape[0] > 1 else 0, n if table.shape[1] > 1 else 0, block if table.shape[2] > 1 else 0)
        found = schedule.Visits(*(table[(*row, i)] for i in range(4)))
    else:
        queries = t0, jnp.minimum(t0 + c.block_q, dims.T)
        found = schedule.visits(mask.kv_range(*queries), mask.full_kv_range(*queries), dims.S, c.block_kv)
    if schedule.is_equal(found.full_last, found.last):  # nothing to the right of the full tiles: no step is cut
        cut_end = 0
    else:
        # The first step is compiled once, with the mask.
        cut_end = jnp.maximum(found.last - found.full_last, 1)
    steps = found.last - found.first
    if schedule.is_equal(found.full_first, found.first):
        full_end = steps
    else:
        full_end = jnp.maximum(found.last - found.full_first, cut_end)
    return _Work(b, n, t0, found.last - 1, cut_end, full_end, steps, done, arrays_done)


def _divmod(x, divisor):
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))


def _load(
    plan,
    work,
    q_gmem,
    k_gmem,
    v_gmem,
    arrays_gmem,
    *,
    q_smem,
    k_smem,
    v_smem,
    q_ready,
    k_ready,
    v_ready,
    k_free,
    v_free,
    **scratch,
):
    """The load warpgroup: queries once, then keys, arrays and values of every step."""
    c, b, n = plan.config, work.b, work.n
    kv_head = lax.div(n, jnp.int32(plan.problem.group))
    load = plgpu.copy_gmem_to_smem
    (_, q_smem), (_, k_smem), (_, v_smem) = plan.q.views(q_smem), plan.k.views(k_smem), plan.v.views(v_smem)

    def load_queries():
        for wg in range(c.compute_wgs):
            rows = pl.ds(work.t0 + wg * 64, 64)
            plan.q.load(q_gmem, b, rows, n, q_smem.at[wg], q_ready)
            for i in plan.columns:
                load(arrays_gmem[i].at[(*plan.arrays[i].index(b, n), rows)], scratch[f"array{i}_smem"].at[wg], q_ready)

    if not plan.paired:
        load_queries()

    def load_arrays(i, keys):
        """Rows and tiles of arrays for step i, where it uses them."""

        def go():
            step = _array_step(plan, work, i)
            slot = lax.rem(step, c.stages)
            _wait_free(plan, step, slot, scratch["arrays_free"])
            for a in plan.streamed:
                smem, lead = scratch[f"array{a}_smem"].at[slot], plan.arrays[a].index(b, n)
                if plan.arrays[a].kind == "row":
                    load(arrays_gmem[a].at[(*lead, keys)], smem, scratch["arrays_ready"].at[slot])
                    continue
                for wg in range(c.compute_wgs):
                    rows = pl.ds(work.t0 + wg * 64, 64)
                    load(arrays_gmem[a].at[(*lead, rows, keys)], smem.at[wg], scratch["arrays_ready"].at[slot])

        if plan.streamed and plan.arrays_always:
            go()
        elif plan.streamed:
            pl.when((i < work.cut_end) | (i >= work.full_end))(go)

    @pl.loop(0, work.steps)
    def _(i):
        step = work.done + i
        slot = lax.rem(step, c.stages)
        keys = pl.ds((work.last - i) * c.block_kv, c.block_kv)
        _wait_free(plan, step, slot, k_free)
        plan.k.load(k_gmem, b, keys, kv_head, k_smem.at[slot], k_ready.at[slot])
        if plan.paired:  # the first keys come before the block of queries before is done

            @pl.when(i == 0)
            def _():
                pl.when(work.done > 0)(lambda: plgpu.barrier_wait(scratch["q_free"]))
                load_queries()

        load_arrays(i, keys)
        _wait_free(plan, step, slot, v_free)
        load_v = functools.partial(plan.v.load, v_gmem, b, keys, kv_head, v_smem.at[slot])
        if not plan.zeroes_padding:
            load_v(v_ready.at[slot])
            return

        # The first tile reaches past the key length, if one does: it is announced once its padding is zeroed.
        @pl.when(i == 0)
        def _():
            load_v(scratch["v_loaded"])

        @pl.when(i > 0)
        def _():
            load_v(v_ready.at[slot])


def _wait_for_the_rest(plan, done, arrays_done, scratch):
    """Every completed phase of a barrier is waited for before the block ends."""
    for slot in range(plan.config.stages):

        @pl.when(slot < done)
        def _(slot=slot):
            plgpu.barrier_wait(scratch["k_free"].at[slot])
            plgpu.barrier_wait(scratch["v_free"].at[slot])

        if plan.streamed:

            @pl.when(slot < arrays_done)
            def _(slot=slot):
                plgpu.barrier_wait(scratch["arrays_free"].at[slot])

    if plan.paired:
        plgpu.barrier_wait(scratch["q_free"])


def _wait_free(plan, step, slot, free):
    """Before a ring's slot is loaded again, waits until all compute warpgroups have released it."""

    @pl.when(step >= plan.config.stages)
    def _():
        plgpu.barrier_wait(free.at[slot])


def _array_step(plan, work, i):
    """How many steps before step i used the streamed arrays."""
    if plan.arrays_always or not plan.streamed:
        return work.arrays_done + i
    skipped = jnp.clip(i - work.cut_end, 0, work.full_end - work.cut_end)
    return work.arrays_done + i - skipped


def _compute(
    plan,
    work,
    wg,
    arrays_gmem,
    out_gmem,
    lse_gmem,
    *,
    q_smem,
    k_smem,
    v_smem,
    lse_smem,
    q_ready,
    k_ready,
    v_ready,
    k_free,
    v_free,
    **scratch,
):
    """One compute warpgroup: 64 queries against every visited tile of keys."""
    c, stages = plan.config, plan.config.stages
    out_smem, out_copied = plan.out.views(scratch.get("out_smem", q_smem))
    (q_smem, _), (k_smem, _), (v_smem, _) = plan.q.views(q_smem), plan.k.views(k_smem), plan.v.views(v_smem)
    q = q_smem.at[wg]
    softmax = functools.partial(_softmax, plan)
    scored = functools.partial(_scored, plan, work, wg, arrays_gmem, scratch)

    slot_of = lambda i: lax.rem(jnp.asarray(work.done + i, jnp.int32), stages) if plan.paired else lax.rem(i, stages)
    first = slot_of(0) if plan.paired else 0
    plgpu.barrier_wait(q_ready)
    plgpu.barrier_wait(k_ready.at[first])
    x = tensor_core.logits(q, k_smem.at[first])
    plgpu.barrier_arrive(k_free.at[first])
    first_is_cut = not schedule.is_equal(work.cut_end, 0)
    if plan.zeroes_padding:
        pl.when(wg == 0)(
            functools.partial(
                _zero_padding, plan, work, arrays_gmem, v_smem.at[first], v_ready.at[first], scratch["v_loaded"]
            )
        )
    m = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), _PER_QUERY)
    l = plgpu.layout_cast(jnp.zeros((64, SUM_COLUMNS), jnp.float32), _TILE)
    m, l, p, rescale = softmax(scored(x, jnp.int32(0), first_is_cut), m, l, first_is_cut)
    like_p, p = p, p.astype(plan.problem.dtype)
    acc = (plgpu.layout_cast(jnp.zeros((64, plan.v.chunk), jnp.float32), _TILE),) * plan.v.chunks

    def step(i, carry, cut):
        acc, m, l, p = carry
        k_slot, v_slot = slot_of(i), slot_of(i - 1)

        def under(x):
            plgpu.barrier_arrive(k_free.at[k_slot])
            results = softmax(scored(x, i, cut), m, l, cut)
            if c.pin_softmax:
                scratch["pin_smem"][wg] = results[1]
            return results

        plgpu.barrier_wait(k_ready.at[k_slot])
        acc, (m, l, p, rescale) = tensor_core.logits_over_accumulate(
            q, k_smem.at[k_slot], acc, p, v_smem.at[v_slot],
            v_wait=lambda: plgpu.barrier_wait(v_ready.at[v_slot]),
            under=under, like=(m, l, like_p, m), interpret=plan.interpret,
        )  # fmt: skip
        plgpu.barrier_arrive(v_free.at[v_slot])
        # Rounded only now: ptxas serialises all matmuls where operands in registers are made while one is in flight.
        return _times_rows(acc, rescale), m, l, p.astype(plan.problem.dtype)

    carry = acc, m, l, p
    cut_step, full_step = (functools.partial(step, cut=cut) for cut in (True, False))
    if first_is_cut:
        carry = lax.fori_loop(1, work.cut_end, cut_step, carry)
    carry = lax.fori_loop(jnp.maximum(work.cut_end, 1), work.full_end, full_step, carry)
    if work.full_end is not work.steps:
        carry = lax.fori_loop(jnp.maximum(work.full_end, 1), work.steps, cut_step, carry)
    acc, m, l, p = carry

    if plan.paired and "out_smem" in scratch:
        plgpu.barrier_arrive(scratch["q_free"])
    slot = slot_of(jnp.asarray(work.steps - 1, jnp.int32))
    plgpu.barrier_wait(v_ready.at[slot])
    acc = tensor_core.accumulate(acc, p, v_smem.at[slot], plan.interpret)
    plgpu.barrier_arrive(v_free.at[slot])

    total = l.sum(axis=1)
    empty = total == 0
    factor = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, total))
    lse = jnp.where(empty, -jnp.inf, m * (1 / _LOG2E) + jnp.log(jnp.where(empty, 1.0, total)))
    if plan.paired:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the block of queries before
    for chunk, x in enumerate(_times_rows(acc, factor)):
        out_smem[wg, chunk] = x.astype(plan.problem.dtype)
    lse_smem[wg] = lse
    plgpu.commit_smem()
    rows = pl.ds(work.t0 + wg * 64, 64)
    plan.out.store(out_copied.at[wg], out_gmem, work.b, rows, work.n)
    plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_gmem.at[work.b, work.n, rows])
    if plan.paired and "out_smem" not in scratch:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # out lies where the queries of the next block will
        plgpu.barrier_arrive(scratch["q_free"])


def _times_rows(chunks, factor):
    return tuple(x * lax.broadcast_in_dim(factor, x.shape, [0]) for x in chunks)


def _softmax(plan, x, m, l, cut):
    """Online softmax of the logits x, base 2: (maximum, partial sums, p, rescaling factor), all float32.

    A row may still be all -inf only under a mask, or where a score gave -inf.
    """
    factor = _softmax_factor(plan)
    new_m = jnp.maximum(m, x.max(axis=1) * factor)
    shift = new_m
    if cut or plan.problem.score is not None:
        shift = jnp.where(new_m == -jnp.inf, 0.0, new_m)
    p = jnp.exp2(x * factor - lax.broadcast_in_dim(shift, x.shape, [0]))
    rescale = jnp.exp2(m - shift)
    l = l * lax.broadcast_in_dim(rescale, l.shape, [0])
    for column in range(0, p.shape[1], SUM_COLUMNS):
        l = l + p[:, column : column + SUM_COLUMNS]
    return new_m, l, p, rescale


def _softmax_factor(plan):
    """What takes the logits that `_scored` gives to base 2."""
    return _LOG2E if _is_scaled(plan) else plan.problem.scale * _LOG2E


def _is_scaled(plan):
    """Whether `_scored` scales: a score needs true logits, and a maximum times a negative scale is no maximum."""
    return plan.problem.score is not None or plan.problem.scale <= 0


def _scored(plan, work, wg, arrays_gmem, scratch, x, i, cut):
    """Logits of step i after score and mask; -inf where masked. Scaled only where `_is_scaled`."""
    problem, c = plan.problem, plan.config
    uses_score = problem.score is not None
    if _is_scaled(plan):
        x = x * problem.scale
    if not (uses_score or cut):
        return x
    uses_stream = plan.streamed and (plan.arrays_always or cut)
    slot = lax.rem(_array_step(plan, work, i), c.stages) if uses_stream else None
    if uses_stream:
        plgpu.barrier_wait(scratch["arrays_ready"].at[slot])
    loaded = [_array(plan, work, a, wg, slot, arrays_gmem, scratch, x.shape) for a in range(len(plan.arrays))]
    if uses_stream:
        plgpu.commit_smem()  # read by ordinary loads: order them before the next TMA write
        plgpu.barrier_arrive(scratch["arrays_free"].at[slot])
    score, mask = jax.tree.unflatten(plan.tree, loaded)
    t = work.t0 + wg * 64 + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_TILE)
    s = (work.last - i) * c.block_kv + plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=_TILE)
    if uses_score:
        x = elementwise.inline(lambda x, t, s, score: scores.evaluate(score, x, work.b, work.n, t, s), x, t, s, score)
    if cut:
        if problem.dims.S % c.block_kv:
            x = jnp.where(s < problem.dims.S, x, -jnp.inf)
        if mask is not None:
            ok = elementwise.inline(lambda t, s, mask: mask.allowed(work.b, work.n, t, s), t, s, mask)
            x = jnp.where(jnp.broadcast_to(ok, x.shape), x, -jnp.inf)
    return x


def _array(plan, work, a, wg, slot, arrays_gmem, scratch, shape):
    """Array a for this tile: a scalar, or broadcast to the tile; None where this step does not load it."""
    array = plan.arrays[a]
    if array.kind == "scalar":
        return array.restore(arrays_gmem[a][array.index(work.b, work.n)])
    smem = scratch[f"array{a}_smem"]
    if array.kind == "column":
        values = plgpu.load(smem.at[wg], layout=_PER_QUERY)
        return array.restore(lax.broadcast_in_dim(values, shape, [0]))
    if slot is None:
        return None
    if array.kind == "row":
        values = plgpu.load(smem.at[slot], layout=_PER_KEY)
        return array.restore(lax.broadcast_in_dim(values, shape, [1]))
    return array.restore(plgpu.load(smem.at[slot, wg], layout=_TILE))


def _zero_padding(plan, work, arrays_gmem, v, v_ready, v_loaded):
    """Zeroes the values past the key length in the first tile, then announces it."""
    plgpu.barrier_wait(v_loaded)
    leaves = [
        arrays_gmem[i][a.index(work.b, work.n)] if a.kind == "scalar" else None for i, a in enumerate(plan.arrays)
    ]
    _, mask = jax.tree.unflatten(plan.tree, leaves)
    length = masks.lengths_of(mask).kv_lengths
    start = work.last * plan.config.block_kv

    @pl.when(start + plan.config.block_kv > length)
    def _():
        for row, column in itertools.product(range(0, plan.config.block_kv, 64), range(0, plan.v.chunk, 64)):
            for chunk in range(plan.v.chunks):
                part = v.at[chunk, pl.ds(row, 64), pl.ds(column, 64)]
                key = start + row + plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_TILE)
                values = plgpu.load(part, layout=_TILE)
                part[...] = jnp.where(key < length, values, jnp.zeros((), values.dtype))

    plgpu.commit_smem()
    for _chunk in range(plan.v.chunks):
        plgpu.barrier_arrive(v_ready)
