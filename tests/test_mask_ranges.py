"""The ranges of masks: they never leave out an allowed pair nor call a forbidden one full, and they are narrow."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from pallas_fa.masks import Causal, Dense, Lengths, Mask, Segments, Window, block_mask
from pallas_fa.operands.intervals import UNBOUNDED
from tests.mask_properties import (
    TILES,
    B,
    N,
    allowed,
    array_masks,
    bind,
    block_masks,
    check_ranges,
    check_states,
    masks_and_sizes,
    static_masks,
)

any_tile = pytest.mark.parametrize("fit", (True, False), ids=("last tile earlier", "last tile overshoots"))


@any_tile
@hypothesis.given(masks_and_sizes(static_masks), st.integers(1, 20))
@hypothesis.settings(max_examples=100)
def test_ranges_of_static_masks(fit, mask_and_size, tile):
    mask, T, S = mask_and_size
    check_ranges(bind(mask, T, S), T, S, tile, fit)


@any_tile
@hypothesis.given(masks_and_sizes(lambda T, S: static_masks(T, S) | array_masks(T, S)), st.sampled_from(TILES))
@hypothesis.settings(max_examples=75)
def test_ranges_of_array_masks(fit, mask_and_size, tile):
    mask, T, S = mask_and_size
    check_ranges(bind(mask, T, S), T, S, tile, fit)


@hypothesis.given(
    masks_and_sizes(lambda T, S: static_masks(T, S) | array_masks(T, S) | block_masks(T, S)),
    st.integers(1, 20),
    st.integers(1, 20),
)
@hypothesis.settings(max_examples=75)
def test_states_of_tiles(mask_and_size, q_tile, kv_tile):
    mask, T, S = mask_and_size
    check_states(bind(mask, T, S), T, S, q_tile, kv_tile)


@pytest.mark.parametrize("block, tile", [((4, 2), (4, 2)), ((4, 2), (8, 8)), ((4, 6), (4, 6))], ids=str)
def test_states_of_a_computed_block_mask_are_exact(block, tile):
    """Where tiles are the blocks, and where they are several of them; with odd lengths."""
    T, S = 13, 17
    array = np.random.default_rng(0).random((B, N, T, S)) < np.linspace(0, 1, S)
    mask = bind(block_mask(Dense(array), T, S, block, batch=B, heads=N), T, S)
    np.testing.assert_array_equal(allowed(mask, T, S), array)
    states = check_states(mask, T, S, *tile)[:, :, :: tile[0], :: tile[1]]
    tiles = np.pad(array, ((0, 0), (0, 0), (0, -T % tile[0]), (0, -S % tile[1])), mode="edge")
    tiles = tiles.reshape(B, N, -1, tile[0], tiles.shape[3] // tile[1], tile[1])
    np.testing.assert_array_equal(states, tiles.any(axis=(3, 5)) + tiles.all(axis=(3, 5)).astype(int))


@pytest.mark.parametrize("seed", range(3))
def test_ranges_of_long_arrays(seed):
    """Ids from 1024 positions on, bool arrays from 8193 on are looked at in blocks of several."""
    rng = np.random.default_rng(seed)
    for T, S in ((6, 2309), (2309, 6), (6, 9002)):
        q_ids, kv_ids = (np.sort(rng.integers(0, 4, (B, size)), axis=-1) for size in (T, S))
        segments = Segments(q_ids, kv_ids)
        dense = Dense(np.kron(rng.random((B, 1, T // 3, S // 3)) < 0.8, np.ones((4, 4), bool))[..., :T, :S] > 0)
        for mask in (segments, dense, dense & segments | Window(900, 900)):
            for tile in (4, max(T, S)):
                check_ranges(bind(mask, T, S), T, S, tile, fit=True)


@hypothesis.given(masks_and_sizes(static_masks), st.integers(0, 15), st.integers(1, 8))
@hypothesis.settings(max_examples=50)
def test_static_masks_answer_with_what_they_are_asked_with(mask_and_size, start, length):
    """Python ints for Python ints, so that loop bounds fold; the same numbers from NumPy arrays."""
    mask, T, S = mask_and_size
    mask = bind(mask, T, S)
    for question in (mask.kv_range, mask.q_range, mask.full_kv_range, mask.full_q_range):
        lo, hi = question(start, start + length)
        assert type(lo) is int and type(hi) is int
        arrays = question(np.array([start, 0]), np.array([start + length, length]))
        assert [int(np.broadcast_to(x, 2)[0]) for x in arrays] == [lo, hi]


def test_static_masks_answer_traced_scalars():
    """A persistent kernel asks with the tile that it is at, inside the program."""
    mask = bind((Causal("bottom_right") & Window(5, 3)) | Window(1, 0), 12, 16)

    @jax.jit
    def ask(lo, hi):
        return mask.kv_range(lo, hi), mask.full_kv_range(lo, hi), mask.q_range(lo, hi), mask.full_q_range(lo, hi)

    want = (mask.kv_range(4, 8), mask.full_kv_range(4, 8), mask.q_range(4, 8), mask.full_q_range(4, 8))
    assert jax.tree.map(int, ask(4, 8)) == want


# ---- tightness: a range that is right but never narrows would make every kernel slow ----------------------------------

_STATIC = (Causal(), Causal(offset=3), Causal("bottom_right"), Window(3, 2), Window(0, None))


@pytest.mark.parametrize("mask", _STATIC, ids=str)
def test_ranges_of_simple_static_masks_are_exact(mask):
    T, S, tile = 12, 16, 4
    mask = bind(mask, T, S)
    pairs = allowed(mask, T, S)[0, 0]
    for ok, some, full in ((pairs, mask.kv_range, mask.full_kv_range), (pairs.T, mask.q_range, mask.full_q_range)):
        for start in range(0, ok.shape[0], tile):
            rows = ok[start : start + tile]
            for question, hit in ((some, rows.any(axis=0)), (full, rows.all(axis=0))):
                lo, hi = question(start, start + tile)
                got = np.arange(ok.shape[1])
                np.testing.assert_array_equal((got >= lo) & (got < hi), hit)


def test_ranges_of_documents_follow_the_documents():
    ids = np.repeat(np.arange(4), 4)[None].repeat(B, axis=0)
    mask = bind(Segments(ids, ids), 16, 16)
    starts = np.arange(0, 16, 4)
    for question in (mask.kv_range, mask.q_range, mask.full_kv_range, mask.full_q_range):
        lo, hi = (np.broadcast_to(x, (B, N, 4)) for x in question(starts, starts + 4))
        assert (lo == starts).all() and (hi == starts + 4).all()


@pytest.mark.parametrize("tile", [64, 128, 192, 256, 704])
def test_ranges_of_long_documents_follow_the_documents(tile):
    """Long ids are looked at in blocks of 64, which these documents are multiples of; the last tile is short."""
    ids = np.repeat([3, 1, 4, 0], [704, 704, 640, 64])
    mask = bind(Segments(ids, ids), ids.size, ids.size)
    starts = np.arange(0, ids.size, tile)
    ends = np.minimum(starts + tile, ids.size)

    def check(question, hit):
        lo, hi = (np.asarray(x).reshape(-1) for x in question(starts, ends))
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            at = np.flatnonzero(hit(start, end))
            if at.size:
                assert (lo[i], hi[i]) == (at[0], at[-1] + 1)
            else:
                assert lo[i] >= hi[i]

    for question in (mask.kv_range, mask.q_range):
        check(question, lambda start, end: np.isin(ids, ids[start:end]))
    for question in (mask.full_kv_range, mask.full_q_range):
        check(question, lambda start, end: (ids[start:end, None] == ids).all(axis=0))


@pytest.mark.parametrize("T, S", [(3, 1), (1, 3), (4, 1), (3, 1024)])
def test_ranges_of_ids_that_one_side_has_one_of(T, S):
    q_ids, kv_ids = np.arange(T), np.zeros((1, 1, 1, 1), int)
    for mask in (Segments(q_ids, kv_ids), Segments(np.zeros((1, 1, 1, 1), int), np.arange(S))):
        for tile in (1, 2, 3, 4):
            check_ranges(bind(mask, T, S), T, S, tile, fit=True)


def test_zeros_behind_documents_do_not_widen_their_ranges():
    """The block where they start holds the largest id and the smallest, but none between."""
    ids = np.repeat([1, 2, 3, 0], [500, 700, 600, 248])
    mask = bind(Segments(ids, ids), ids.size, ids.size)
    starts = np.arange(0, ids.size, 128)
    for question in (mask.kv_range, mask.q_range):
        lo, hi = (np.asarray(x).reshape(-1) for x in question(starts, starts + 128))
        for i, start in enumerate(starts):
            at = np.flatnonzero(np.isin(ids, ids[start : start + 128]))
            assert (lo[i], hi[i]) == (at[0] // 64 * 64, -(-(at[-1] + 1) // 64) * 64)


def test_ranges_of_a_dense_mask_follow_its_blocks():
    array = np.kron(np.eye(4, dtype=bool), np.ones((4, 4), bool))
    mask = bind(Dense(array), 16, 16)
    starts = np.arange(0, 16, 4)
    for question in (mask.kv_range, mask.q_range, mask.full_kv_range, mask.full_q_range):
        lo, hi = (np.broadcast_to(x, (B, N, 4)) for x in question(starts, starts + 4))
        assert (lo == starts).all() and (hi == starts + 4).all()


def test_ranges_of_lengths_end_at_the_lengths():
    mask = bind(Lengths(np.array([5, 0]), np.array([9, 16])), 12, 16)
    starts = np.array([0, 4, 8])
    lo, hi = (np.broadcast_to(x, (B, N, 3))[:, 0] for x in mask.kv_range(starts, starts + 4))
    np.testing.assert_array_equal(np.maximum(hi - np.maximum(lo, 0), 0), [[9, 9, 0], [0, 0, 0]])
    lo, hi = (np.broadcast_to(x, (B, N, 3))[:, 0] for x in mask.full_kv_range(starts, starts + 4))
    np.testing.assert_array_equal(np.maximum(hi - np.maximum(lo, 0), 0), [[9, 0, 0], [0, 0, 0]])


def test_a_part_without_answer_does_not_widen_a_union():
    union = Window(0, 0) | (Causal(offset=-30) & Window(0, None))
    mask = bind(union, 24, 24)
    assert mask.kv_range(8, 12) == (8, 12) and mask.q_range(8, 12) == (8, 12)
    lengths = Lengths(np.array([2, 24])) & Window(2, 2)
    lo, hi = bind(lengths | Window(0, 0), 24, 24).kv_range(np.array([8, 12]), np.array([12, 16]))
    np.testing.assert_array_equal(np.broadcast_to(lo, (B, N, 2))[:, 0], [[8, 12], [6, 10]])
    np.testing.assert_array_equal(np.broadcast_to(hi, (B, N, 2))[:, 0], [[12, 16], [14, 18]])


def test_a_mask_without_bounds_says_everything():
    """Far ends are safe to add to a position in int32."""
    assert Mask().kv_range(0, 4) == (-UNBOUNDED, UNBOUNDED) and Mask().q_range(0, 4) == (-UNBOUNDED, UNBOUNDED)
    lo, hi = Mask().full_kv_range(0, 4)
    assert lo >= hi
    assert Window(2**40, 2**40).kv_range(0, 4)[1] < 2**31
    far = bind(Causal(offset=np.array([2**31 - 1, -(2**31)], np.int64)), 4, 4)
    got = allowed(far, 4, 4)[:, 0]
    assert got[0].all() and not got[1].any()
