"""Answers range questions from the arrays of a mask: which range of one sequence each tile of the other needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.operands import intervals
from pallas_fa.operands.intervals import UNBOUNDED, Range


def _block_size(size):
    # Blocks bound the work per tile: about a thousand comparisons up to S = 128k. Up to 8192 positions, a GPU compares all
    # positions in less time than one more kernel, which reduces blocks, would take.
    return 1 if size <= 8192 else min(size // 1024, 128)


def reduce_tiles(x: Any, axis: int, lo: Any, hi: Any, reduce: Any) -> Any:
    """Reduces each tile of `x` to one value; `x` is returned as it is if its size along `axis` is 1.

    Args:
      x: [B|1, N|1, T|1, S|1].
      axis: the axis of the tiles.
      lo: starts of the tiles, an int or NumPy ints [tiles].
      hi: ends of the tiles.
      reduce: reduce(x, axis=) such as jnp.min.
    """
    if x.shape[axis] == 1:
        return x
    lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
    size = x.shape[axis]
    tile = _regular_tile(lo, hi, size)
    if tile and size % tile == 0:  # no gather
        return reduce(x.reshape(*x.shape[:axis], lo.size, tile, *x.shape[axis + 1 :]), axis=axis + 1)
    within = np.arange(max(int((hi - lo).max()), 1), dtype=np.int32)
    rows = np.minimum(lo[:, None] + within, np.minimum(hi, size)[:, None] - 1)
    return reduce(jnp.take(x, jnp.asarray(rows), axis=axis), axis=axis + 1)


def _regular_tile(lo, hi, size):
    """Returns the tile size if the tiles [lo, hi) cover [0, size) in order, the last one possibly short; else 0."""
    tile = max(int(hi[0] - lo[0]), 1)
    starts, ends = intervals.tiles(size, tile)
    return tile if np.array_equal(lo, starts) and np.array_equal(hi, ends) else 0


def reduce_blocks(x: Any, axis: int, reduce: Any, block: int | None = None) -> tuple[Any, int]:
    """Reduces each block of `x` along `axis` to one value, and moves that axis last.

    Args:
      x: [B|1, N|1, tiles, S|1] (`axis` is 3) or [B|1, N|1, T|1, tiles] (`axis` is 2).
      axis: the axis of the blocks.
      reduce: reduce(x, axis=) such as jnp.min.
      block: the block size; None to choose it.

    Returns:
      [B|1, N|1, tiles, blocks], and the block size: 0 if `x` is broadcast along `axis`.
    """
    size = x.shape[axis]
    block = block or _block_size(size)
    if block > 1:
        x = reduce_tiles(x, axis, *intervals.tiles(size, block), reduce)
    return (x if axis == 3 else jnp.swapaxes(x, 2, 3)), (block if size > 1 else 0)


def range_of_shared_ids(ids: Any, axis: int, lo: Any, hi: Any, others: Any, other_axis: int) -> Range:
    """Finds, for each tile of `ids`, a range of `others` outside which none of the tile's ids occurs.

    Args:
      ids: int [B|1, N|1, T|1, S|1].
      axis: the axis that `ids` spans.
      lo: starts of the tiles, an int or NumPy ints [tiles].
      hi: ends of the tiles.
      others: the ids of the other sequence, int [B|1, N|1, T|1, S|1].
      other_axis: the axis that `others` spans.
    """
    answer = lambda lo, hi: hull(*_may_share_ids(ids, axis, lo, hi, others, other_axis))
    return _by_blocks(answer, ids.shape[axis], lo, hi, others.shape[other_axis], (jnp.minimum, jnp.maximum))


def range_of_one_id(ids: Any, axis: int, lo: Any, hi: Any, others: Any, other_axis: int) -> Range:
    """Finds, for each tile of `ids`, a range of `others` in which all ids equal all ids of the tile.

    Args:
      ids: int [B|1, N|1, T|1, S|1].
      axis: the axis that `ids` spans.
      lo: starts of the tiles, an int or NumPy ints [tiles].
      hi: ends of the tiles.
      others: the ids of the other sequence, int [B|1, N|1, T|1, S|1].
      other_axis: the axis that `others` spans.
    """
    answer = lambda lo, hi: first_run(*_have_one_id(ids, axis, lo, hi, others, other_axis))
    return _by_blocks(answer, ids.shape[axis], lo, hi, others.shape[other_axis], (jnp.maximum, jnp.minimum))


def _by_blocks(answer, size, lo, hi, other_size, join):
    """Returns answer(lo, hi), for tiles of a few whole blocks by joining the answers for these blocks.

    If queries and keys have the same ids, XLA then fuses the reductions of both to blocks into one GPU kernel, and both
    ranges into a second. Decision record: forward/segment-id-ranges.
    """
    lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
    block, tile = _id_block(other_size), _regular_tile(lo, hi, size)
    count, blocks_per_tile = size // block, tile // block
    if block == 1 or tile % block or size % block or blocks_per_tile not in (2, 3, 4):
        return answer(lo, hi)
    of_blocks = answer(*intervals.tiles(size, block))
    of_blocks = (jnp.pad(x, ((0, 0), (0, 0), (0, -count % blocks_per_tile)), mode="edge") for x in of_blocks)
    first, end = (
        functools.reduce(f, (x[..., i::blocks_per_tile] for i in range(blocks_per_tile)))
        for f, x in zip(join, of_blocks, strict=True)
    )
    return first, end


def _id_block(size):
    return 64 if size >= 1024 else 1  # the tiles of the kernels are multiples of 64


def _may_share_ids(ids, axis, lo, hi, others, other_axis):
    """Returns (for each tile of `ids`, which blocks of `others` may hold one of its ids; block size)."""
    sides = ids, axis, lo, hi, others, other_axis
    (low, other_low, block), (high, other_high, _) = _reduce_both(jnp.min, *sides), _reduce_both(jnp.max, *sides)
    hit = (other_low <= high) & (low <= other_high)
    if block > 1 and ids.dtype == others.dtype:
        # With zeros behind documents 1 to 8, the block where the zeros start spans all ids, but holds only two.
        ids, others = (jnp.uint32(1) << (x.astype(jnp.uint32) & 31) for x in (ids, others))
        bits, other_bits, _ = _reduce_both(jnp.bitwise_or.reduce, ids, axis, lo, hi, others, other_axis)
        hit &= (bits & other_bits) != 0
    return hit, block


def _have_one_id(ids, axis, lo, hi, others, other_axis):
    """Returns (for each tile of `ids`, which blocks of `others` hold no id but the only one of the tile; block size)."""
    sides = ids, axis, lo, hi, others, other_axis
    (low, other_low, block), (high, other_high, _) = _reduce_both(jnp.min, *sides), _reduce_both(jnp.max, *sides)
    return (low == high) & (other_low == low) & (other_high == low), block


def _reduce_both(reduce, ids, axis, lo, hi, others, other_axis):
    """Returns `reduce` of each tile of `ids` and of each block of `others`, and the block size."""
    tiles = reduce_tiles(ids, axis, lo, hi, reduce)
    tiles = tiles if axis == 2 else jnp.swapaxes(tiles, 2, 3)
    return tiles, *reduce_blocks(others, other_axis, reduce, _id_block(others.shape[other_axis]))


def hull(hit: Any, block: int) -> tuple[Any, Any]:
    """Returns [lo, hi) from the first to the last block where `hit` is True.

    Args:
      hit: bool [B|1, N|1, tiles, blocks].
      block: the block size; 0 if the one block stands for the whole axis.
    """
    if not block:
        return -UNBOUNDED, jnp.where(hit[..., 0], UNBOUNDED, -UNBOUNDED)
    index, count = _index(hit), hit.shape[-1]
    first, end = jnp.where(hit, index, count).min(axis=-1), jnp.where(hit, index + 1, 0).max(axis=-1)
    return first * block, end * block


def first_run(hit: Any, block: int) -> tuple[Any, Any]:
    """Returns [lo, hi) of the first unbroken run of blocks where `hit` is True; arguments as in `hull`."""
    if not block:
        return -UNBOUNDED, jnp.where(hit[..., 0], UNBOUNDED, -UNBOUNDED)
    index, count = _index(hit), hit.shape[-1]
    before = jnp.pad(hit[..., :-1], [(0, 0)] * (hit.ndim - 1) + [(1, 0)])
    first = jnp.where(hit, index, count).min(axis=-1)
    end = jnp.where(before & ~hit, index, count).min(axis=-1)  # the first end of a run is that of the first run
    return first * block, end * block


def _index(hit):
    # XLA fuses independent minima and maxima of this array into one GPU kernel. Decision record: forward/segment-id-ranges.
    return jax.lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
