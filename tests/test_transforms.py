"""jit, grad, vmap, remat and scan, of out and lse, with masks and scores as arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import scores
from pallas_fa.masks import Causal, Custom, Dense, Lengths, Segments, Window
from pallas_fa.scores import Alibi, Bias
from tests.cases import wave

IMPLEMENTATIONS = ("xla", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

B, T, S, N, K, H = 2, 5, 6, 4, 2, 8
FLOATS = ("query", "key", "value", "bias", "scale", "slopes", "sinks")


def _normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def arguments(rng):
    """One of everything that can be mapped over."""
    return {
        "query": _normal(rng, B, T, N, H),
        "key": _normal(rng, B, S, K, H),
        "value": _normal(rng, B, S, K, H),
        "bias": _normal(rng, N, 1, S),
        "scale": jnp.float32(0.3),
        "slopes": jnp.asarray([0.1, 0.2, 0.3, 0.4]),
        "sinks": jnp.asarray([0.5, -jnp.inf, 2.0, -1.0]),
        "mask": jnp.asarray(rng.random((B, 1, T, S)) < 0.8),
        "offset": jnp.asarray([1, 3]),
        "query_segment_ids": jnp.asarray(rng.integers(0, 2, (B, T))),
        "key_value_segment_ids": jnp.asarray(rng.integers(0, 2, (B, S))),
        "query_seq_lengths": jnp.asarray([4, 5]),
        "key_value_seq_lengths": jnp.asarray([6, 5]),
        "dropout_key": jnp.asarray([1, 2**31 + 7], jnp.uint32),
    }


def attend(implementation, a):
    """(out, lse) of these arguments."""
    a = dict(a)
    mask = Dense(a.pop("mask")) | Causal(offset=a.pop("offset"))
    score = Alibi(a.pop("slopes"))
    return pallas_fa.dot_product_attention(
        **a,
        mask=mask,
        score=score,
        logits_soft_cap=4.0,
        dropout_rate=0.3,
        implementation=implementation,
        return_residual=True,
    )


def loss(implementation, floats, rest):
    """A scalar of out and lse, in which every float argument has a gradient."""
    out, lse = attend(implementation, {**floats, **rest})
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))


@functools.cache
def results_of(implementation):
    """(out, lse, gradients) of a dict of arguments, jitted once for all tests of a worker."""

    def results(a):
        floats, rest = (
            {name: x for name, x in a.items() if (name in FLOATS) == is_float} for is_float in (True, False)
        )
        return attend(implementation, a), jax.grad(functools.partial(loss, implementation))(floats, rest)

    return jax.jit(results)


def close(got, want, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        largest = np.max(np.abs(y), initial=1, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, atol=tolerance * largest)


# ---- vmap -----------------------------------------------------------------------------------------------------------

_MAPPED = {
    "query": {"query": 0},
    "key": {"key": 3},
    "value": {"value": -1},
    "bias": {"bias": 1},
    "scale": {"scale": 0},
    "slopes": {"slopes": 1},
    "sinks": {"sinks": 1},
    "mask": {"mask": 4},
    "offset": {"offset": 1},
    "segment ids": {"query_segment_ids": 1, "key_value_segment_ids": 2},
    "one of the segment ids": {"key_value_segment_ids": 0},
    "lengths": {"query_seq_lengths": 0, "key_value_seq_lengths": 1},
    "one of the lengths": {"key_value_seq_lengths": 0},
    "key of dropout": {"dropout_key": 1},
    "query and bias": {"query": 2, "bias": 0},
    "key, value and mask": {"key": 0, "value": 1, "mask": 2},
    "everything": dict.fromkeys(arguments(np.random.default_rng(0)), 0),
    "everything but the query": {
        "key": 1, "value": 0, "bias": 3, "scale": 0, "slopes": 0, "sinks": 1, "mask": 1, "offset": 0, "query_segment_ids": 0,
        "key_value_segment_ids": 1, "query_seq_lengths": 1, "key_value_seq_lengths": 0,
        "dropout_key": 1,
    },
}  # fmt: skip


def _another(rng, name, x):
    """Another valid value of an argument."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x + 0.3 * _normal(rng, *x.shape)
    return jnp.roll(x, 1, axis=-1) if name != "mask" else ~x


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.smoke) if x == "everything" else x for x in _MAPPED]
)
def test_vmap_over_any_subset_of_arguments_and_axes(name, rng):
    """Results and gradients are those of a loop."""
    axes, base = _MAPPED[name], arguments(rng)
    entries = [base, *({n: _another(rng, n, x) if n in axes else x for n, x in base.items()} for _ in range(2))]
    stacked = {n: jnp.stack([e[n] for e in entries], axes[n]) if n in axes else x for n, x in base.items()}
    results = results_of("xla")
    got = jax.jit(jax.vmap(results, in_axes=({n: axes.get(n) for n in base},)))(stacked)
    want = jax.tree.map(lambda *x: jnp.stack(x), *(results(e) for e in entries))
    close(got, want)


def test_vmap_of_the_reference(rng):
    base = arguments(rng)
    other = {n: _another(rng, n, x) for n, x in base.items()}
    results = results_of("reference")
    got = jax.jit(jax.vmap(results))(jax.tree.map(lambda x, y: jnp.stack([x, y]), base, other))
    close(got, jax.tree.map(lambda *x: jnp.stack(x), results(base), results(other)))


@pytest.mark.parametrize("name", ["query", "value", "dropout_key"])
def test_gradients_through_vmap_sum_over_shared_arguments(name, rng):
    """Also where lse does not depend on what is mapped."""
    base = arguments(rng)
    mapped = jnp.stack([base[name], 2 * base[name]])

    def total(shared, mapped):
        one = lambda x: loss("xla", {**shared, name: x}, {n: x for n, x in rest.items() if n != name})
        return jnp.sum(jax.vmap(one)(mapped))

    shared = {n: base[n] for n in FLOATS if n != name}
    rest = {n: x for n, x in base.items() if n not in FLOATS}
    got = jax.jit(jax.grad(total))(shared, mapped)
    each = [results_of("xla")({**base, name: x})[1] for x in mapped]
    close(got, {n: each[0][n] + each[1][n] for n in shared})


def test_nested_vmap(rng):
    """Queries by the outer map, keys by the inner one, bias by both."""
    base = arguments(rng)
    q = _normal(rng, 2, B, T, N, H)
    k = _normal(rng, B, 3, S, K, H)
    bias = _normal(rng, 3, N, 1, S, 2)
    run = lambda q, k, bias: results_of("xla")({**base, "query": q, "key": k, "bias": bias})
    got = jax.jit(jax.vmap(jax.vmap(run, (None, 1, 0)), (0, None, -1)))(q, k, bias)
    for i in range(2):
        for j in range(3):
            close(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), run(q[i], k[:, j], bias[j, ..., i]))


def test_vmap_maps_out_axes_and_counts_as_a_batch_dim(rng):
    """A mapped axis is one more batch dim."""
    q, k = _normal(rng, 3, B, T, N, H), _normal(rng, 3, B, S, K, H)
    run = functools.partial(pallas_fa.dot_product_attention, is_causal=True)
    close(jax.vmap(run, out_axes=2)(q, k, k), jnp.moveaxis(run(q, k, k), 0, 2))


def test_vmap_over_mask_and_score_objects(rng):
    """They are pytrees: an axis for the whole object maps each of its arrays."""
    q, k = _normal(rng, B, T, N, H), _normal(rng, B, S, K, H)
    ids = jnp.asarray(rng.integers(0, 2, (3, B, T))), jnp.asarray(rng.integers(0, 2, (3, B, S)))
    slopes, gain = abs(_normal(rng, 3, N)), _normal(rng, 3, N, 1, 1)
    mask = Segments(*ids) & Window(3, None) | Lengths(None, jnp.asarray(rng.integers(1, S, (3, B))))
    score = Alibi(slopes).then(scores.Custom(wave, gain))

    @jax.jit
    def run(mask, score):
        def loss(score):
            return jnp.sum(pallas_fa.dot_product_attention(q, k, k, mask=mask, score=score, implementation="xla") ** 2)

        return jax.value_and_grad(loss)(score)

    got = jax.vmap(run)(mask, score)
    for i in range(3):
        entry = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        close(entry(got), run(entry(mask), entry(score)))
    only_mask = jax.vmap(run, in_axes=(0, None))(mask, jax.tree.map(lambda x: x[0], score))
    close(jax.tree.map(lambda x: x[0], only_mask), jax.tree.map(lambda x: x[0], got))


# ---- jit and control flow -------------------------------------------------------------------------------------------


@pytest.mark.smoke
@every_implementation
def test_masks_and_scores_cross_jit(implementation, rng):
    q, k = _normal(rng, B, T, N, H), _normal(rng, B, S, K, H)
    allowed = jnp.asarray(rng.random((T, S)) < 0.7)
    masks = [
        Causal("bottom_right") & Window(3, 1),
        Causal(offset=jnp.asarray([1, 2])),
        Segments(jnp.zeros((B, T), int), jnp.arange(B * S).reshape(B, S) % 2),
        Lengths(jnp.asarray([2, 5]), jnp.asarray([6, 1])),
        Dense(allowed) | Custom(lambda b, n, t, s, array: array & (s == t), allowed[None], ranges=Window(0, 0)),
    ]

    @jax.jit
    def run(mask, score):
        return pallas_fa.dot_product_attention(q, k, k, mask=mask, score=score, implementation=implementation)

    score = Alibi(jnp.ones(N)).then(Bias(jnp.ones(S)))
    for mask in masks:
        eager = pallas_fa.dot_product_attention(q, k, k, mask=mask, score=score, implementation="reference")
        np.testing.assert_allclose(run(mask, score), eager, atol=1e-6)


def test_eval_shape_and_shape_polymorphic_arguments_compute_nothing():
    """Shapes alone are enough: arrays of a terabyte."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    q, k, v = shape(64, 2**17, 32, 128), shape(64, 2**17, 8, 128), shape(64, 2**17, 8, 64)
    lengths = jax.ShapeDtypeStruct((64,), jnp.int32)

    def run(q, k, v, lengths):
        return pallas_fa.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, is_causal=True, implementation="xla", return_residual=True
        )

    out, lse = jax.eval_shape(run, q, k, v, lengths)
    assert (out.shape, out.dtype) == ((64, 2**17, 32, 64), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((64, 2**17, 32), jnp.float32)
    total = lambda q, k, v: run(q, k, v, np.ones(64, int))[0].sum(dtype=float)
    gradients = jax.eval_shape(jax.grad(total, (0, 1, 2)), q, k, v)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_scan_over_layers(rng):
    """Weights as scanned inputs and the mask as a carried pytree, forward and backward, as in a stack of layers."""
    x = _normal(rng, B, T, N, H)
    weights = 0.3 * _normal(rng, 3, H, H)
    mask = Segments(jnp.asarray([[0, 0, 1, 1, 1]] * B), jnp.asarray([[0, 0, 1, 1, 1]] * B)) & Causal()

    def layer(carry, w):
        x, mask = carry
        return (x + pallas_fa.dot_product_attention(x @ w, x, x, mask=mask, implementation="xla"), mask), None

    def scanned(x, weights):
        return jnp.sum(jax.lax.scan(layer, (x, mask), weights)[0][0] ** 2)

    def unrolled(x, weights):
        for w in weights:
            (x, _), _ = layer((x, mask), w)
        return jnp.sum(x**2)

    close(*(jax.jit(jax.value_and_grad(f, (0, 1)))(x, weights) for f in (scanned, unrolled)), tolerance=1e-4)


def test_cond_between_masks(rng):
    q = _normal(rng, B, T, N, H)
    run = lambda mask: pallas_fa.dot_product_attention(q, q, q, mask=mask, implementation="xla")
    pick = jax.jit(lambda flag: jax.lax.cond(flag, lambda: run(Causal()), lambda: run(Window(1, 1))))
    close(pick(True), run(Causal()))
    close(pick(False), run(Window(1, 1)))


# ---- remat ----------------------------------------------------------------------------------------------------------


_POLICIES = {
    # what is kept: how often the forward runs in one forward and backward
    "no remat": (lambda block: block, 1),
    "nothing": (jax.checkpoint, 2),
    "out and lse": (
        functools.partial(
            jax.checkpoint,
            policy=jax.checkpoint_policies.save_only_these_names("pallas_fa_out", "pallas_fa_lse"),
        ),
        1,
    ),
    "out alone": (
        functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("pallas_fa_out")),
        2,
    ),
}


@pytest.mark.parametrize("kept", _POLICIES)
def test_remat_keeps_what_its_policy_names(kept, small_chunks, rng):
    """With pallas_fa_out and pallas_fa_lse kept, the backward pass does not run the forward again."""
    q, w = _normal(rng, 1, 130, 2, H), _normal(rng, H, H)

    def block(q, w):
        x = jnp.sin(q @ w)
        return jnp.tanh(pallas_fa.dot_product_attention(x, x, x, is_causal=True, implementation="xla"))

    def gradient(block):
        return jax.jit(jax.grad(lambda q, w: jnp.sum(block(q, w) ** 2), (0, 1)))

    # Loops in the compiled program: a forward and a backward have two each, over the chunks of queries and of keys.
    loops = lambda f: f.lower(q, w).compile().as_text().count(" while(")
    remat, forwards = _POLICIES[kept]
    assert loops(jax.jit(block)) == 2
    assert loops(gradient(remat(block))) == 2 * forwards + 2
    close(gradient(remat(block))(q, w), gradient(block)(q, w))
