"""Random masks, and what holds for any: no allowed pair is outside its ranges, and no forbidden one in a full range."""

import functools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from pallas_fa.masks import BlockMask, Causal, Custom, Dense, KeyIntervals, Lengths, Segments, Window
from pallas_fa.problem import normalise

B, N = 2, 2
SIZES = ((12, 9), (7, 16), (1, 5))
TILES = (1, 4, 32)


def bind(mask, T, S, batch=(B,), heads=N, **keywords):
    """`mask` as an implementation gets it, with what the keyword arguments add."""
    q, k = jnp.zeros((*batch, T, heads, 1)), jnp.zeros((*batch, S, heads, 1))
    return normalise(q, k, k, mask=mask, **keywords)[1].mask


def allowed(mask, T, S, flat_batch=B, heads=N):
    """bool [B, N, T, S] of a bound mask."""
    shape = (flat_batch, heads, T, S)
    index = (
        np.arange(size).reshape(tuple(-1 if i == axis else 1 for i in range(4))) for axis, size in enumerate(shape)
    )
    return np.broadcast_to(mask.allowed(*index), shape)


def tiles(size, tile, fit):
    """[lo, hi) of the tiles of an axis; the last one starts earlier (as in xla) or reaches past the end (as in kernels)."""
    tile = min(tile, size) if fit else tile
    lo = np.arange(0, size, tile)
    return (np.minimum(lo, size - tile) if fit else lo), tile


def check_ranges(mask, T, S, tile, fit):
    """The two properties, in both directions, for all tiles of one size."""
    pairs = allowed(mask, T, S)
    for size, other, ok, some, full in (
        (T, S, pairs, mask.kv_range, mask.full_kv_range),
        (S, T, pairs.swapaxes(2, 3), mask.q_range, mask.full_q_range),
    ):
        starts, length = tiles(size, tile, fit)
        position = np.arange(other)
        answers = (some(starts, starts + length), full(starts, starts + length))
        bounds = [[np.broadcast_to(x, (B, N, len(starts)))[..., None] for x in answer] for answer in answers]
        inside, inside_full = ((position >= lo) & (position < hi) for lo, hi in bounds)
        for i, start in enumerate(starts):
            rows = ok[:, :, start : start + length]
            assert not (rows.any(axis=2) & ~inside[:, :, i]).any(), f"allowed outside the range of tile {start}"
            assert not (inside_full[:, :, i] & ~rows.all(axis=2)).any(), f"forbidden inside the full range of {start}"


def check_states(mask, T, S, q_tile, kv_tile):
    """States of tiles: what is allowed is not in an empty tile, and nothing in a full tile is forbidden."""
    pairs = allowed(mask, T, S)
    q, kv = (np.arange(0, size, tile) for size, tile in ((T, q_tile), (S, kv_tile)))
    states = mask.tile_states((q, np.minimum(q + q_tile, T)), (kv, np.minimum(kv + kv_tile, S)))
    states = np.broadcast_to(states, (B, N, len(q), len(kv))).repeat(q_tile, 2)[:, :, :T].repeat(kv_tile, 3)[..., :S]
    assert states.dtype == np.int8
    assert not (pairs & (states == 0)).any(), "allowed in an empty tile"
    assert not (~pairs & (states == 2)).any(), "forbidden in a full tile"
    return states


def parity(b, n, t, s):
    return (t + s) % 2 == 0


def _dense_parity(b, n, t, s, array):
    return array & parity(b, n, t, s)


def _odd_part_of(mask, b, n, t, s):
    return mask.allowed(b, n, t, s) & parity(b, n, t, s)


def static_masks(T, S):
    offsets, sides = st.integers(-T - 1, S + 1), st.none() | st.integers(0, max(T, S))
    plain = st.builds(Causal, st.sampled_from(("top_left", "bottom_right")), offsets) | st.builds(Window, sides, sides)
    inside = st.builds(Window, sides, sides, offsets) | st.builds(Causal, offset=offsets)
    return plain | inside.map(lambda mask: Custom(functools.partial(_odd_part_of, mask), ranges=mask))


def _integers(shape, low, high, ordered=False):
    made = hnp.arrays(np.int32, shape, elements=st.integers(low, high))
    return made.map(lambda x: np.sort(x, axis=-1)) if ordered else made


@st.composite
def block_masks(draw, T, S):
    block = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    lead, counts = tuple(draw(st.sampled_from((1, size))) for size in (B, N)), (-(-T // block[0]), -(-S // block[1]))
    blocks = draw(hnp.arrays(np.bool_, (*lead, *counts), fill=st.booleans()))
    mask = BlockMask(blocks, block)
    if draw(st.booleans()):
        return mask
    array = blocks.repeat(block[0], 2)[:, :, :T].repeat(block[1], 3)[..., :S]
    return Custom(_dense_parity, array, ranges=mask)


@st.composite
def array_masks(draw, T, S):
    kinds = "offset", "window", "key_intervals", "segments", "lengths", "head_lengths", "dense", "custom", "blocks"
    kind = draw(st.sampled_from(kinds))
    if kind == "window":
        sides = st.none() | st.integers(0, max(T, S))
        sides |= st.sampled_from(((), (B,), (B, N, 1, 1))).flatmap(lambda shape: _integers(shape, -3, max(T, S)))
        return Window(draw(sides), draw(sides), draw(st.integers(-T, S) | _integers((B,), -T, S)))
    if kind == "blocks":
        return draw(block_masks(T, S))
    if kind == "offset":
        offset, sides = draw(_integers((B,), -T - 1, S + 1)), st.none() | st.integers(0, max(T, S))
        if draw(st.booleans()):
            return Window(draw(sides), draw(sides), offset)
        return Causal(draw(st.sampled_from(("top_left", "bottom_right"))), offset)
    if kind == "key_intervals":
        shape = draw(st.sampled_from(((T,), (B, T), (B, N, T, 1), (B, 1, 1, 1))))
        starts = draw(_integers(shape, -1, S + 1))
        return KeyIntervals(starts, starts + draw(_integers(shape, -2, S)))
    if kind == "segments":
        ordered, batch = draw(st.booleans()), draw(st.sampled_from(((B,), ())))
        return Segments(*(draw(_integers((*batch, size), 0, 3, ordered)) for size in (T, S)))
    if kind in ("lengths", "head_lengths"):
        shape = (B,) if kind == "lengths" else (B, N, 1, 1)
        return Lengths(*(draw(st.none() | _integers(shape, 0, size)) for size in (T, S)))
    shape = tuple(draw(st.sampled_from((1, size))) for size in (B, N, T, S))
    array = draw(hnp.arrays(np.bool_, shape, fill=st.booleans()))
    return Dense(array) if kind == "dense" else Custom(_dense_parity, array, ranges=Dense(array))


@st.composite
def masks_and_sizes(draw, leaves):
    T, S = draw(st.sampled_from(SIZES))
    join = lambda parts: st.builds(lambda a, b, both: a & b if both else a | b, parts, parts, st.booleans())
    return draw(st.recursive(leaves(T, S), join, max_leaves=4)), T, S
