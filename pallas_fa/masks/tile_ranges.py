"""How the arrays of a mask answer for the tiles of a sequence: which range of the other sequence each needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.operands.intervals import UNBOUNDED, Range


def _block_size(size):
    # Long arrays are looked at in blocks: the work for one tile stays near a thousand comparisons up to S = 128k. Up to
    # 8192 positions, to look at each costs a GPU less than the kernel that finds out about blocks.
    return 1 if size <= 8192 else min(size // 1024, 128)


def reduce_tiles(x: Any, axis: int, lo: Any, hi: Any, reduce: Any) -> Any:
    """`x` with `axis` cut into the tiles [lo, hi) and each reduced to one value; an axis of size 1 stays as it is."""
    if x.shape[axis] == 1:
        return x
    lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
    size = x.shape[axis]
    tile = _regular_tile(lo, hi, size)
    if tile and size % tile == 0:  # no gather
        return reduce(x.reshape(*x.shape[:axis], lo.size, tile, *x.shape[axis + 1 :]), axis=axis + 1)
    within = np.arange(max(int((hi - lo).max()), 1))
    rows = np.minimum(lo[:, None] + within, np.minimum(hi, size)[:, None] - 1)
    return reduce(jnp.take(x, jnp.asarray(rows), axis=axis), axis=axis + 1)


def _regular_tile(lo, hi, size):
    """The size of the tiles [lo, hi) where they follow each other to the end, the last one as far as it goes; else 0."""
    tile = max(int(hi[0] - lo[0]), 1)
    starts = np.arange(0, size, tile)
    return tile if np.array_equal(lo, starts) and np.array_equal(hi, np.minimum(starts + tile, size)) else 0


def blocks(x: Any, axis: int, reduce: Any, block: int | None = None) -> tuple[Any, int]:
    """x [B, N, T, S] with `axis` cut into blocks, moved last: ([B, N, tiles, blocks], block size or 0 for 'all alike')."""
    size = x.shape[axis]
    block = block or _block_size(size)
    if block > 1:
        starts = np.arange(0, size, block)
        x = reduce_tiles(x, axis, starts, starts + block, reduce)
    return (x if axis == 3 else jnp.swapaxes(x, 2, 3)), (block if size > 1 else 0)


def of_shared_ids(ids: Any, axis: int, lo: Any, hi: Any, others: Any, other_axis: int) -> Range:
    """For each tile [lo, hi) of `ids`: a range of `others` outside which none of its ids is."""
    answer = lambda lo, hi: hull(*_may_share(ids, axis, lo, hi, others, other_axis))
    return _by_blocks(answer, ids.shape[axis], lo, hi, others.shape[other_axis], (jnp.minimum, jnp.maximum))


def of_one_id(ids: Any, axis: int, lo: Any, hi: Any, others: Any, other_axis: int) -> Range:
    """For each tile [lo, hi) of `ids`: a range of `others` where all ids are the one id of the tile."""
    answer = lambda lo, hi: first_run(*_are_alike(ids, axis, lo, hi, others, other_axis))
    return _by_blocks(answer, ids.shape[axis], lo, hi, others.shape[other_axis], (jnp.maximum, jnp.minimum))


def _by_blocks(answer, size, lo, hi, other_size, join):
    """answer(lo, hi), where tiles are some whole blocks had from the answers for these.

    Where queries and keys have the same ids, a GPU then finds the smallest and the largest of blocks of both in one kernel,
    and both ranges in a second; each kernel more takes 2 to 3 us.
    """
    lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
    block, tile = _id_block(other_size), _regular_tile(lo, hi, size)
    count, every = size // block, tile // block
    if block == 1 or tile % block or size % block or every not in (2, 3, 4):
        return answer(lo, hi)
    found = answer(np.arange(0, size, block), np.arange(block, size + 1, block))
    found = (jnp.pad(x, ((0, 0), (0, 0), (0, -count % every)), mode="edge") for x in found)
    first, end = (
        functools.reduce(f, (x[..., i::every] for i in range(every))) for f, x in zip(join, found, strict=True)
    )
    return first, end


def _id_block(size):
    return 64 if size >= 1024 else 1  # the tiles of the kernels are multiples of 64


def _may_share(ids, axis, lo, hi, others, other_axis):
    """(which blocks of `others` may hold an id of each tile of `ids`, block size)."""
    sides = ids, axis, lo, hi, others, other_axis
    (low, other_low, block), (high, other_high, _) = _reduced(jnp.min, *sides), _reduced(jnp.max, *sides)
    hit = (other_low <= high) & (low <= other_high)
    if block > 1 and ids.dtype == others.dtype:
        # Of documents 1 to 8 with zeros behind them, the block where the zeros start spans all ids, but holds two.
        ids, others = (jnp.uint32(1) << (x.astype(jnp.uint32) & 31) for x in (ids, others))
        bits, other_bits, _ = _reduced(jnp.bitwise_or.reduce, ids, axis, lo, hi, others, other_axis)
        hit &= (bits & other_bits) != 0
    return hit, block


def _are_alike(ids, axis, lo, hi, others, other_axis):
    """(which blocks of `others` hold one id only, the one id of each tile of `ids`, block size)."""
    sides = ids, axis, lo, hi, others, other_axis
    (low, other_low, block), (high, other_high, _) = _reduced(jnp.min, *sides), _reduced(jnp.max, *sides)
    return (low == high) & (other_low == low) & (other_high == low), block


def _reduced(reduce, ids, axis, lo, hi, others, other_axis):
    """(`reduce` of each tile of `ids`, of each block of `others`, block size)."""
    tiles = reduce_tiles(ids, axis, lo, hi, reduce)
    return _along_tiles(tiles, axis), *blocks(others, other_axis, reduce, _id_block(others.shape[other_axis]))


def _along_tiles(x, axis):
    return x if axis == 2 else jnp.swapaxes(x, 2, 3)


def hull(hit: Any, block: int) -> tuple[Any, Any]:
    """[lo, hi) from the first to the last block that is hit; hit [B, N, tiles, blocks]."""
    if not block:
        return -UNBOUNDED, jnp.where(hit[..., 0], UNBOUNDED, -UNBOUNDED)
    index, count = _index(hit), hit.shape[-1]
    first, end = jnp.where(hit, index, count).min(axis=-1), jnp.where(hit, index + 1, 0).max(axis=-1)
    return first * block, end * block


def first_run(hit: Any, block: int) -> tuple[Any, Any]:
    """[lo, hi) of the first unbroken run of blocks that are hit."""
    if not block:
        return -UNBOUNDED, jnp.where(hit[..., 0], UNBOUNDED, -UNBOUNDED)
    index, count = _index(hit), hit.shape[-1]
    before = jnp.pad(hit[..., :-1], [(0, 0)] * (hit.ndim - 1) + [(1, 0)])
    first = jnp.where(hit, index, count).min(axis=-1)
    end = jnp.where(before & ~hit, index, count).min(axis=-1)  # the first end of a run is that of the first run
    return first * block, end * block


def _index(hit):
    # Minima and maxima of it that do not need each other, XLA finds in one kernel: on a GPU, each kernel more takes 3 us.
    return jax.lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
