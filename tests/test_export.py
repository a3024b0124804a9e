"""`jax.export`: symbolic batch and lengths, and programs for several platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.cache import KeyValueCache, PagedCache
from pallas_fa.masks import Custom
from pallas_fa.operands import layout

pytestmark = pytest.mark.usefixtures("quick_compilation")
N, K, H = 4, 2, 8
SIZES = ((5, 150, 40), (1, 7, 300))  # B, T, S: one chunk of one and several of the other


def _normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def _arrays(rng, B, T, S):
    return {
        "query": _normal(rng, B, T, N, H),
        "key": _normal(rng, B, S, K, H),
        "value": _normal(rng, B, S, K, H),
    }


# name: (arrays that the call takes beside q, k and v, its keywords from these and the sizes)
CALLS = {
    "plain": (lambda rng, B, T, S: {}, lambda a, T, S: {}),
    "bands, operands, BNTH": (
        lambda rng, B, T, S: {
            "left": np.arange(B) + 20,
            "slopes": np.abs(_normal(rng, N)),
            "sinks": _normal(rng, B, N),
        },
        lambda a, T, S: {
            "layout": "BNTH",
            "sinks": a["sinks"],
            "dropout_rate": 0.2,
            "dropout_key": jax.random.key(1),
            "mask": masks.Causal("bottom_right"),
            "local_window_size": (a["left"], 60),
            "score": scores.Alibi(a["slopes"], align="bottom_right"),
        },
    ),
    "relative bias": (
        lambda rng, B, T, S: {"slopes": _normal(rng, N, 1)},
        lambda a, T, S: {"score": scores.RelativeBias(lambda offset: a["slopes"] * jnp.sin(0.1 * offset))},
    ),
    "lengths and a bias": (
        lambda rng, B, T, S: {
            "query_seq_lengths": rng.integers(1, T + 1, B),
            "key_value_seq_lengths": rng.integers(1, S + 1, B),
            "bias": _normal(rng, N, T, S),
        },
        lambda a, T, S: {**a, "is_causal": True},
    ),
    "segments and a mask": (
        lambda rng, B, T, S: {
            "query_segment_ids": rng.integers(0, 3, (B, T)),
            "key_value_segment_ids": rng.integers(0, 3, (B, S)),
            "mask": rng.random((B, 1, T, S)) < 0.8,
            "bias": _normal(rng, S),
        },
        lambda a, T, S: {**a, "logits_soft_cap": 3.0},
    ),
    "documents": (
        lambda rng, B, T, S: {"cu_q": np.array([0, 3, T - 1, T]), "cu_k": np.array([0, 3, S - 2, S - 1])},
        lambda a, T, S: {"mask": masks.from_cu_seqlens(a["cu_q"], a["cu_k"], T=T, is_causal=True)},
    ),
}


def _program(keywords, implementation):
    """(out, lse) and all gradients of a call of these arrays."""

    def run(arrays):
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def attend(floats):
            a = {**arrays, **floats}
            q, k, v = (a.pop(name) for name in ("query", "key", "value"))
            given = keywords(a, q.shape[1], k.shape[1])
            q, k, v = (layout.transpose(given.get("layout", "BTNH"), x) for x in (q, k, v))
            return pallas_fa.dot_product_attention(
                q, k, v, **given, implementation=implementation, return_residual=True
            )

        results, pullback = jax.vjp(attend, floats)
        out, lse = results
        return results, pullback((jnp.sin(out), jnp.where(lse == -jnp.inf, 0, jnp.sin(lse))))

    return jax.jit(run)


@pytest.mark.parametrize("name", [x if "bands" in x else pytest.param(x, marks=pytest.mark.full) for x in CALLS])
def test_one_program_for_all_sizes(name, rng):
    more, keywords = CALLS[name]
    arrays = [{**_arrays(rng, *sizes), **more(rng, *sizes)} for sizes in SIZES]
    b, t, s = export.symbolic_shape("b, t, s")
    names = dict(zip(SIZES[0], (b, t, s), strict=True))
    like = {
        n: jax.ShapeDtypeStruct([names.get(size, size) if size != N else N for size in x.shape], jnp.asarray(x).dtype)
        for n, x in arrays[0].items()
    }
    exported = export.export(_program(keywords, "xla"), platforms=("cpu", "cuda", "tpu"))(like)
    for a in arrays:
        got, want = exported.call(jax.tree.map(jnp.asarray, a)), _program(keywords, "reference")(a)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, atol=2e-5 * (1 + np.nanmax(np.abs(np.where(np.isinf(y), 0, y)))))


ANY = export.symbolic_shape("b, t, s")


def _symbolic(dtype=jnp.bfloat16, sizes=ANY):
    b, t, s = sizes
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((b, t, N, H), (b, s, K, H), (b, s, K, H))]


def _export(*args, platforms=("cpu",), transformed=lambda attend: attend, **keywords):
    attend = lambda q, k, v: pallas_fa.dot_product_attention(q, k, v, **keywords)
    return export.export(jax.jit(transformed(attend)), platforms=platforms)(*args)


def test_the_default_takes_xla_where_a_size_is_symbolic():
    """For several platforms, too: no kernel is in the program."""
    for sizes in (ANY, (ANY[0], 64, 64)):
        exported = _export(*_symbolic(sizes=sizes), platforms=("cpu", "cuda"), is_causal=True)
        assert "mosaic" not in exported.mlir_module()
    assert "mosaic_gpu: cannot: a symbolic size" in pallas_fa.explain(*_symbolic())


def test_the_reference_exports_for_any_size():
    exported = _export(*_symbolic(), platforms=("cpu", "cuda"), is_causal=True, implementation="reference")
    assert [x.shape for x in exported.out_avals] == [(*ANY[:2], N, H)]


@pytest.mark.full
def test_second_derivatives_of_a_symbolic_length(rng):
    transformed = lambda attend: jax.grad(
        lambda *x: jnp.sum(jax.grad(lambda q: jnp.sum(attend(q, *x[1:]) ** 2))(x[0]) ** 2)
    )
    exported = _export(*_symbolic(jnp.float32), transformed=transformed, is_causal=True)
    x = list(_arrays(rng, 1, 9, 5).values())
    want = transformed(lambda *x: pallas_fa.dot_product_attention(*x, is_causal=True, implementation="reference"))(*x)
    np.testing.assert_allclose(exported.call(*x), want, atol=1e-4 * np.abs(want).max())


def test_what_needs_known_sizes_says_so():
    for keywords, kind, says in (
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "a symbolic size"),
        ({"forward_mode": True}, NotImplementedError, "a symbolic length with forward_mode=True"),
    ):
        with pytest.raises(kind, match=says):
            _export(*_symbolic(), **keywords)
    with pytest.raises(ValueError, match=r"\(2, 2\) blocks, and the call has the symbolic lengths \(T, S\)=\(t, s\)"):
        _export(*_symbolic(), mask=masks.block_mask(masks.Causal(), 256, 256))
    query, key, value = _symbolic()
    for dims in ((ANY[0], ANY[1], ANY[2], H), (ANY[0], ANY[1], N, ANY[2])):
        with pytest.raises(ValueError, match="query.shape=.* symbolic number of heads or head dim"):
            _export(jax.ShapeDtypeStruct(dims, query.dtype), key, value)


def _exported_is_the_call(call, like, *arrays):
    exported = export.export(jax.jit(call))(*(jax.ShapeDtypeStruct(*x) for x in like))
    got, want = exported.call(*arrays), call(*arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_step_with_a_cache_of_a_symbolic_batch(in_pages, rng):
    """In one piece, of a symbolic length, too; in pages, with any number of these."""
    b, t, s = ANY
    floats, ints = jnp.float32, jnp.int32

    def step(key, value, lengths, rows, query, table=None):
        if table is None:
            cache = KeyValueCache(key=key, value=value, lengths=lengths, dropped=lengths)
        else:
            cache = PagedCache(key_pages=key, value_pages=value, page_table=table, lengths=lengths, dropped=lengths)
        cache = cache.append(rows, rows)
        return cache.attend(query, local_window_size=(5, 0)), cache.lengths, cache.dropped

    kept, table = ((s, 8, K, H), [((b, 3), ints)]) if in_pages else ((b, s, K, H), [])
    like = [(kept, floats)] * 2 + [((b,), ints), ((b, 1, K, H), floats), ((b, 1, N, H), floats), *table]
    key, value = _normal(rng, 2, *((9, 8, K, H) if in_pages else (2, 24, K, H)))
    arrays = key, value, np.array([7, 24], np.int32), _normal(rng, 2, 1, K, H), _normal(rng, 2, 1, N, H)
    _exported_is_the_call(step, like, *arrays, *([np.arange(6, dtype=np.int32).reshape(2, 3)] if in_pages else []))


def test_ragged_batches_of_any_number_of_tokens_pages_and_sequences(rng):
    tokens, pages, sequences = ANY
    lengths, table = np.array([10, 30, 4], np.int32), rng.permutation(12).reshape(3, 4).astype(np.int32)
    numbers = lengths, table, np.array([0, 3, 33, 34], np.int32), np.array([3], np.int32)
    like = [((tokens, N, H), jnp.float32), ((pages, 8, 2 * K, H), jnp.float32)]
    like += [(shape, jnp.int32) for shape in ((sequences,), (sequences, 4), (sequences + 1,), (1,))]
    arrays = _normal(rng, 40, N, H), _normal(rng, 12, 8, 2 * K, H)
    _exported_is_the_call(pallas_fa.ragged_paged_attention, like, *arrays, *numbers)


def test_arrays_of_custom_masks_need_a_length_of_at_least_two():
    sizes = export.symbolic_shape("b, t, s", constraints=["t >= 2", "s >= 2"])
    array = jax.ShapeDtypeStruct((sizes[1], 1), jnp.bool_)

    def attend(q, k, v, array):
        return pallas_fa.dot_product_attention(q, k, v, mask=Custom(lambda b, n, t, s, x: x, array))

    assert export.export(jax.jit(attend))(*_symbolic(sizes=sizes), array).out_avals[0].shape == (*sizes[:2], N, H)


def test_closed_over_arrays_of_a_symbolic_length(rng):
    """They are no blocks of a mask, though bound with as many dims."""
    near = jnp.array([True, False, True])
    table = jnp.linspace(-1, 1, 7)
    mask = Custom(lambda b, n, t, s: near[abs(t - s) % 3])
    score = scores.Custom(lambda x, b, n, t, s: x + table[s % 7])

    def attend(q, k, v):
        return pallas_fa.dot_product_attention(q, k, v, mask=mask, score=score, implementation="xla")

    exported = export.export(jax.jit(attend))(*_symbolic(jnp.float32))
    for sizes in SIZES:
        x = list(_arrays(rng, *sizes).values())
        np.testing.assert_allclose(exported.call(*x), attend(*x), atol=1e-5)


def test_block_masks_of_a_symbolic_batch():
    b, sizes = ANY[0], (ANY[0], 64, 64)
    blocks = jax.ShapeDtypeStruct((b, 1, 4, 4), jnp.bool_)

    def attend(q, k, v, blocks):
        return pallas_fa.dot_product_attention(q, k, v, mask=masks.BlockMask(blocks, 16))

    assert export.export(jax.jit(attend))(*_symbolic(sizes=sizes), blocks).out_avals[0].shape == (b, 64, N, H)


def test_gradients_of_a_score_with_int_arrays_of_a_symbolic_size():
    """An int array has no gradient, and no array of zeros of its size is made for one."""
    (b,) = export.symbolic_shape("b")
    # Bound with an offset for each batch entry.
    alibi = scores.Alibi(jnp.array([0.1, 0.2, 0.3, 0.4]), align="bottom_right")

    def gradient(q, lengths):
        attend = lambda q: pallas_fa.dot_product_attention(q, q, q, score=alibi, key_value_seq_lengths=lengths)
        return jax.grad(lambda q: jnp.sum(attend(q)))(q)

    like = jax.ShapeDtypeStruct((b, 8, N, H), jnp.float32), jax.ShapeDtypeStruct((b,), jnp.int32)
    assert export.export(jax.jit(gradient))(*like).out_avals[0].shape == (b, 8, N, H)


@pytest.mark.parametrize("gradient", (False, True))
def test_kernels_are_for_one_platform(gradient):
    x = jax.ShapeDtypeStruct((1, 128, N, 64), jnp.bfloat16)
    transformed = (
        (lambda attend: jax.grad(lambda *x: attend(*x).sum().astype(jnp.float32))) if gradient else lambda f: f
    )
    with pytest.raises(NotImplementedError, match="several platforms at once, here cpu, cuda. .* implementation='xla'"):
        _export(x, x, x, platforms=("cpu", "cuda"), transformed=transformed)
    assert _export(x, x, x, platforms=("cpu", "cuda"), transformed=transformed, implementation="xla").platforms
