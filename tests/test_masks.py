"""Masks: what they allow, and that their ranges never leave out an allowed pair nor call a forbidden one full."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.masks import BlockMask, Causal, Custom, Dense, KeyIntervals, Lengths, Mask, Segments, Window, block_mask
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands.intervals import UNBOUNDED
from pallas_fa.operands.part import Part
from pallas_fa.problem import normalise
from tests.cases import MASKS, Case
from tests.lowering import kernels

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


# ---- strategies -----------------------------------------------------------------------------------------------------


def _parity(b, n, t, s):
    return (t + s) % 2 == 0


def _dense_parity(b, n, t, s, array):
    return array & _parity(b, n, t, s)


def _odd_part_of(mask, b, n, t, s):
    return mask.allowed(b, n, t, s) & _parity(b, n, t, s)


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


# ---- parts of a problem -----------------------------------------------------------------------------------------------


def moved(mask, part):
    return part.cut(mask).moved(part)


@hypothesis.given(masks_and_sizes(lambda T, S: static_masks(T, S) | array_masks(T, S)), st.data())
@hypothesis.settings(max_examples=75)
def test_a_part_of_a_mask_is_the_mask_of_the_part(mask_and_size, data):
    """And its ranges hold, with the start of the part known while tracing or not."""
    mask, T, S = mask_and_size
    mask = bind(mask, T, S)
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in (B, N, T, S))
    sizes = tuple(data.draw(st.integers(1, size - start)) for size, start in zip((B, N, T, S), starts, strict=True))
    want = allowed(mask, T, S)[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
    for start in (starts, tuple(map(jnp.int32, starts))):
        got = moved(mask, Part(start, sizes))
        np.testing.assert_array_equal(allowed(got, *sizes[2:], *sizes[:2]), want)
        if sizes[:2] == (B, N):
            check_ranges(got, *sizes[2:], 4, fit=False)


def test_a_part_of_a_custom_mask_keeps_its_indices():
    mask = bind(Custom(lambda b, n, t, s, x: (b + 2 * n + t + s) % 3 == x, np.arange(9) % 3), 12, 9)
    part = Part((1, 1, 3, 2), (1, 1, 5, 7))
    want = allowed(mask, 12, 9)[1:, 1:, 3:8, 2:]
    np.testing.assert_array_equal(allowed(moved(mask, part), 5, 7, 1, 1), want)


def test_a_part_has_lengths_of_its_own():
    """They are still found: padding in a part may hold NaN, too."""
    mask = bind(Lengths(np.array([5, 9]), np.array([2, 8])) & Causal(), 12, 9)
    found = lengths_of(moved(mask, Part((0, 0, 6, 3), (2, N, 6, 5))))
    np.testing.assert_array_equal(np.ravel(found.q_lengths), [0, 3])
    np.testing.assert_array_equal(np.ravel(found.kv_lengths), [0, 5])


# ---- meanings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", ((13, 9), (9, 13)), ids=("T>S", "T<S"))
@pytest.mark.parametrize("name", MASKS)
def test_allowed_is_its_definition(name, lengths):
    case = Case(*lengths, name, N=2, K=2, H=1, Hv=1, batch=(2, 3))
    inputs = case.inputs()
    q, k, v = inputs.qkv
    mask = normalise(q, k, v, **inputs.mask.keywords)[1].mask
    got = np.ones((), bool) if mask is None else allowed(mask, *lengths, flat_batch=6)
    np.testing.assert_array_equal(np.broadcast_to(got, (6, 2, *lengths)), inputs.allowed.reshape(6, 2, *lengths))


@pytest.mark.parametrize("T, S", ((5, 5), (3, 5), (5, 3)))
def test_causal_is_top_left_aligned(T, S):
    want = np.tril(np.ones((T, S), bool))
    np.testing.assert_array_equal(allowed(bind(Causal(), T, S), T, S)[0, 0], want)
    np.testing.assert_array_equal(allowed(bind(None, T, S, is_causal=True), T, S)[0, 0], want)


@pytest.mark.parametrize("T, S", ((5, 5), (3, 5), (5, 3)))
def test_bottom_right_lets_the_last_query_see_the_last_key(T, S):
    got = allowed(bind(Causal("bottom_right"), T, S), T, S)[0, 0]
    np.testing.assert_array_equal(got, np.tril(np.ones((T, S), bool), S - T))


def test_bottom_right_aligns_to_the_sequence_lengths():
    """Not to the padded sizes; the lengths may be keyword arguments or a mask joined by `&`, on either side."""
    T, S, q, kv = 6, 8, np.array([4, 6]), np.array([7, 3])
    want = np.stack([np.tril(np.ones((T, S), bool), kv[i] - q[i]) for i in range(B)])
    want &= (np.arange(T)[:, None] < q[:, None, None]) & (np.arange(S) < kv[:, None, None])
    causal = Causal("bottom_right")
    for mask in (
        bind(causal, T, S, query_seq_lengths=q, key_value_seq_lengths=kv),
        bind(causal & Lengths(q, kv), T, S),
        bind(Lengths(q, kv) & Window() & causal, T, S),
        bind(causal & Lengths(kv_lengths=kv), T, S, query_seq_lengths=q),
    ):
        np.testing.assert_array_equal(allowed(mask, T, S)[:, 0], want)
    only_keys = allowed(bind(causal, T, S, key_value_seq_lengths=kv), T, S)[:, 0]
    want = np.stack([np.tril(np.ones((T, S), bool), kv[i] - T) & (np.arange(S) < kv[i]) for i in range(B)])
    np.testing.assert_array_equal(only_keys, want)


def test_a_bottom_right_window_is_a_window_with_that_offset():
    T, S, q, kv = 6, 8, np.array([4, 6]), np.array([7, 3])
    for lengths, offset in (({}, S - T), ({"query_seq_lengths": q, "key_value_seq_lengths": kv}, kv - q)):
        got, want = (
            bind(Window(2, 1, 3, "bottom_right"), T, S, **lengths),
            bind(Window(2, 1, 3 + offset), T, S, **lengths),
        )
        np.testing.assert_array_equal(allowed(got, T, S), allowed(want, T, S))


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64))
def test_arrays_of_any_int_dtype_keep_their_values(dtype):
    """The limits to which they are clipped are beyond what narrow ones can hold, and wide ones hold more than int32."""
    T = S = 300
    far = np.array([3, min(np.iinfo(dtype).max, 2**40)])
    for make in (lambda x: Causal(offset=x), lambda x: Lengths(x, x), lambda x: Window(x, x)):
        for x in (far.astype(dtype), jnp.asarray(np.minimum(far, 2**31 - 1).astype(dtype))):
            want = [
                allowed(bind(make(np.int32(n) * np.ones(B, np.int32)), T, S), T, S)[0] for n in np.minimum(far, 1000)
            ]
            np.testing.assert_array_equal(allowed(bind(make(x), T, S), T, S), np.stack(want))


def test_segment_ids_that_jax_can_hold_are_compared_as_they_are(rng):
    """Wider ones raise (tests/test_errors.py); with 64-bit integers none are too wide."""
    x = rng.standard_normal((3, 1, 4, 1, 8), np.float32)
    attend = lambda ids, others, implementation: pallas_fa.dot_product_attention(
        *x, query_segment_ids=ids, key_value_segment_ids=others, implementation=implementation
    )
    want = attend([[0, 0, 1, 1]], [[0, 0, 1, 1]], "reference")
    for implementation in ("xla", "reference"):
        ids = np.array([[-(2**31), -(2**31), 2**31 - 1, 2**31 - 1]])
        np.testing.assert_allclose(attend(ids, ids, implementation), want, atol=1e-6)
        with jax.enable_x64(True):
            ids = np.array([[5, 5, 5 + 2**32, 5 + 2**32]])
            np.testing.assert_allclose(attend(ids, ids, implementation), want, atol=1e-6)
            signed, unsigned = np.array([[-1, -1, 1, 1]], np.int32), np.array([[2**32 - 1] * 2 + [1] * 2], np.uint32)
            assert (attend(signed, unsigned, implementation)[:, :2] == 0).all()


def test_kernels_take_arrays_of_numpy_as_jax_would_hold_them():
    """NumPy's integers have 64 bits, its floats too; a function that is jitted may close over them."""
    x, ids, strip = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16), np.zeros((1, 128), int), np.zeros((128, 128))
    mask = Segments(ids, ids) & Custom(
        lambda b, n, t, s, end: s < end, ids[:, None, :, None], ranges=BlockMask(np.eye(1) > 0)
    )
    attend = lambda q: pallas_fa.dot_product_attention(q, q, q, strip, mask=mask, implementation="mosaic_gpu")
    assert kernels(attend, x) == 1


def test_offset_shifts_both_alignments():
    T, S, offset = 4, 7, np.array([2, -1])
    for align, base in (("top_left", 0), ("bottom_right", S - T)):
        got = allowed(bind(Causal(align, offset), T, S), T, S)[:, 0]
        np.testing.assert_array_equal(got, np.stack([np.tril(np.ones((T, S), bool), base + o) for o in offset]))
        got = allowed(bind(Causal(align, 2), T, S), T, S)[0, 0]
        np.testing.assert_array_equal(got, np.tril(np.ones((T, S), bool), base + 2))


@pytest.mark.parametrize("is_causal", (False, True))
def test_windows_include_both_ends_and_bound_both_sides(is_causal):
    T = S = 9
    distance = np.arange(S) - np.arange(T)[:, None]
    for left, right in ((2, 0), (0, 2), (3, 1), (None, 2), (2, None), (None, None), (0, 0)):
        want = (distance >= -(9 if left is None else left)) & (distance <= (9 if right is None else right))
        want &= (distance <= 0) if is_causal else True
        mask = bind(None, T, S, local_window_size=(left, right), is_causal=is_causal)
        np.testing.assert_array_equal(allowed(mask, T, S)[0, 0], want, f"{left=} {right=}")


def test_segment_ids_are_compared_for_equality_and_no_value_is_special():
    q, kv = np.array([[0, 0, -1, 7], [1, 2, 3, 0]]), np.array([[0, -1, 7], [5, 0, 0]])
    got = allowed(bind(None, 4, 3, query_segment_ids=q, key_value_segment_ids=kv), 4, 3)[:, 0]
    np.testing.assert_array_equal(got, q[:, :, None] == kv[:, None, :])
    assert got[0, 0, 0], "0 attends to 0"
    assert got[0, 2, 1], "-1 attends to -1"


def test_lengths_beyond_the_ends_are_clipped():
    got = allowed(bind(Lengths(np.array([99, -3]), np.array([99, 2])), 4, 5), 4, 5)[:, 0]
    assert got[0].all() and not got[1].any()


def test_the_shortest_of_several_lengths_counts():
    lengths = Lengths(np.array([3, 4]), np.array([5, 1])) & Lengths(kv_lengths=np.array([2, 4]))
    got = bind(lengths, 4, 5, query_seq_lengths=np.array([4, 2]))
    assert lengths_of(got).q_lengths.ravel().tolist() == [3, 2]
    assert lengths_of(got).kv_lengths.ravel().tolist() == [2, 1]
    t, s = np.arange(4)[:, None], np.arange(5)
    want = np.stack([(t < q) & (s < k) for q, k in ((3, 2), (2, 1))])
    np.testing.assert_array_equal(allowed(got, 4, 5)[:, 0], want)


def test_windows_of_known_and_of_unknown_offset_are_joined():
    got = bind(Causal(offset=np.array([0, 1])), 6, 6, is_causal=True, local_window_size=(2, 0))
    t, s = np.arange(6)[:, None], np.arange(6)
    np.testing.assert_array_equal(allowed(got, 6, 6)[:, 0], np.stack([(s <= t) & (s >= t - 2)] * 2))


@pytest.mark.parametrize(
    "mask", [Window(10, 10**9) & Window(20, 10**9), Window(10, None) & Causal(offset=2**29), Window(10, 2**29 - 1)]
)
def test_a_window_of_any_width_keeps_its_other_end(mask):
    got = bind(mask & Causal(offset=50), 64, 64)
    t, s = np.arange(64)[:, None], np.arange(64)
    np.testing.assert_array_equal(allowed(got, 64, 64)[0, 0], (s >= t - 10) & (s <= t + 50))
    check_ranges(got, 64, 64, 16, True)


def test_no_lengths_in_a_union_allow_everything():
    ids = np.zeros((B, 4), np.int32)
    got = bind(Lengths() | Segments(ids, ids + 1), 4, 4)
    assert allowed(got, 4, 4).all()
    check_ranges(got, 4, 4, 2, True)


def test_all_masks_given_must_agree():
    T = S = 8
    ids = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    dense = np.random.default_rng(0).random((T, S)) < 0.7
    mask = bind(
        Dense(dense), T, S, is_causal=True, local_window_size=2, query_segment_ids=np.stack([ids] * B),
        key_value_segment_ids=np.stack([ids] * B), query_seq_lengths=np.array([7, 8]),
    )  # fmt: skip
    t, s = np.arange(T)[:, None], np.arange(S)
    want = dense & (s <= t) & (abs(t - s) <= 2) & (ids[:, None] == ids)
    np.testing.assert_array_equal(allowed(mask, T, S)[:, 0], np.stack([want & (t < 7), want]))


def test_union_and_intersection_of_nested_masks():
    T = S = 8
    mask = bind((Causal() & Window(2, None)) | (Window(None, 0) & Dense(np.arange(S) < 3)) | Window(0, 1), T, S)
    t, s = np.arange(T)[:, None], np.arange(S)
    want = ((s <= t) & (t - 2 <= s)) | ((s <= t) & (s < 3)) | ((t <= s) & (s <= t + 1))
    np.testing.assert_array_equal(allowed(mask, T, S)[0, 0], want)


def test_lengths_inside_a_union_are_no_padding():
    """A pair that the other part allows is attended to, wherever it lies."""
    lengths = Lengths(np.array([2, 3]), np.array([1, 2]))
    got = allowed(bind(lengths | Window(0, 0), 4, 4), 4, 4)[:, 0]
    want = np.eye(4, dtype=bool) | np.stack([np.outer(np.arange(4) < a, np.arange(4) < b) for a, b in ((2, 1), (3, 2))])
    np.testing.assert_array_equal(got, want)


def test_custom_sees_absolute_indices_and_its_arrays():
    def rule(b, n, t, s, array, offsets):
        return array & (s <= t + b + n + offsets)

    rng = np.random.default_rng(0)
    array, offsets = rng.random((B, N, 4, 5)) < 0.8, rng.integers(-1, 2, (N, 1, 1))
    b, n, t, s = np.ogrid[:B, :N, :4, :5]
    got = allowed(bind(Custom(rule, array, offsets), 4, 5), 4, 5)
    np.testing.assert_array_equal(got, array & (s <= t + b + n + offsets))


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


# ---- pytrees --------------------------------------------------------------------------------------------------------


def test_static_masks_are_structure_and_arrays_are_leaves():
    ids = np.zeros((B, 4), np.int32)
    static = Causal(offset=3) & Window(1, None) | Custom(_parity)
    assert jax.tree.leaves(static) == []
    assert static == (Causal(offset=3) & Window(1, None) | Custom(_parity))
    assert hash(static) == hash(Causal(offset=3) & Window(1, None) | Custom(_parity))
    assert jax.tree.structure(static) != jax.tree.structure(Causal(offset=4) & Window(1, None) | Custom(_parity))
    assert len(jax.tree.leaves(Segments(ids, ids) & Causal(offset=ids[:, 0]))) == 3
    assert len(jax.tree.leaves(Lengths(None, ids[:, 0]))) == 1


@pytest.mark.parametrize("name", MASKS)
def test_masks_survive_flattening(name):
    mask = Case(6, 5, name, N=2, K=2).inputs().mask.keywords.get("mask")
    if not isinstance(mask, Mask):
        mask = Dense(np.ones((6, 5), bool)) if mask is None else Dense(mask)
    leaves, structure = jax.tree.flatten(mask)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(mask) and jax.tree.structure(again) == structure
    for a, b in zip(jax.tree.leaves(again), leaves, strict=True):
        assert a is b
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(mask)]
    assert len(set(paths)) == len(leaves)
    assert jax.tree.structure(jax.tree.map(lambda x: None, mask), is_leaf=lambda x: x is None) == structure


@pytest.mark.smoke
def test_one_program_for_all_arrays_of_a_mask():
    """A mask is an argument like any other: new arrays do not trace anew, a new static part does."""
    q = jnp.ones((B, 4, N, 8))
    traced = []

    @jax.jit
    def attend(mask):
        traced.append(mask)
        return pallas_fa.dot_product_attention(q, q, q, mask=mask)

    for i in range(3):
        ids = jnp.arange(B * 4).reshape(B, 4) // (i + 1)
        attend(Segments(ids, ids) & Window(i // 2, 0))
    assert len(traced) == 2
