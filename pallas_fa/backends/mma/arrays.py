"""The arrays of masks and scores on their way to shared memory."""

from typing import Any

from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.arrays import KernelArray
from pallas_fa.backends.gpu.skewed import ROWS
from pallas_fa.backends.mma.copies import Copies


def load(
    copies: Copies, array: KernelArray, gmem: Any, first_row: Any, first_column: Any, smem: Any, wgs: int | None
) -> None:
    """Starts copying the part of an array for a tile of logits. What lies past the end of the array is zeros.

    Args:
      copies: those of a warpgroup.
      array: of kind "row", "column" or "tile".
      gmem: its values for one batch entry and head: [columns], [rows] or [rows, columns] (or the skewed form), padded.
      first_row: where the tile starts.
      first_column: likewise.
      smem: ref of the part, as `KernelArray.scratch` makes it.
      wgs: warpgroups of the CTA, which may have a part each; those past the end have none. None: the part is of any size,
        and may lie past the end.
    """
    left = lambda size, count, first: None if wgs is not None and size % (wgs * count) == 0 else size - first
    if array.kind != "tile":
        first, (count,) = first_column if array.kind == "row" else first_row, smem.shape
        copies.row(gmem.at[pl.ds(first, count)], smem, left(gmem.shape[0], count, first))
        return
    rows, columns = smem.shape
    at_once = min(rows, ROWS)  # the skewed form has tiles of so many rows
    for start in range(0, rows, at_once):
        place = array.place(pl.ds(first_row + start, at_once), pl.ds(first_column, columns))
        limits = [left(*x) for x in zip(gmem.shape, (rows, columns), (at.start for at in place), strict=True)]
        if array.skewed:
            limits = [None, limits[1] if wgs is None else None]  # all tiles of blocks of rows and columns are there
        copies.tile(gmem.at[place], smem.at[pl.ds(start, at_once)], array.piece(columns), *limits)
