"""The arrays of masks and scores on their way to shared memory."""

from typing import Any

from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.arrays import KernelArray
from pallas_fa.backends.gpu.skewed import ROWS
from pallas_fa.backends.mma.copies import Copies


def load(copies: Copies, array: KernelArray, gmem: Any, first_row: Any, first_column: Any, smem: Any, wgs: int) -> None:
    """Starts copying the part of an array for a tile of logits.

    Args:
      copies: those of a warpgroup.
      array: of kind "row", "column" or "tile".
      gmem: its values for one batch entry and head: [columns], [rows] or [rows, columns] (or the skewed form), padded.
      first_row: where the tile starts.
      first_column: likewise.
      smem: ref of the part, as `KernelArray.scratch` makes it.
      wgs: warpgroups of the CTA, which may have a part each; those past the end have none.
    """
    if array.kind != "tile":
        first, (count,) = first_column if array.kind == "row" else first_row, smem.shape
        copies.row(gmem.at[pl.ds(first, count)], smem, gmem.shape[0] - first if gmem.shape[0] % (wgs * count) else None)
        return
    rows, columns = smem.shape
    for start in range(0, rows, ROWS):  # the skewed form has tiles of so many rows
        place = array.place(pl.ds(first_row + start, ROWS), pl.ds(first_column, columns))
        limits = (None, None)
        if array.skewed is None:
            limits = (
                size - at.start if size % (wgs * step) else None
                for size, at, step in zip(gmem.shape, place, (rows, columns), strict=True)
            )
        copies.tile(gmem.at[place], smem.at[pl.ds(start, ROWS)], array.piece(columns), *limits)
