"""Which keys of 8 bits Hopper's forward kernel may read as they are. Importing this imports no part of Pallas."""

from pallas_fa.backends.gpu.narrow_keys import PTX_NAMES
from pallas_fa.backends.gpu.support import LARGEST_HEAD_DIM
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.problem import Problem

_COLUMNS, _KEYS = 64, 8  # what head dims and the number of keys are multiples of: TMA copies their tiles at once
_ROWS = 64  # of a tile: those past a multiple lie apart
_MOST_ROWS = 1024  # of keys in one piece: past it, XLA converts them once in less time


def may_read(problem: Problem) -> bool:
    """Returns whether the kernel converts such keys and values as it loads them, if it takes the call.

    Evidence: decode/narrow-keys.
    """
    if not problem.has_narrow_keys or problem.values_in_keys or problem.dims.is_symbolic:
        return False
    if problem.pages is None and problem.dims.T * problem.group > _MOST_ROWS:
        return False
    tiles = _named(problem)
    if tiles is not None and not may_convert(tiles):
        return False
    if problem.kv_dtype.name not in PTX_NAMES or problem.dtype.itemsize != 2 or problem.dims.S % _KEYS:
        return False
    return not any(dim % _COLUMNS or dim > LARGEST_HEAD_DIM for dim in (problem.H, problem.Hv))


def may_convert(tiles: ForwardConfig) -> bool:
    """Returns whether the load warpgroup has registers, and whole pieces of tiles, to convert such keys."""
    by_tickets = tiles.by_tickets and tiles.persistent_ctas > 0
    return tiles.compute_wgs < 3 and tiles.block_kv % _ROWS == 0 and not (tiles.grouped_rows or by_tickets)


def why_not_tiles(problem: Problem) -> str | None:
    """Returns why keys in pages are not read, if it may be the tiles that the call names; None if it names none."""
    if _named(problem) is None:
        return None
    return (
        f"config={problem.config!r} and {problem.kv_dtype} keys in pages; it converts them for tiles of one or two"
        f" warpgroups and a multiple of {_ROWS} keys, whole pages or a part of one, that fit shared memory, not by tickets"
    )


def _named(problem):
    return problem.config.forward if isinstance(problem.config, Config) else None
