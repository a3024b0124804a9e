"""Functions of `Custom` masks and scores: elementwise ones are right on every implementation, others are refused."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_fa
from pallas_fa import masks, scores

B, T, S, N = 2, 130, 140, 2
EVERY = ("mosaic_gpu", "xla", "reference", None)
X = jax.ShapeDtypeStruct((B, 64, N, 16), jnp.bfloat16)
IDS = jnp.arange(1000) // 70
KEY = jax.random.key(0)
INDEX = np.ogrid[:B, :N, :T, :S]
Q, K, V = (np.random.default_rng(i).standard_normal((B, n, N, 8), np.float32) for i, n in enumerate((T, S, S)))


def attend(implementation="xla", **keywords):
    return pallas_fa.dot_product_attention(Q, K, V, implementation=implementation, **keywords)


def dense(x, allowed=True):
    """Attention with the logits x [B, N, T, S] in NumPy."""
    x = np.where(allowed, x, -np.inf)
    top = x.max(axis=-1, keepdims=True)
    p = np.exp(x - np.where(np.isinf(top), 0, top))
    total = p.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", p / np.where(total, total, 1), V)


LOGITS = np.einsum("btnh,bsnh->bnts", Q, K, dtype=np.float64) / 8**0.5

# ---- what is elementwise --------------------------------------------------------------------------------------------

# Functions of integers, written once for NumPy and jax.numpy (`np` in both): a mask must be right bit for bit.
INTS = st.recursive(
    st.sampled_from(("b", "n", "t", "s", "rows", "columns", "heads", "np.int32(7)", "np.int32(-3)")),
    lambda x: st.one_of(
        st.builds("({} {} {})".format, x, st.sampled_from("+ - * ^ & |".split()), x),
        st.builds("({} {} {})".format, x, st.sampled_from(("%", "//")), st.sampled_from(("3", "5", "64"))),
        st.builds("np.{}({}, {})".format, st.sampled_from(("maximum", "minimum")), x, x),
        st.builds("np.{}({})".format, st.sampled_from(("abs", "sign", "square")), x),
        st.builds("np.where({} < {}, {}, {})".format, x, x, x, x),
        st.builds("np.clip({}, -20, 50)".format, x),
        st.builds("np.broadcast_to({}, np.shape(b + n + t + s))".format, x),
        st.builds("({} > 2).astype(np.int32)".format, x),
    ),
    max_leaves=8,
)
BOOLS = st.recursive(
    st.builds("({} {} {})".format, INTS, st.sampled_from("< <= == != > >=".split()), INTS),
    lambda x: st.one_of(
        st.builds("({} {} {})".format, x, st.sampled_from("&|^"), x),
        st.builds("~{}".format, x),
        st.builds("np.where({}, {}, {})".format, x, x, x),
    ),
    max_leaves=3,
)
# Of floats, only what no rounding error can move far.
FLOATS = st.recursive(
    st.sampled_from(("x", "x", "gain", "np.float32(0.5)", "(s - t) * np.float32(0.01)", "(n + 1) * np.float32(0.3)")),
    lambda x: st.one_of(
        st.builds("({} {} {})".format, x, st.sampled_from("+-*"), x),
        st.builds("np.{}({})".format, st.sampled_from("tanh sin cos abs square".split()), x),
        st.builds("np.{}({}, {})".format, st.sampled_from(("maximum", "minimum")), x, x),
        st.builds("np.where({}, {}, {})".format, BOOLS, x, x),
        st.builds("np.broadcast_to({}, np.shape(x))".format, x),
    ),
    max_leaves=6,
)
RNG = np.random.default_rng(5)
ROWS = RNG.integers(0, 9, (B, 1, T, 1)).astype(np.int32)
COLUMNS = RNG.integers(0, 9, (S,)).astype(np.int32)
HEADS = RNG.integers(0, 9, (N, 1, 1)).astype(np.int32)
GAIN = RNG.standard_normal((N, T, 1)).astype(np.float32)
ARRAYS = (ROWS, COLUMNS, HEADS)


def compiled(source, of_logit=False, np=jnp):
    arguments = "x, b, n, t, s, rows, columns, heads, gain" if of_logit else "b, n, t, s, rows, columns, heads"
    return eval(f"lambda {arguments}: {source}", {"np": np, "jnp": jnp})


@hypothesis.given(st.lists(BOOLS, min_size=3, max_size=3))
@hypothesis.settings(max_examples=8, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_elementwise_masks_equal_dense_ones(small_chunks, sources):
    """On xla, whose chunks are 64 x 64 here; three masks in a program, since compiling takes the time."""
    got = jax.jit(lambda: [attend(mask=masks.Custom(compiled(source), *ARRAYS)) for source in sources])()
    for source, out in zip(sources, got, strict=True):
        allowed = compiled(source, np=np)(*(i.astype(np.int32) for i in INDEX), *ARRAYS)
        np.testing.assert_allclose(out, dense(LOGITS, allowed), atol=1e-5, err_msg=source)


@hypothesis.given(st.lists(FLOATS, min_size=3, max_size=3))
@hypothesis.settings(max_examples=8, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_elementwise_scores_equal_dense_ones(small_chunks, sources):
    def custom(source):
        return scores.Custom(compiled(source, of_logit=True), *ARRAYS, GAIN)

    got = jax.jit(lambda: [attend(score=custom(source)) for source in sources])()
    for source, out in zip(sources, got, strict=True):
        x = compiled(source, of_logit=True, np=np)(LOGITS, *INDEX, *ARRAYS, GAIN)
        x = np.broadcast_to(x, LOGITS.shape)
        hypothesis.assume(abs(x).max() < 30)
        np.testing.assert_allclose(out, dense(x), atol=1e-4, err_msg=source)


def _branches(x, b, n, t, s, gain):
    y = lax.cond(IDS[200] > 1, lambda: x * gain, lambda: x)
    y = jnp.select([t > s, x < 0], [y, gain], 0.5) + jnp.piecewise(x, [x < 0, x > 1], [jnp.sin, jnp.cos, 0.5])
    y = lax.fori_loop(0, 3, lambda i, c: c * 0.5 + gain, y)
    y = lax.while_loop(lambda c: c[0] < IDS[250], lambda c: (c[0] + 1, c[1] * 0.9), (0, y))[1]
    return lax.scan(lambda c, factor: (c * factor + x, None), y, jnp.arange(3.0) / 4)[0]


def _lifted(x, b, n, t, s, gain):
    """Axes that are stacked on and reduced again, mapped over, moved away and back."""
    y = jnp.stack([x, x * gain]).sum(axis=0) + jnp.stack([x, -x, 2 * x], axis=-1).max(axis=-1)
    y = y + jnp.vectorize(lambda x, t, s: lax.cond(t > s, lambda: x, lambda: 2 * x))(x, t, s)
    y = y + jax.vmap(lambda row: row * 2)(x) + jnp.swapaxes(jnp.swapaxes(x, 1, 2) * 2, 1, 2)
    y = y + jax.nn.one_hot(abs(t - s) % 8, 8) @ jnp.arange(8.0) + jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2)
    return y * t.reshape(t.shape[2], 1) * 0.01 + jax.grad(lambda x: jnp.sum(jnp.tanh(x)))(x)


def _random_by_position(x, b, n, t, s, gain):
    draw = lambda i: jax.random.uniform(jax.random.fold_in(KEY, i))
    return x + jnp.vectorize(draw)(t * 1000 + s)


def _ordinary(x, b, n, t, s, gain):
    y = jnp.clip(x, -1, gain) + jnp.broadcast_to(gain, x.shape) + jnp.zeros(x.shape) + jnp.full_like(x, 2.0) / x.ndim
    y = y + jax.nn.softplus(x) + jax.nn.gelu(x) + jnp.logaddexp(x, gain) + jnp.nan_to_num(jnp.sinc(x)) + x**2.5 % 2
    y = jnp.where(jnp.isin(s, jnp.array([1, 5, 7])), y, x.astype(jnp.float32)) + jax.checkpoint(jnp.sin)(x)
    return (
        y + jnp.asarray(3.0) + jnp.polyval(jnp.array([0.1, 0.2]), x) + jax.jvp(jnp.tanh, (x,), (jnp.ones_like(x),))[1]
    )


@pytest.mark.parametrize("fn", (_branches, _lifted, _random_by_position, _ordinary), ids=lambda fn: fn.__name__)
def test_what_users_write_is_elementwise(fn, small_chunks):
    score = scores.Custom(lambda x, *rest: jnp.nan_to_num(fn(x, *rest)) * 0.1, GAIN)
    got, want = (attend(implementation, score=score) for implementation in ("xla", "reference"))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "fn", (lambda x, *_: 0.0, lambda x, b, n, t, s: -0.01 * abs(t - s), lambda x, *_: x.astype(jnp.float16)),
    ids=("constant", "no logit", "float16"),
)  # fmt: skip
def test_results_of_scores_are_brought_to_the_logits(fn, small_chunks):
    """To their shape and dtype, in the gradient as well."""
    q, k, v = map(jnp.asarray, (Q, K, V))

    def gradients(implementation):
        def loss(q, k, v):
            out = pallas_fa.dot_product_attention(q, k, v, score=scores.Custom(fn), implementation=implementation)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for got, want in zip(*map(gradients, ("xla", "reference")), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


# ---- what is not ----------------------------------------------------------------------------------------------------

MIXED = (
    "jnp.max({0}, axis=-1, keepdims=True)", "jnp.min({0}, axis=2, keepdims=True)", "jnp.mean({0})",
    "jnp.sum({0}, axis=0)", "jnp.argmax({0}, axis=-1, keepdims=True)", "jnp.cumsum({0}, axis=-1)",
    "lax.cummax({0}, axis=2)", "jnp.sort({0}, axis=-1)", "jnp.argsort({0}, axis=2)", "jnp.flip({0}, axis=-1)",
    "jnp.roll({0}, 1, axis=-1)", "{0}[..., :1]", "{0}[:, :, 3:4]",
    "jnp.concatenate([{0}[..., 1:], {0}[..., :1]], axis=-1)", "jnp.pad({0}[..., 1:], [(0, 0)] * 3 + [(1, 0)])",
    "jnp.take({0}.ravel(), s)", "{0}[0, 0, t, s]", "jnp.take_along_axis({0}, t % 2, axis=2)",
    "{0}.ravel().reshape({0}.shape)", "lax.dynamic_slice_in_dim({0}, 0, 1, axis=3)", "{0} * {0}.shape[-1]",
    "{0} * len({0})", "jnp.arange({0}.shape[-1])", "lax.broadcasted_iota(jnp.int32, {0}.shape, 2)", "jnp.tril({0})",
    "{0} * jax.random.bernoulli(KEY, 0.5, {0}.shape)", "jax.nn.softmax({0} * 1.0)", "jnp.fft.fft({0}, axis=-1).real",
    "jnp.ones({0}.shape).sum(axis=-1, keepdims=True)", "jnp.matmul({0}, jnp.ones(({0}.shape[-1], 1)))",
    "lax.fori_loop(0, {0}.shape[-1], lambda i, c: c + 1, {0})", "lax.cond(({0} > 0).any(), lambda: {0}, lambda: -{0})",
    "lax.while_loop(lambda c: (c > 99).any(), lambda c: c // 2, {0})",
    "lax.scan(lambda c, y: (c + y, c), {0}[0], {0})[1]", "jnp.median({0}, axis=-1, keepdims=True)",
    "jnp.where({0} >= lax.top_k({0}, 3)[0][..., -1:], {0}, 0)", "jnp.linspace(0, 1, {0}.shape[-1])",
    "jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct({0}.shape, {0}.dtype), {0})", "IDS[:47]",
    "jnp.swapaxes({0}, 2, 3)", "jnp.expand_dims({0}, 0)", "{0}.T", "jax.lax.associative_scan(jnp.add, {0}, axis=3)",
    "np.tri(*{0}.shape[2:])",
)  # fmt: skip


def refuses(implementation, match=None, **keywords):
    with pytest.raises((ValueError, TypeError), match=match or "is not elementwise|sizes") as error:
        jax.eval_shape(lambda x: pallas_fa.dot_product_attention(x, x, x, implementation=implementation, **keywords), X)
    message = str(error.value)
    assert "fn=<function" in message and len(message) < 700, message
    return message


@hypothesis.given(INTS, st.sampled_from(MIXED), BOOLS, st.sampled_from(EVERY))
@hypothesis.settings(max_examples=120)
def test_functions_that_mix_positions_are_refused(inner, mixed, outer, implementation):
    """Whatever is mixed, in masks and in scores."""
    inner = f"({inner} + 0 * (b + n + t + s))"
    names = {"np": jnp, "jnp": jnp, "lax": lax, "jax": jax, "KEY": KEY, "IDS": IDS}
    arguments = "b, n, t, s, rows, columns, heads"
    arrays = [x[..., :64, :] if x.shape[-2:-1] == (T,) else x[..., :64] for x in ARRAYS]
    rule = eval(f"lambda {arguments}: ({mixed.format(inner)} > 0) ^ {outer}", names)
    refuses(implementation, mask=masks.Causal() | masks.Custom(rule, *arrays))
    change = eval(f"lambda x, {arguments}: jnp.where({outer}, x, 0.0) + {mixed.format(f'({inner} * x)')}", names)
    refuses(implementation, score=scores.SoftCap(3.0).then(scores.Custom(change, *arrays)))


@pytest.mark.parametrize("implementation", EVERY)
def test_why_a_function_is_refused(implementation):
    """The operation, the axis and the remedy are named."""
    ids = jnp.broadcast_to(jnp.arange(64) // 20, (B, 1, 1, 64))
    look_up = lambda b, n, t, s, ids: jnp.take(ids.ravel(), t) == jnp.take(ids.ravel(), s)
    message = refuses(implementation, mask=masks.Custom(look_up, ids))
    assert "reshape" in message and "Custom(fn, ids[:, None, :, None], ids[:, None, None, :])" in message
    message = refuses(implementation, mask=masks.Custom(lambda b, n, t, s, ids: ids[0, 0, 0, t] == 1, ids))
    assert "indexes an argument (gather)" in message and "use it without an index" in message
    message = refuses(implementation, score=scores.Custom(lambda x, *_: x - x.max(-1, keepdims=True)))
    assert "reduce_max along the keys" in message and "pass the result as an array" in message
    message = refuses(implementation, score=scores.Custom(lambda x, *_: x / x.shape[-1]))
    assert "sizes of its arguments" in message and "functools.partial" in message
    message = refuses(implementation, score=scores.Custom(lambda x, *_: x + jnp.arange(47.0)))
    assert "lines the keys up" in message and "Custom(fn, array)" in message
    slopes = jnp.ones((2, 1, 1))
    message = refuses(implementation, "ncompatible shapes", score=scores.Custom(lambda x, *_: x * slopes))
    assert "closes over" in message and "Custom(fn, array)" in message
    message = refuses(implementation, "arguments", mask=masks.Custom(lambda b, n: b > n))
    assert "[b, n, t, s]" in message
    numpy_ids = np.arange(64) // 20
    message = refuses(implementation, "__array__", mask=masks.Custom(lambda b, n, t, s: numpy_ids[t] == numpy_ids[s]))
    assert "must be JAX's (jnp.asarray), and indexed by" in message
    for unknown in (lambda b, n, t, s: (t - s).lt(5), lambda b, n, t, s: ids[b, 0, 0, t, 0] == 1):
        assert "traced arrays" in refuses(
            implementation, "has no attribute|Too many indices", mask=masks.Custom(unknown)
        )


@pytest.mark.parametrize("implementation", EVERY)
def test_dtypes_and_results(implementation):
    """An integer mask would be wrong under `&`: True & 2 is 0."""
    flags = jnp.arange(64) % 3
    for fn in (lambda b, n, t, s, flags: flags, lambda *_: 1):
        message = refuses(implementation, "int32", mask=masks.Causal() & masks.Custom(fn, flags))
        assert "must be bool" in message and "result != 0" in message
    message = refuses(implementation, "float32", mask=masks.Custom(lambda b, n, t, s: 1.0 * t))
    assert "must be bool" in message
    for fn, dtype in ((lambda x, b, n, t, s: t - s, "int32"), (lambda x, b, n, t, s: t < s, "bool")):
        message = refuses(implementation, dtype, score=scores.Custom(fn))
        assert "must be a float" in message and ".astype(x.dtype)" in message
    for fn, what in ((lambda *_: None, "NoneType"), (lambda *_: (True, True), "tuple")):
        assert what in refuses(implementation, "must return one array", mask=masks.Custom(fn))
    message = refuses(implementation, score=scores.Custom(lambda x, *_: x[..., None] * jnp.ones(3)))
    assert "[B, N, T, S, *] in the places of [B, N, T, S]" in message


@pytest.mark.parametrize("lengths", (None, np.array([S, 9])))
def test_positions_aligned_to_the_end(lengths, small_chunks):
    """t is counted so that the last query stands at the last key; the arrays stay those of the call."""
    b, n, t, s = INDEX
    keys, table = np.full(B, S) if lengths is None else lengths, np.sin(np.arange(T))[:, None]
    at = t + keys[:, None, None, None] - T
    rule = lambda b, n, t, s, x: (t - s < 40) & (s <= t + 3 * n) | (x > 0.9)
    step = lambda x, b, n, t, s, y: x * jnp.cos(t / 9) + y * (t - s) / 50
    mask, score = (kind(fn, table, align="bottom_right") for kind, fn in ((masks.Custom, rule), (scores.Custom, step)))
    x = LOGITS
    want = dense(x * np.cos(at / 9) + table * (at - s) / 50, rule(b, n, at, s, table) & (s < keys[:, None, None, None]))
    for implementation in ("xla", "reference"):
        out = attend(implementation, mask=mask, score=score, key_value_seq_lengths=lengths)
        np.testing.assert_allclose(out, want, atol=2e-5)


def test_wrong_alignments():
    for kind, fn in ((masks.Custom, lambda b, n, t, s: s <= t), (scores.Custom, lambda x, b, n, t, s: x)):
        with pytest.raises(ValueError, match="align='bottom' is not a way to align Custom"):
            kind(fn, align="bottom")
