"""Ranges of positions: intervals [lo, hi), and how arrays answer for the tiles of a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Range = tuple[Any, Any]
FAR = 2**30  # "no bound": past every position, and safe to add to a position in int32


def maximum(*values: Any) -> Any:
    """The largest; a Python int where all are, NumPy where all are known while tracing, else jnp."""
    return _fold(max, "maximum", values)


def minimum(*values: Any) -> Any:
    """The smallest, as `maximum`."""
    return _fold(min, "minimum", values)


def where(condition: Any, x: Any, y: Any) -> Any:
    """`jnp.where`, kept in Python or NumPy where everything is known while tracing."""
    if isinstance(condition, (bool, np.bool_)):
        return x if condition else y
    return library(condition, x, y).where(condition, x, y)


def _fold(python, name, values):
    result = values[0]
    for value in values[1:]:
        both_int = isinstance(result, int) and isinstance(value, int)
        result = python(result, value) if both_int else getattr(library(result, value), name)(result, value)
    return result


def library(*xs: Any) -> Any:
    """NumPy where all of `xs` are known while tracing, else jnp."""
    return np if all(isinstance(x, (bool, int, np.ndarray, np.generic)) for x in xs) else jnp


def _block_size(size):
    # Long arrays are looked at in blocks: the work for one tile stays near a thousand comparisons up to S = 128k. Up to
    # 8192 positions, to look at each costs a GPU less than the kernel that finds out about blocks.
    return 1 if size <= 8192 else min(size // 1024, 128)


def reduce_tiles(x: Any, axis: int, lo: Any, hi: Any, reduce: Any) -> Any:
    """`x` with `axis` cut into the tiles [lo, hi) and each reduced to one value; an axis of size 1 stays as it is."""
    if x.shape[axis] == 1:
        return x
    lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
    size, tile = x.shape[axis], max(int(hi[0] - lo[0]), 1)
    even = size % tile == 0 and np.array_equal(lo, np.arange(0, size, tile)) and np.array_equal(hi, lo + tile)
    if even:  # no gather
        return reduce(x.reshape(*x.shape[:axis], lo.size, tile, *x.shape[axis + 1 :]), axis=axis + 1)
    within = np.arange(max(int((hi - lo).max()), 1))
    rows = np.minimum(lo[:, None] + within, np.minimum(hi, size)[:, None] - 1)
    return reduce(jnp.take(x, jnp.asarray(rows), axis=axis), axis=axis + 1)


def blocks(x: Any, axis: int, reduce: Any) -> tuple[Any, int]:
    """x [B, N, T, S] with `axis` cut into blocks, moved last: ([B, N, tiles, blocks], block size or 0 for 'all alike')."""
    size = x.shape[axis]
    block = _block_size(size)
    if block > 1:
        starts = np.arange(0, size, block)
        x = reduce_tiles(x, axis, starts, starts + block, reduce)
    return (x if axis == 3 else jnp.swapaxes(x, 2, 3)), (block if size > 1 else 0)


def overlaps(ids: Any, axis: int, lo: Any, hi: Any, others: Any, other_axis: int) -> tuple[Any, int]:
    """Which blocks of `others` hold an id between the smallest and the largest id of each tile of `ids`."""
    low, high = (_along_tiles(reduce_tiles(ids, axis, lo, hi, f), axis) for f in (jnp.min, jnp.max))
    (other_low, block), (other_high, _) = (blocks(others, other_axis, f) for f in (jnp.min, jnp.max))
    return (other_low <= high) & (low <= other_high), block


def equals(ids: Any, axis: int, lo: Any, hi: Any, others: Any, other_axis: int) -> tuple[Any, int]:
    """Which blocks of `others` hold one id only, the one id of the tile of `ids`."""
    low, high = (_along_tiles(reduce_tiles(ids, axis, lo, hi, f), axis) for f in (jnp.min, jnp.max))
    (other_low, block), (other_high, _) = (blocks(others, other_axis, f) for f in (jnp.min, jnp.max))
    return (low == high) & (other_low == low) & (other_high == low), block


def _along_tiles(x, axis):
    return x if axis == 2 else jnp.swapaxes(x, 2, 3)


def hull(hit: Any, block: int) -> tuple[Any, Any]:
    """[lo, hi) from the first to the last block that is hit; hit [B, N, tiles, blocks]."""
    if not block:
        return -FAR, jnp.where(hit[..., 0], FAR, -FAR)
    index, count = _index(hit), hit.shape[-1]
    first, end = jnp.where(hit, index, count).min(axis=-1), jnp.where(hit, index + 1, 0).max(axis=-1)
    return first * block, end * block


def first_run(hit: Any, block: int) -> tuple[Any, Any]:
    """[lo, hi) of the first unbroken run of blocks that are hit."""
    if not block:
        return -FAR, jnp.where(hit[..., 0], FAR, -FAR)
    index, count = _index(hit), hit.shape[-1]
    before = jnp.pad(hit[..., :-1], [(0, 0)] * (hit.ndim - 1) + [(1, 0)])
    first = jnp.where(hit, index, count).min(axis=-1)
    end = jnp.where(before & ~hit, index, count).min(axis=-1)  # the first end of a run is that of the first run
    return first * block, end * block


def _index(hit):
    # Minima and maxima of it that do not need each other, XLA finds in one kernel: on a GPU, each kernel more takes 3 us.
    return jax.lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
