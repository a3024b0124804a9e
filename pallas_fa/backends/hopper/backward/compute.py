"""A compute warpgroup of the backward kernel: its 64 stationary positions against every visited streamed tile."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.gpu.layouts import PER_ROW
from pallas_fa.backends.hopper.backward import by_gradient, work
from pallas_fa.backends.hopper.backward.padding import zero_keys, zero_stationary
from pallas_fa.backends.hopper.backward.scale_ds import scale_stationary, times
from pallas_fa.backends.hopper.backward.step import skip, step
from pallas_fa.backends.hopper.backward.warpgroup import Accumulators, Warpgroup, on_first_part
from pallas_fa.backends.hopper.tiles import pieces


def compute(w: Warpgroup, after: Callable[[], Any]) -> tuple[Any, Any]:
    """Runs the mainloop and stores the gradients of the stationary operands.

    Returns (the steps after the block, after()), as `work.for_blocks` asks for.
    """
    plan, kind = w.plan, w.plan.kind
    ds_factor = w.gmem.ds_factors[0] if plan.scales_ds and "qk" in w.gives else None  # read while operands are loaded
    if not plan.order.by_tickets:  # else the block's number has come with it
        plgpu.barrier_wait(w.block.slot_of(w.scratch["stationary_qk_ready"]))
    if plan.padding.stationary:
        zero_stationary(w)
    if kind.accumulates_qk:
        plgpu.barrier_wait(w.block.slot_of(w.scratch["stationary_pv_ready"]))
    if ds_factor is not None:
        scale_stationary(w, ds_factor)
    if plan.several_blocks:
        _release_block_before(w)
    given = {name: getattr(plan.tiles, f"stationary_{name}") for name in w.gives}

    counts = {name: tiles.chunks // plan.column_parts for name, tiles in given.items()}

    def mainloop(*refs):
        qk_count = counts.get("qk", 0)
        accs = Accumulators(refs[:qk_count], refs[qk_count:])
        if plan.order.by_tile:
            done = _all_heads(w, accs)
        else:
            done = work.for_heads(plan, w.block, lambda n, done: _head(w, n, done, accs))
        if plan.by_gradient:
            by_gradient.finish(w, done)
        return done, *(acc[...] for acc in refs)

    stand_ins, shapes = [], []
    for name, tiles in given.items():
        shapes += [(64, tiles.chunk)] * counts[name]
        if plan.interpret:
            stand_ins += [w.scratch[f"d_{name}_stand_in"].at[w.wg, i] for i in range(counts[name])]
    done, *results = w.wgmma.across_loops(mainloop, stand_ins, *shapes)
    d_qk = [results.pop(0) for _ in range(counts.get("qk", 0))]
    following = after()  # asked for before the stores, which may hide some of its latency
    _store(w, d_qk, results)
    return done, following


def _release_block_before(w):
    """Lets the load warp use the slot of the block before, once its gradients, which lie there, are stored."""
    block = w.block

    @pl.when((block.before > 0) & (block.after > 0))
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        w.barriers["stationary_free"].arrive(work.slot_of(block.before - 1))


def _store(w, d_qk, d_pv):
    """Stores the gradients of the stationary operands through their shared memory."""
    plan, block, stores = w.plan, w.block, []
    qk_scale = w.qk_scale if d_qk else None  # long before it is used: it may come from device memory
    if plan.padding.gradients:  # the query heads of a key head have the same keys
        first_head = block.head * plan.group
        d_qk, d_pv = ([zero_keys(w, x, first_head) for x in given] for given in (d_qk, d_pv))
    d_pv = [x if plan.dropout_scale is None else x * plan.dropout_scale for x in d_pv]
    d_qk = [times(x, qk_scale) for x in d_qk]
    if plan.has_head_parts:
        for name, chunks in (("dk", d_qk), ("dv", d_pv)):
            if chunks:
                _store_part(w, name, chunks)
        return
    if plan.splits or plan.column_parts > 1 or plan.by_gradient:
        w.barriers["wgs_meet"].wait()  # other warpgroups read operands where these rows of gradients lie
    if d_pv:  # else no other warpgroup reads these rows
        stores.append((*_stage(w, "stationary_pv", w.stationary_pv_name, d_pv), "dv"))
    if d_qk:
        if plan.dq and not plan.splits:
            w.barriers["wgs_meet"].wait()  # no warpgroup reads keys any more
        staged = _stage(w, "stationary_qk", "stationary_qk", d_qk)
        stores.append((*staged, "dk" if plan.kind.keys_stationary else "dq"))
    plgpu.commit_smem()
    for tiles, smem, gradient in stores:
        first = w.column_part * tiles.chunks
        copied = block.slot_of(tiles.copied(smem))
        copied = copied.at[pl.ds(first, tiles.chunks) if plan.column_parts > 1 else slice(None), w.rows]
        tiles.store(copied, w.gmem.gradients[gradient], block.b, pl.ds(w.start, 64), block.head, w.column_part)


def _store_part(w, name, chunks):
    """Stores what a part of the query heads of a key head gives (see `gpu.head_parts`), from registers.

    In float32 it would not fit the operands' shared memory.
    """
    memory, rows, first = w.gmem.gradients[name], pl.ds(w.start, 64), w.first_chunk(chunks)
    for i, x in enumerate(chunks):
        columns = pl.ds((first + i) * x.shape[1], x.shape[1])
        memory[w.block.b, w.block.head, rows, columns] = x


def _stage(w, operand, name, chunks):
    """Puts the gradient of a stationary operand into the shared memory `name`; returns (tiles, that memory)."""
    tiles, smem = w.plan.gradient_tiles(operand), w.scratch[f"d_{name}_smem" if w.plan.splits else f"{name}_smem"]
    matrix, first = w.block.slot_of(tiles.matrix(smem)), w.column_part * tiles.chunks
    for i, x in enumerate(pieces(chunks, tiles.chunk)):
        matrix[first + i, w.rows] = x.astype(tiles.dtype)
    return tiles, smem


def _all_heads(w, accs):
    """All steps, tile after tile. Returns the steps after."""
    plan, block = w.plan, w.block
    visits = plan.visits.of_part(w.gmem.visit_table, block.b, None, block.number, 0)
    at_start, at_end = (visits.first, visits.full_first), (visits.full_last, visits.last)
    either = lambda down, up: (jnp.where(block.down, d, u) for d, u in zip(down, up, strict=True))
    done = block.done
    for (start, end), is_boundary in (
        (either(at_end, at_start), True),
        ((visits.full_first, visits.full_last), False),
        (either(at_start, at_end), True),
    ):

        def of_tile(tile, n, before, is_boundary=is_boundary):
            at = TilePlace(block.b, n, w.start, tile * plan.config.width, is_boundary, {}, w.dropout(n))
            step(w, at, before, (), accs)

        done = work.for_tiles(plan, block, start, end, done, of_tile)
    return done


def _head(w, n, done, accs):
    """All steps of query head n, in three loops: boundary tiles, full tiles, boundary tiles.

    One loop for all boundary tiles is slower (evidence: backward/three-loops). `done`: steps before, of other heads.
    Returns the steps after.
    """
    plan, block, table = w.plan, w.block, w.gmem.visit_table
    (first, last), visits = w.visits(n)
    scalars, dropout = w.scalars(n), w.dropout(n)
    sums = tuple(plgpu.layout_cast(jnp.zeros((64,), jnp.float32), PER_ROW) for _ in plan.score_gradients.summed)

    def over(start, end, body, sums):
        """Calls body(tile, steps before it, sums) over tiles [start, end)."""
        if schedule.is_equal(start, end):
            return sums
        before = done + (start - first)
        # A loop from 0 takes fewer registers.
        return lax.fori_loop(0, end - start, lambda i, sums: body(start + i, before + i, sums), sums)

    def run(start, end, is_boundary, sums):
        def body(tile, before, sums):
            tile = work.tile_of_step(plan, block, table, n, last, tile)
            streamed = tile * plan.config.width
            here = scalars | w.words(n, tile) if is_boundary else scalars
            at = TilePlace(block.b, n, w.start, streamed, is_boundary, here, dropout)
            return step(w, at, before, sums, accs)

        return over(start, end, body, sums)

    def skip_all(start, end):
        if plan.visits.parts > 1:
            over(start, end, lambda tile, before, _: skip(w, before), None)

    skip_all(first, visits.first)
    sums = run(visits.first, visits.full_first, True, sums)
    sums = run(visits.full_first, visits.full_last, False, sums)
    sums = run(visits.full_last, visits.last, True, sums)
    skip_all(visits.last, last)
    if sums:
        on_first_part(w, lambda: _store_sums(w, n, sums))
    return done + (last - first)


def _store_sums(w, n, sums):
    """Stores gradients of arrays, one value per stationary position."""
    summed = w.plan.score_gradients.summed
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, x in zip(summed, sums, strict=True):
        w.scratch[f"gradient{i}_smem"][w.row_group] = x
    plgpu.commit_smem()
    for i in summed:
        rows = pl.ds(w.start, 64)
        plgpu.copy_smem_to_gmem(w.scratch[f"gradient{i}_smem"].at[w.row_group], w.gmem.summed[i].at[w.block.b, n, rows])
