"""The gradients of a score's arrays [T, S] leave a compute warpgroup of the backward kernel, tile by tile."""

import functools
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.hopper.backward.plan import SUM_COLUMNS
from pallas_fa.backends.hopper.backward.warpgroup import Warpgroup, on_first_part
from pallas_fa.backends.hopper.tma import add_to_gmem, fence_async_proxy


def store_array_gradients(w: Warpgroup, at: TilePlace, by_array: dict[int, Any]) -> None:
    """Stores the tile's gradients of arrays [T, S], by number, or adds them to sums in device memory."""
    order = w.plan.order
    stored = {i: x for i, x in by_array.items() if order.is_stored(i)}
    ordered = {i: x for i, x in by_array.items() if i in order.ordered_sums}
    added = {i: x for i, x in by_array.items() if i not in stored and i not in ordered}
    if stored:
        on_first_part(w, lambda: _store(w, at, stored))
    for column in range(0, w.plan.config.width, SUM_COLUMNS):
        columns = slice(column, column + SUM_COLUMNS)
        of_piece = lambda gradients, columns=columns: {i: x[:, columns] for i, x in gradients.items()}
        if ordered:
            w.barriers["sums_free"].wait()
            _stage(w, of_piece(ordered))
            fence_async_proxy(w.plan.interpret)
            w.barriers["sums_ready"].arrive()
        if added:
            here = at._replace(streamed=at.streamed + column)
            on_first_part(w, functools.partial(_add, w, here, of_piece(added)))


def _stage(w, by_array):
    for i, x in by_array.items():
        w.scratch[f"gradient{i}_smem"][w.row_group] = x


def _add(w, at, by_array):
    plan = w.plan
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _stage(w, by_array)
    plgpu.commit_smem()
    for i in by_array:
        target = w.gmem.added[i].at[plan.added_place(i, at, 64)]
        add_to_gmem(w.scratch[f"gradient{i}_smem"].at[w.row_group], target, plan.interpret)


def _store(w, at, by_array):
    plan = w.plan
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, x in by_array.items():
        x = x if plan.dropout_scale is None else x * plan.dropout_scale
        w.scratch[f"gradient{i}_smem"].at[w.row_group].T[...] = x.astype(plan.added_dtype(i))
    plgpu.commit_smem()
    for i in by_array:
        target = w.gmem.added[i].at[plan.added_place(i, at, 64)]
        plgpu.copy_smem_to_gmem(w.scratch[f"gradient{i}_smem"].at[w.row_group], target)
