"""Packed documents, as flash-attn's varlen functions take them: `from_cu_seqlens` against a loop over the documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.masks import KeyIntervals, from_cu_seqlens
from pallas_fa.problem import normalise
from tests import interpreted_backward, test_kernel_interpreted
from tests.case_masks import cu_seqlens
from tests.lowering import kernels
from tests.mask_properties import allowed, bind, check_ranges

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, K, H = 4, 2, 8
CU_Q, CU_K = np.array([0, 3, 3, 10, 12]), np.array([0, 5, 7, 11, 20])
T, S = 15, 23  # three tokens of padding in each


def _bottom_right(T, S, is_causal, window):
    left, right = window or (None, None)
    distance = np.arange(S) - np.arange(T)[:, None] - (S - T)
    ok = distance <= 0 if is_causal else np.ones((T, S), bool)
    ok &= True if left is None else distance >= -left
    return ok & (True if right is None else distance <= right)


@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("window", (None, (2, 1), (None, 1), (2, 2**40)), ids=str)
def test_each_document_is_attention_of_its_own(is_causal, window, rng):
    """[total, N, H], T != S, a document without queries and one with fewer keys than queries, padding at the end."""
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((T, N, H), (S, K, H), (S, K, H)))

    @jax.jit
    def attend(q, k, v, cu_q, cu_k):
        mask = from_cu_seqlens(cu_q, cu_k, T=T, is_causal=is_causal, window=window)
        return pallas_fa.dot_product_attention(q, k, v, mask=mask)

    want = np.zeros((T, N, H), np.float32)
    for q0, q1, k0, k1 in zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:], strict=False):
        mask = _bottom_right(q1 - q0, k1 - k0, is_causal, window)
        want[q0:q1] = pallas_fa.dot_product_attention(q[q0:q1], k[k0:k1], v[k0:k1], mask=mask)
    np.testing.assert_allclose(attend(q, k, v, CU_Q, CU_K), want, atol=1e-6)


def test_batches_of_rows_and_windows_that_are_arrays(rng):
    cu, left = cu_seqlens(rng, (2, 3), T), np.arange(6).reshape(2, 3)
    got = bind(from_cu_seqlens(cu, T=T, window=(left, 1)), T, T, batch=(2, 3))
    want = []
    for row, side in zip(cu.reshape(6, -1), left.ravel(), strict=True):
        want.append(allowed(bind(from_cu_seqlens(row.tolist(), T=T, window=(int(side), 1)), T, T), T, T)[0])
    np.testing.assert_array_equal(allowed(got, T, T, 6), want)
    one = bind(from_cu_seqlens(cu[0, 0], T=T), T, T)  # the same for the whole batch
    np.testing.assert_array_equal(allowed(one, T, T), allowed(bind(from_cu_seqlens(cu[:1, 0], T=T), T, T, (1,)), T, T))


@pytest.mark.parametrize("spec", (P("data"), P("data", "model"), P()), ids=str)
def test_cumulative_lengths_on_explicit_axes(spec):
    """Those of queries are sharded, those of keys and the windows are not, or otherwise."""
    cu_q, cu_k = np.array([[0, 3, 7, 10]] * 4), np.array([[0, 0, 4, 9]] * 4)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    on = lambda x, spec: jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
    left = np.arange(4)
    build = lambda cu_q, cu_k, left: from_cu_seqlens(cu_q, cu_k, T=10, is_causal=True, window=(left, None))
    want = build(cu_q, cu_k, left)
    if "model" in spec:  # four cumulative lengths over two devices
        cu_k = on(cu_k, P("data"))
    for run in (build, jax.jit(build)):
        got = run(on(cu_q, spec), cu_k, on(left, P("data")))
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert jax.typeof(got.starts).sharding.spec == P(spec[0] if spec else None, None)


def test_positions_outside_of_the_documents_attend_to_nothing():
    """Also where traced cumulative lengths do not start at 0."""
    mask = bind(from_cu_seqlens(jnp.array([4, 6, 9]), T=12), 12, 12)
    ids = np.digitize(np.arange(12), [4, 6, 9])
    want = (ids[:, None] == ids) & (ids[:, None] % 3 > 0)
    np.testing.assert_array_equal(allowed(mask, 12, 12)[0, 0], want)


@pytest.mark.parametrize("tile", (16, 64))
def test_ranges_of_documents_are_those_of_their_tiles(tile):
    """Exact: documents of one tile visit that tile alone, and none of its logits is tested."""
    mask = bind(from_cu_seqlens(np.arange(0, 257, tile), T=256), 256, 256)
    starts = np.arange(0, 256, tile)
    for question in (mask.kv_range, mask.q_range, mask.full_kv_range, mask.full_q_range):
        lo, hi = (np.ravel(x) for x in question(starts, starts + tile))
        assert (lo == starts).all() and (hi == starts + tile).all()


def test_ranges_of_intervals_are_exact(rng):
    """Of intervals in no order, two thirds of them empty."""
    T, S, tile = 24, 40, 4
    starts = rng.integers(0, S, T)
    mask = bind(KeyIntervals(starts, starts + np.maximum(rng.integers(-20, 10, T), 0)), T, S)
    pairs = allowed(mask, T, S)[0, 0]
    for ok, question in ((pairs, mask.kv_range), (pairs.T, mask.q_range)):
        lo, hi = (np.ravel(x) for x in question(np.arange(0, len(ok), tile), np.arange(tile, len(ok) + 1, tile)))
        for i, rows in enumerate(ok.reshape(-1, tile, ok.shape[1])):
            at = np.flatnonzero(rows.any(axis=0))
            assert (lo[i], hi[i]) == (at[0], at[-1] + 1) if at.size else lo[i] >= hi[i]
    check_ranges(mask, T, S, tile, fit=True)


def test_ranges_of_many_queries(rng):
    """From 8193 queries on they are looked at in blocks of several."""
    starts = np.sort(rng.integers(0, 40, 9003).astype(np.int32)) - 2
    mask = bind(KeyIntervals(starts, starts + rng.integers(-1, 9, 9003)), 9003, 40)
    check_ranges(mask, 9003, 40, 1024, fit=True)
    lo, hi = (np.ravel(x) for x in mask.q_range(np.arange(0, 40, 8), np.arange(8, 48, 8)))
    assert ((hi - lo) < 5000).all()


# ---- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("mask", ("documents", "window_arrays"))
def test_interpreted_kernels_are_right_and_free_of_races(mask):
    case = dataclasses.replace(test_kernel_interpreted.BASE, T=70, S=100, N=1, mask=mask)
    problem, operands = test_kernel_interpreted.problem_of(case, test_kernel_interpreted.TWO)
    test_kernel_interpreted.assert_right_and_free_of_races(problem, operands)
    interpreted_backward.is_right_and_free_of_races(case, {})


def test_kernels_lower():
    """Forward and backward, with cumulative lengths that are traced."""
    x, cu = jax.ShapeDtypeStruct((640, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((9,), jnp.int32)

    def gradients(q, k, v, cu):
        mask = from_cu_seqlens(cu, T=640, is_causal=True)
        attend = lambda *qkv: pallas_fa.dot_product_attention(*qkv, mask=mask, implementation="mosaic_gpu")
        out, pullback = jax.vjp(attend, q, k, v)
        return pullback(out)

    assert kernels(gradients, x, x, x, cu) == 2


# ---- errors -----------------------------------------------------------------------------------------------------------

BAD = {
    "floats": (([0.0, 3.0],), {}, TypeError, ("cu_q.dtype=float32", "integer")),
    "none": ((None,), {}, TypeError, ("cu_q is a NoneType", "int array", "list of ints")),
    "a hole": (([[0, 5], [0]],), {}, TypeError, ("cu_q=[[0, 5], [0]]", "int array")),
    "scalar": ((np.array(3),), {}, ValueError, ("cu_q.shape=()", "[*B, documents + 1]", "Prepend 0")),
    "no document": (([0],), {}, ValueError, ("cu_q.shape=(1,)", "at least one document")),
    "lengths": (([5, 4],), {}, ValueError, ("cu_q=[5 4]", "start at 0", "cumulative sum")),
    "falling": (([0, 5, 4],), {}, ValueError, ("cu_q=[0 5 4]", "never fall")),
    "falling, unsigned": ((np.array([0, 5, 4], np.uint32),), {}, ValueError, ("cu_q=[0 5 4]", "never fall")),
    "causal of 1": (([0, 5],), {"is_causal": 1}, TypeError, ("is_causal=1", "True or False")),
    "keys that do not start at 0": (([0, 5], [1, 5]), {}, ValueError, ("cu_k=[1 5]", "start at 0")),
    "past the end": (([0, 10],), {"T": 9}, ValueError, ("cu_q=[ 0 10]", "T=9", "query.shape[-3]")),
    "numbers of documents": (([0, 5], [0, 3, 5]), {}, ValueError, ("cu_q.shape=(2,)", "cu_k.shape=(3,)", "repeat")),
    "T of None": (([0, 5],), {"T": None}, ValueError, ("T=None", "query.shape[-3]")),
    "negative window": (([0, 5],), {"window": (-1, 0)}, ValueError, ("window[0]=-1", "None", "jnp.array(-1)")),
    "negative right of a window": (([0, 5],), {"window": (2, -1)}, ValueError, ("window[1]=-1", "flash-attn", "None")),
    "window of one int": (([0, 5],), {"window": 3}, TypeError, ("window=3", "pair (left, right)")),
    "windows by head": (([0, 5],), {"window": (np.ones(4, int), 0)}, ValueError, ("window[0].shape=(4,)", "[*B] = ()")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    args, keywords, kind, says = BAD[name]
    with pytest.raises(kind) as error:
        from_cu_seqlens(*args, **{"T": 20, **keywords})
    missing = [part for part in says if part not in str(error.value)]
    assert not missing, f"the message does not say {missing}: {error.value}"


def test_intervals_that_do_not_fit_the_call():
    q = np.zeros((2, 5, 4, 8), np.float32)
    for starts, says in (
        (np.zeros((2, 6), int), "starts.shape=(2, 6)"),
        (np.zeros((2, 1, 5, 5), int), "varies over the keys"),
    ):
        with pytest.raises(ValueError) as error:
            normalise(q, q, q, mask=KeyIntervals(starts, starts))
        assert says in str(error.value)
