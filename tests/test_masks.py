"""What masks allow, and what they are to JAX: pytrees whose numbers are static and whose arrays are leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.masks import BlockMask, Causal, Custom, Dense, Lengths, Mask, Segments, Window
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import normalise
from tests.cases import MASKS, Case
from tests.lowering import kernels
from tests.mask_properties import B, N, allowed, bind, check_ranges, parity


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


# ---- pytrees ----------------------------------------------------------------------------------------------------------


def test_static_masks_are_structure_and_arrays_are_leaves():
    ids = np.zeros((B, 4), np.int32)
    static = Causal(offset=3) & Window(1, None) | Custom(parity)
    assert jax.tree.leaves(static) == []
    assert static == (Causal(offset=3) & Window(1, None) | Custom(parity))
    assert hash(static) == hash(Causal(offset=3) & Window(1, None) | Custom(parity))
    assert jax.tree.structure(static) != jax.tree.structure(Causal(offset=4) & Window(1, None) | Custom(parity))
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
