"""`pallas_fa.nn` against Flax's own attention: the hook and the drop-in modules, linen and nnx."""

import dataclasses
import functools
import subprocess
import sys

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import pallas_fa
import pallas_fa.nn
from pallas_fa import attention, masks, scores
from pallas_fa.backends.xla import chunks
from pallas_fa.backends.xla.visits import visited_interval
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.nn import attention_fn

T, D, N, H = 12, 16, 4, 4
FRAMEWORKS = ["linen", "nnx"]
IDS = ("query_segment_ids", "key_value_segment_ids")

# The programs here are many and tiny: to compile them without LLVM's optimizations takes a third of the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def compiled(call):
    """`call`, compiled; its keyword arguments are constants of the program."""
    return lambda *args, **kwargs: jit(functools.partial(call, **kwargs))(*args)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def make(framework, ours, *inputs, **fields):
    """(parameters as a pure dict, call(parameters, *inputs, **arguments)) of Flax's module or of ours."""
    if framework == "linen":
        cls = pallas_fa.nn.linen.MultiHeadDotProductAttention if ours else flax.linen.MultiHeadDotProductAttention
        layer = cls(num_heads=N, qkv_features=N * H, **fields)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        init = jit(layer.init)
        return init(keys, *inputs)["params"], lambda params, *a, **kw: layer.apply({"params": params}, *a, **kw)
    cls = pallas_fa.nn.nnx.MultiHeadAttention if ours else nnx.MultiHeadAttention
    layer = cls(N, D, N * H, decode=False, rngs=nnx.Rngs(params=0, dropout=1), **fields)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def call(pure, *args, **kwargs):
        state = jax.tree.map(lambda x: x, params)
        nnx.replace_by_pure_dict(state, pure)
        return nnx.merge(graph, state, rest)(*args, **kwargs)

    return nnx.to_pure_dict(params), call


def with_gradients(call, params, *inputs, **kwargs):
    """(output, its gradients to parameters and inputs, for some cotangent)."""

    def loss(params, *inputs):
        out = call(params, *inputs, **kwargs)
        return jnp.sum(out.astype(jnp.float32) * normal(9, *out.shape)), out

    gradients, out = jit(jax.grad(loss, argnums=tuple(range(1 + len(inputs))), has_aux=True))(params, *inputs)
    return out, gradients


def assert_close(actual, expected, tolerance=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.float64(a), np.float64(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0)))


def padding(*batch):
    """int32 [*B, 1, 1, T] of 0 and 2: no row is fully masked."""
    keep = np.random.default_rng(5).random((*batch, 1, 1, T)) < 0.6
    return jnp.asarray(2 * (keep | (np.arange(T) == 0)), jnp.int32)


CAUSAL = np.tril(np.ones((1, 1, T, T), bool))
PER_HEAD = np.stack([np.tril(np.ones((T, T), bool), n) for n in range(N)])
CALLS = {  # batch dims, mask, fields of Flax's modules
    "unbatched": ((), None, {}),
    "per-head": ((), PER_HEAD, {"precision": "highest"}),
    "float-causal": ((2,), flax.linen.make_causal_mask(jnp.ones((2, T))), {"normalize_qk": True}),
    "int-padding": ((2, 3), padding(2, 3), {}),
    # Without biases: the gradient of the key's is 0 but for roundings.
    "bfloat16": ((2,), CAUSAL, {"dtype": jnp.bfloat16, "use_bias": False}),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CALLS)
def test_equals_flax(framework, name):
    batch, mask, fields = CALLS[name]
    x = normal(1, *batch, T, D)
    params, call = make(framework, False, x, **fields)
    expected = with_gradients(call, params, x, mask=mask)
    tolerance = 3e-2 if name == "bfloat16" else 2e-5
    for ours, hook in ((False, {"attention_fn": attention_fn}), (True, {})):
        own_params, call = make(framework, ours, x, **fields, **hook)
        assert_close(own_params, params, 0)  # the same tree, and the same numbers from the same key
        assert_close(with_gradients(call, params, x, mask=mask), expected, tolerance)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cross_attention_and_is_causal(framework):
    """Three different inputs, S != T; and is_causal, as a field and in nnx also as an argument of the call."""
    q, k, v = normal(1, 2, T, D), normal(2, 2, 7, D), normal(3, 2, 7, D)
    mask = flax.linen.make_attention_mask(jnp.ones((2, T)), jnp.arange(14).reshape(2, 7) % 3 != 1)
    causal = np.tril(np.ones((T, 7), bool))[None, None]
    params, call = make(framework, False, q, k, v)
    expected = with_gradients(call, params, q, k, v, mask=mask)
    expected_causal = compiled(call)(params, q, k, v, mask=causal)

    _, call = make(framework, True, q, k, v)
    assert_close(with_gradients(call, params, q, k, v, mask=mask), expected)
    _, call = make(framework, True, q, k, v, is_causal=True)
    assert_close(compiled(call)(params, q, k, v), expected_causal)
    if framework == "nnx":
        assert_close(compiled(call)(params, q, k, v, is_causal=False, mask=mask), expected[0])
        _, call = make(framework, False, q, k, v, attention_fn=attention_fn)
        assert_close(compiled(call)(params, q, k, v, is_causal=True), expected_causal)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 2e-5), (jnp.bfloat16, 3e-2)])
def test_function_takes_what_flax_takes(dtype, tolerance):
    """Promotion, `dtype`, bias, Hv != H, force_fp32_for_softmax, as flax.linen.dot_product_attention."""
    q, k = normal(1, 2, 3, T, N, H), normal(2, 2, 3, 7, N, H, dtype=jnp.bfloat16)
    v, bias = normal(3, 2, 3, 7, N, 2 * H, dtype=jnp.float16), normal(4, N, 1, 7)
    kwargs = {"dtype": dtype, "bias": bias, "force_fp32_for_softmax": True}
    out = compiled(attention_fn)(q, k, v, **kwargs)
    assert out.shape == (2, 3, T, N, 2 * H)
    assert_close(out, compiled(flax.linen.dot_product_attention)(q, k, v, **kwargs).astype(dtype), tolerance)


def test_fully_masked_rows_give_zero():
    """The documented difference: Flax gives the mean of all values."""
    q = normal(1, 2, T, N, H)
    mask = jnp.ones((2, 1, T, T)).at[0, 0, 3].set(0)
    out, flaxs = (compiled(f)(q, q, q, mask=mask) for f in (attention_fn, flax.linen.dot_product_attention))
    np.testing.assert_array_equal(out[0, 3], 0)
    assert_close(flaxs[0, 3], q[0].mean(axis=0))
    assert_close(out.at[0, 3].set(0), flaxs.at[0, 3].set(0))


def plain_attention(query, key, value, mask=True, **kwargs):
    """What Flax has not: a soft cap, of 5."""
    logits = jnp.einsum("...tnh,...snh->...nts", query, key) / np.sqrt(query.shape[-1])
    logits = jnp.where(True if mask is None else mask, 5 * jnp.tanh(logits / 5), -jnp.inf)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(logits), value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fields(framework):
    """Causal, window, soft cap, segment ids and a mask at once, against Flax with one dense mask."""
    x, t = normal(1, 2, T, D), np.arange(T)
    ids = jnp.asarray([[0] * 5 + [3] * 7, [1] * T])
    given = padding(2).at[..., 1::2].set(0) + jnp.eye(T, dtype=jnp.int32)
    window = (t[None] >= t[:, None] - 3) & (t[None] <= t[:, None])
    dense = window & (ids[:, None, :, None] == ids[:, None, None, :]) & (given != 0)
    params, call = make(framework, False, x, attention_fn=plain_attention)
    expected = with_gradients(call, params, x, mask=dense)

    _, call = make(framework, True, x, is_causal=True, local_window_size=(3, None), logits_soft_cap=5.0)
    segments = dict.fromkeys(IDS, ids)
    assert_close(with_gradients(call, params, x, mask=given, **segments), expected)
    mask = masks.Dense(given != 0) & masks.Segments(ids, ids)
    assert_close(compiled(call)(params, x, mask=mask), expected[0])
    hook = functools.partial(attention_fn, local_window_size=(3, 0), logits_soft_cap=5.0, **segments)
    assert_close(compiled(make(framework, False, x, attention_fn=hook)[1])(params, x, mask=given), expected[0])


def test_grouped_heads():
    """linen's module with num_kv_heads against Flax nnx, which has them; the parameters are the same tree."""
    x = normal(1, 2, T, D)
    params, call = make("nnx", False, x, num_kv_heads=2)
    expected = with_gradients(call, params, x)
    for framework in FRAMEWORKS:
        _, call = make(framework, True, x, num_kv_heads=2)
        assert_close(with_gradients(call, params, x), expected)
    hook = functools.partial(attention_fn, implementation="reference")
    assert_close(compiled(make("nnx", False, x, num_kv_heads=2, attention_fn=hook)[1])(params, x), expected[0])


def decoder(framework, cls, x, **fields):
    """(call of x without a cache, step with the cache: (state, x, kwargs) -> (out, state), first state)."""
    if framework == "linen":
        module = cls(num_heads=N, qkv_features=N * H, decode=True, **fields)
        variables = jit(module.init)(jax.random.key(0), x)
        call = functools.partial(module.clone(decode=False).apply, {"params": variables["params"]})

        def linen_step(variables, x, kwargs):
            out, cache = module.apply(variables, x, mutable="cache", **kwargs)
            return out, {**variables, **cache}

        return compiled(call), jit(linen_step), variables
    layer = cls(N, D, N * H, decode=False, rngs=nnx.Rngs(0), **fields)
    layer.init_cache(x.shape)
    graph, state = nnx.split(layer)

    def nnx_step(state, x, kwargs):
        layer = nnx.merge(graph, state)
        # Flax drops `is_causal` beside a cache: at T = 1 it would leave key 0 only.
        return layer(x, decode=True, is_causal=True, **kwargs), nnx.state(layer)

    return compiled(layer), jit(nnx_step), state


def decoded(step, state, x, mask=None, **segments):
    """What `step` gives position by position, with that position's row of `mask`, or a whole `Mask`."""
    outs = []
    for t in range(x.shape[-2]):
        kwargs = {"mask": mask[..., t : t + 1, :] if isinstance(mask, jax.Array) else mask}
        kwargs |= {k: v[..., t : t + 1] if k.startswith("query") else v for k, v in segments.items()}
        out, state = step(state, x[..., t : t + 1, :], kwargs)
        outs.append(out)
    return jnp.concatenate(outs, axis=-2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_decode_with_flaxs_module(framework, batch):
    cls = flax.linen.MultiHeadDotProductAttention if framework == "linen" else nnx.MultiHeadAttention
    x = normal(1, *batch, T, D)
    causal = flax.linen.make_causal_mask(jnp.ones((*batch, T)))
    call, *cached = decoder(framework, cls, x, attention_fn=attention_fn, normalize_qk=True)
    assert_close(decoded(*cached, x), call(x, mask=causal))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_decode_with_our_module(framework, batch):
    """Window, soft cap, grouped heads, segment ids and masks count from the position in the cache."""
    cls = pallas_fa.nn.linen.MultiHeadAttention if framework == "linen" else pallas_fa.nn.nnx.MultiHeadAttention
    x = normal(1, *batch, T, D)
    ids = jnp.broadcast_to(jnp.arange(T) // 7, (*batch, T))
    mask = jnp.broadcast_to((jnp.arange(T) != 2) | jnp.eye(T, dtype=bool), (*batch, 1, T, T))
    fields = {"num_kv_heads": 2, "is_causal": True, "local_window_size": (3, 0), "logits_soft_cap": 5.0}
    segments = dict.fromkeys(IDS, ids)
    call, *cached = decoder(framework, cls, x, **fields)
    expected = call(x, mask=mask, **segments)
    assert_close(decoded(*cached, x, mask, **segments), expected)
    # A Mask is the same for all steps: the module takes the row of its position.
    rule = masks.Dense(mask) & masks.Segments(ids, ids) & masks.Lengths(kv_lengths=jnp.full(batch, T - 1))
    assert_close(decoded(*cached, x, rule)[..., : T - 1, :], expected[..., : T - 1, :])


def tilted(x, b, n, t, s, slope):
    return x - slope * jnp.abs(t - s) + jnp.sin(t / 2) * jnp.cos(s * (n + 1))


SLOPES = np.geomspace(0.5, 0.05, N).astype(np.float32)
END = {"align": "bottom_right"}
AT_POSITIONS = {
    "alibi": functools.partial(scores.Alibi, SLOPES),
    "relative": functools.partial(scores.RelativeBias, lambda offset: jnp.cos(offset * SLOPES[:, None])),
    "custom": functools.partial(scores.Custom, tilted, SLOPES[:, None, None]),
    "chain": lambda **align: scores.SoftCap(5.0).then(scores.Alibi(SLOPES, **align)),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ours", [False, True], ids=["Flax's module", "our module"])
@pytest.mark.parametrize("name", AT_POSITIONS)
def test_a_bound_score_counts_from_the_position_in_the_cache(framework, ours, name):
    """With align="bottom_right", that is; counted from the start, a step would be position 0, and is refused."""
    flaxs = flax.linen.MultiHeadDotProductAttention if framework == "linen" else nnx.MultiHeadAttention
    cls = getattr(pallas_fa.nn, framework).MultiHeadAttention if ours else flaxs
    x, hook = normal(1, 2, T, D), lambda **align: functools.partial(attention_fn, score=AT_POSITIONS[name](**align))
    causal = flax.linen.make_causal_mask(jnp.ones((2, T)))
    call, *cached = decoder(framework, cls, x, attention_fn=hook(**END))
    assert_close(decoded(*cached, x), expected := call(x, mask=causal))
    call, step, state = decoder(framework, cls, x, attention_fn=hook())
    assert_close(call(x, mask=causal), expected)
    with pytest.raises(ValueError, match="score holds a .* counts positions from the start.*align='bottom_right'"):
        step(state, x[:, :1], {})


def gained(x, b, n, t, s, gain):
    return x * gain


def seen(b, n, t, s, width):
    return t - s < width


def test_of_a_single_query_what_counts_from_the_start_is_refused():
    """Nothing else is: what does not look at t, is aligned to the end, or has been moved to a position."""
    q, kv, wide = normal(1, 2, 1, N, H), normal(2, 2, T, N, H), np.full((2, 1, 1, 1), T)
    refused = [
        {"score": scores.Alibi(SLOPES)},
        {"score": scores.SoftCap(5.0).then(scores.Custom(tilted, SLOPES[:, None, None]))},
        {"mask": masks.Causal()},
        {"mask": masks.Dense(jnp.ones((1, T), bool)) & (masks.Window(1, 0) | masks.Causal("bottom_right"))},
        {"mask": masks.Custom(seen, wide)},
        {"mask": masks.Custom(lambda b, n, t, s: s % 2 == 0, ranges=masks.Window(3, 0))},
        {"mask": masks.block_mask(masks.Causal("bottom_right"), 1, T)},
    ]
    for arguments in refused:
        with pytest.raises(ValueError, match="counts positions from the start.*one query with 12 keys"):
            attention_fn(q, kv, kv, **arguments)
        if not isinstance(arguments.get("mask"), masks.BlockMask):  # of one key it is right
            attention_fn(q, kv[:, :1], kv[:, :1], **({} if "mask" in arguments else arguments))
    taken = [
        {"score": scores.Custom(gained, SLOPES[:, None, None])},
        {"score": scores.Alibi(SLOPES, offset=T - 1)},
        {"score": scores.RelativeBias(normal(3, N, T))},
        {"mask": masks.Causal(offset=jnp.full(2, T - 1)) & masks.Window(3, 0, align="bottom_right")},
        {"mask": masks.Custom(seen, wide, **END)},
        {"mask": masks.Segments(np.zeros((2, 1), int), np.zeros((2, T), int))},
    ]
    for arguments in taken:
        want = pallas_fa.dot_product_attention(q, kv, kv, **arguments)
        np.testing.assert_array_equal(attention_fn(q, kv, kv, **arguments), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ours", [False, True], ids=["Flax's module", "our module"])
def test_decode_reads_the_filled_part_of_the_cache(framework, ours, monkeypatch):
    """What lies past the position may be NaN, and the key chunks visited are those of the filled part and the window."""
    flaxs = flax.linen.MultiHeadDotProductAttention if framework == "linen" else nnx.MultiHeadAttention
    cls = getattr(pallas_fa.nn, framework).MultiHeadAttention if ours else flaxs
    problems, run = [], attention.run

    def spy(problem, operands, implementation):
        problems.append((problem, operands.mask))
        return run(problem, operands, implementation)

    monkeypatch.setattr(attention, "run", spy)
    x, fields = normal(1, 2, 256, D), {"local_window_size": (70, 0)} if ours else {"attention_fn": attention_fn}
    _, step, state = decoder(framework, cls, x, **fields)
    with jax.disable_jit():
        _, state = step(state, x[:, :1], {})
        state = jax.tree_util.tree_map_with_path(_poison_past_150, state)
        out, _ = step(state, x[:, 150:151], {})
    assert np.isfinite(np.asarray(out)).all()
    problem, mask = problems[-1]
    np.testing.assert_array_equal(lengths_of(mask).kv_lengths.ravel(), 151)
    keys = dataclasses.replace(chunks.split_axes(problem)[1], chunk=16)
    first, end = visited_interval(mask, "kv_range", chunks.Chunks(2, 1, 1), keys)(0)
    assert (int(first), int(end)) == (5 if ours else 0, 10)


def _poison_past_150(path, x):
    """Sets a decode cache to position 150, with NaN past it."""
    if "cache_index" in str(path):
        return jnp.full_like(x, 150)
    return x.at[:, 151:].set(jnp.nan) if "cached_" in str(path) else x


@pytest.mark.parametrize("broadcast", (None, False))
def test_dropout_of_the_function(broadcast):
    """That of `dot_product_attention`, where Flax draws its own; batch entries and heads share it, unless told not to."""
    qkv, key = tuple(normal(i, 2, T, N, H) for i in range(3)), jax.random.key(4)
    given = {} if broadcast is None else {"broadcast_dropout": broadcast}
    options = {"is_causal": True, "dropout_rate": 0.3}
    want = pallas_fa.dot_product_attention(*qkv, **options, dropout_key=key, broadcast_dropout=broadcast is None)
    plain = pallas_fa.dot_product_attention(*qkv, is_causal=True)
    assert not np.allclose(want, plain, atol=1e-2)
    for name in ("dropout_rng", "dropout_key"):
        assert_close(attention_fn(*qkv, **options, **given, **{name: key}), want)
        assert_close(attention_fn(*qkv, **options, **given, **{name: key}, deterministic=True), plain)
    with pytest.raises(ValueError, match="dropout_rng and dropout_key are both given"):
        attention_fn(*qkv, **options, dropout_rng=key, dropout_key=key)


def test_linen_drops_no_dropout_on_the_way_to_the_function_itself():
    """linen passes what a function's signature names, and leaves the rest out without a word."""
    x, key = jnp.ones((1, 4, 8)), jax.random.key(0)
    fields = {"num_heads": 2, "attention_fn": pallas_fa.dot_product_attention}
    with pytest.raises(ValueError, match="dropout_rate=0.1, but dropout_key=None.*pallas_fa.nn.attention_fn"):
        module = flax.linen.MultiHeadDotProductAttention(**fields, dropout_rate=0.1)
        module.init_with_output({"params": key, "dropout": key}, x, deterministic=False)
    out, _ = flax.linen.MultiHeadDotProductAttention(**fields).init_with_output(key, x)
    assert out.shape == x.shape


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_in_modules(framework):
    """Flax's module with our function and ours do the same, from the same key; without dropout they do what Flax does."""
    x = normal(1, 2, T, D)
    fields = {"dropout_rate": 0.3, "broadcast_dropout": False}
    params, flaxs = make(framework, False, x, **fields, deterministic=True)
    hooked, ours, plain = (
        make(framework, own, x, **hook, **fields)[1]
        for own, hook in (
            (False, {"attention_fn": attention_fn, "deterministic": False}),
            (True, {"deterministic": False}),
            (True, {"deterministic": True}),
        )
    )

    @jit
    def run(params, x, *keys):
        rngs = lambda key: {"dropout": key} if framework == "linen" else nnx.Rngs(dropout=key)
        dropped = [call(params, x, rngs=rngs(key)) for call in (hooked, ours) for key in keys]
        return flaxs(params, x), dropped, plain(params, x)

    expected, (hooked_1, hooked_2, ours_1, ours_2), undropped = run(params, x, jax.random.key(4), jax.random.key(5))
    assert_close((ours_1, ours_2), (hooked_1, hooked_2))
    assert_close(undropped, expected)
    assert not np.allclose(ours_1, ours_2, atol=1e-2) and not np.allclose(ours_1, expected, atol=1e-2)


FIELDS = [{}, {"normalize_qk": True}, {"use_bias": False}, {"decode": True}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_checkpoints_of_linen(fields):
    """Automatic names, parameters and cache: bytes written by one are read by the other."""
    x = normal(1, 2, T, D)
    for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):
        states, calls = [], []
        for library in (flax.linen, pallas_fa.nn.linen):

            class Model(flax.linen.Module):
                cls: type

                @flax.linen.compact
                def __call__(self, x):
                    return x + self.cls(num_heads=N, **fields)(x)

            model = Model(getattr(library, name))
            states.append(jit(model.init)(jax.random.key(len(states)), x))
            calls.append(jit(functools.partial(model.apply, mutable="cache")))
        assert list(states[0]["params"]) == [f"{name}_0"]
        step = x[:, :1] if "decode" in fields else x
        for source, target in ((0, 1), (1, 0)):
            read = serialization.from_bytes(states[target], serialization.to_bytes(states[source]))
            assert_close(calls[target](read, step), calls[source](states[source], step))


@pytest.mark.parametrize("fields", [*FIELDS, {"num_kv_heads": 2}], ids=str)
def test_checkpoints_of_nnx(fields):
    x = normal(1, 2, T, D)
    decode = fields.get("decode", False)
    layers = [
        cls(N, D, rngs=nnx.Rngs(seed), **({"decode": False} | fields))
        for seed, cls in enumerate((nnx.MultiHeadAttention, pallas_fa.nn.nnx.MultiHeadAttention))
    ]
    if decode:
        [layer.init_cache(x.shape) for layer in layers]
    for source, target in (layers, layers[::-1]):
        nnx.update(target, nnx.state(source))
        kind = nnx.Any(nnx.Param, nnx.Cache)
        assert_close(nnx.to_pure_dict(nnx.state(target, kind)), nnx.to_pure_dict(nnx.state(source, kind)), 0)
        step = x[:, :1] if decode else x
        assert_close(*(nnx.jit(lambda layer, x: layer(x))(layer, step) for layer in (target, source)))
        nnx.update(target, jax.tree.map(lambda x: x + 1, nnx.state(target)))  # so that the way back has something to do


ERRORS = {  # fields, arguments of the call, what is raised
    "sow_weights": ({}, {"sow_weights": True}, NotImplementedError, "never in memory here.*dot_product_attention"),
    "rate": ({"dropout_rate": 1.5}, {}, ValueError, r"dropout_rate=1.5 must be in \[0, 1\)"),
    "soft cap": ({"logits_soft_cap": -1.0}, {}, ValueError, "logits_soft_cap=-1.0 must be positive"),
    "window": ({"local_window_size": (1, -2)}, {}, ValueError, r"local_window_size\[1\]=-2 must not be negative"),
    "one id": ({}, {"query_segment_ids": np.zeros((2, T), int)}, ValueError, "both or neither"),
    "ids": (
        {},
        dict.fromkeys(IDS, np.zeros(T, int)),
        ValueError,
        r"query_segment_ids.shape=\(12,\) must be \[\*B, T\]",
    ),
    "use_sinks": ({"use_sinks": "no"}, {}, TypeError, "use_sinks='no' must be True or False"),
    "is_causal": ({"is_causal": "no"}, {}, TypeError, "is_causal='no' must be True or False"),
    "text": ({}, {"mask": "causal"}, TypeError, "mask='causal' is a str; it must be a bool or number array"),
    "class": ({}, {"mask": masks.Causal}, TypeError, r"mask is the class Causal.*mask=Causal\(\.\.\.\)"),
    "mask": ({}, {"mask": np.ones((2, T, T))}, ValueError, r"mask.shape=\(2, 12, 12\) is not broadcastable"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_modules(framework, name):
    fields, kwargs, error, match = ERRORS[name]
    x = normal(1, 2, T, D)
    with pytest.raises(error, match=match):
        make(framework, True, x, deterministic=False, **fields)[1](make(framework, True, x)[0], x, **kwargs)


def test_errors_of_linen_modules():
    x = normal(1, 2, T, D)
    for ours, hook in ((False, {"attention_fn": attention_fn}), (True, {})):
        for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum"):
            with pytest.raises(NotImplementedError, match=f"{name}=.* cannot be replaced. Leave {name}_cls=None"):
                make("linen", ours, x, **{f"{name}_cls": lambda: jnp.einsum}, **hook)
    for wrong, message in (
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_kv_heads": "2"}, "num_kv_heads='2' must be an int of at least 1. Use None"),
    ):
        with pytest.raises(ValueError, match=message):
            make("linen", True, x, **wrong)
    with pytest.raises(ValueError, match=f"qkv_features={D} must be a multiple of num_heads=0"):
        pallas_fa.nn.linen.MultiHeadAttention(num_heads=0).init(jax.random.key(0), x)
    with pytest.raises(
        TypeError, match="not an argument here. In a Flax module pass attention_fn=pallas_fa.nn.attention_fn"
    ):
        make("linen", True, x, attention_fn=pallas_fa.dot_product_attention)
    call, step, state = decoder("linen", pallas_fa.nn.linen.MultiHeadAttention, x)
    with pytest.raises(ValueError, match="decode=True takes one position at a time"):
        step(state, x, {})
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        call(x, inputs_v=x)


def test_errors_of_the_function():
    q = normal(1, 2, T, N, H)
    with pytest.raises(ValueError, match="dropout_rng=None, but dropout is active"):
        attention_fn(q, q, q, dropout_rate=0.1)
    for wrong, message in (
        ({"key": None}, r"key=None is a NoneType; it must be a float array \[\*B, length"),
        ({"dtype": "bf16"}, "dtype='bf16' must be a float dtype"),
        ({"dtype": jnp.int32}, "dtype=.*int32.* must be a float dtype.*Leave it out"),
        ({"mask": (masks.Causal(), q)}, "is a tuple; .* Combine masks by `&`"),
        ({"deterministic": "no", "dropout_rate": 0.1}, "deterministic='no' must be True or False"),
        ({"dropout_rate": jnp.zeros(2)}, "dropout_rate=.* must be a Python float"),
    ):
        with pytest.raises(TypeError, match=message):
            attention_fn(**{"query": q, "key": q, "value": q} | wrong)
    with pytest.raises(NotImplementedError, match="attention_fn rotates nothing.*RoPE"):
        layer = nnx.MultiHeadAttention(N, D, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        layer(normal(1, 2, T, D), input_positions=jnp.zeros((2, T), int))
    for kwargs in ({"is_causal": True}, {"local_window_size": (3, 0)}):  # a cache: position 0 it is not
        with pytest.raises(ValueError, match="one query with 12 keys would be taken for position 0"):
            attention_fn(q[:, -1:], q, q, **kwargs)


def test_linen_scan_and_remat():
    """Two layers under nn.scan and nn.remat: as Flax's own attention in the same stack."""
    x, mask = normal(1, 2, T, D), flax.linen.make_causal_mask(jnp.ones((2, T)))

    def stack(cls, **fields):
        class Block(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x, mask):
                return x + cls(num_heads=N, name="attention", **fields)(x, mask=mask), None

        layers = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": flax.linen.broadcast}
        model = flax.linen.scan(flax.linen.remat(Block), length=2, **layers)()
        variables = jit(model.init)(jax.random.key(0), x, mask)
        return with_gradients(lambda variables, x: model.apply(variables, x, mask)[0], variables, x)

    expected = stack(flax.linen.MultiHeadDotProductAttention)
    assert_close(stack(flax.linen.MultiHeadDotProductAttention, attention_fn=attention_fn), expected)
    assert_close(stack(pallas_fa.nn.linen.MultiHeadDotProductAttention), expected)


@pytest.mark.smoke
def test_nnx_transforms():
    """nnx.jit, nnx.grad, nnx.remat and nnx.scan of stacked layers; a Mask is an argument like any other."""
    x = normal(1, 2, T, D)

    def gradients(cls, mask, **fields):
        @nnx.vmap(in_axes=0)
        def layers(rngs):
            return cls(N, D, decode=False, rngs=rngs, **fields)

        @nnx.remat
        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
        def run(layer, x, mask):
            return x + layer(x, mask=mask)

        stacked = layers(nnx.Rngs(0).split(2))
        return nnx.jit(nnx.grad(lambda layer, x, mask: jnp.sum(jnp.sin(run(layer, x, mask)))))(stacked, x, mask)

    expected = nnx.to_pure_dict(gradients(nnx.MultiHeadAttention, CAUSAL))
    ours = gradients(pallas_fa.nn.nnx.MultiHeadAttention, masks.Causal())
    hooked = gradients(nnx.MultiHeadAttention, masks.Causal(), attention_fn=attention_fn)
    assert_close(nnx.to_pure_dict(ours), expected)
    assert_close(nnx.to_pure_dict(hooked), expected)


def test_nnx_modules_compile_once():
    """Two modules of the same fields are one program: the fields are static and comparable."""
    traced = []

    @nnx.jit
    def call(layer, x):
        traced.append(layer.logits_soft_cap)
        return layer(x)

    for seed, cap in enumerate((5.0, 5.0, 6.0)):
        fields = {"local_window_size": (3, 0), "logits_soft_cap": cap, "implementation": ("mosaic_gpu", "xla")}
        call(pallas_fa.nn.nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(seed), **fields), normal(1, T, D))
    assert traced == [5.0, 6.0]


@pytest.mark.smoke
def test_flax_is_optional(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pallas_fa.nn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pallas_fa, "nn")
    monkeypatch.setitem(sys.modules, "flax", None)  # makes `import flax` fail
    with pytest.raises(ImportError, match=r"pip install 'pallas_fa\[flax\]'"):
        import pallas_fa.nn as _  # noqa: F401
    subprocess.run([sys.executable, "-c", "import pallas_fa, sys; assert 'flax' not in sys.modules"], check=True)
