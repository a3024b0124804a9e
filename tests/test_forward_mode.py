"""`forward_mode=True`: tangents and what is built of them, against float64 truth; the kernels beside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from tests.cases import Case, steeper_in, wave
from tests.lowering import kernels

pytestmark = pytest.mark.usefixtures("small_chunks")
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles much faster


def attend(*arguments, implementation="xla", **keywords):
    """(out, lse), forward-mode."""
    return pallas_fa.dot_product_attention(
        *arguments, implementation=implementation, forward_mode=True, return_residual=True, **keywords
    )


def close(got, want, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


# ---- tangents of the table's cases ----------------------------------------------------------------------------------

CASES = (
    Case(113, 203, "causal", N=4, K=2, H=16, Hv=24),
    Case(113, 203, "window", "bias", N=4, K=1, H=16, Hv=8),
    Case(150, 70, "segments", "alibi", "float16", N=4, K=2, H=16, Hv=16),
    Case(70, 131, "head_lengths", "bias_head_rows", N=4, K=2, H=16, Hv=16),
    Case(113, 203, "bottom_right_lengths", "soft_cap", N=2, K=1, H=16, Hv=16, batch=(2, 3)),
    Case(113, 203, "dense", "traced_scale", N=2, K=2, H=16, Hv=16, batch=()),
    Case(70, 90, "prefix", "integers", N=2, K=2, H=8, Hv=8),
    Case(70, 90, "dilated", "custom", N=2, K=2, H=8, Hv=8),
    Case(70, 90, "nothing", "bias_keys", N=2, K=2, H=8, Hv=8),
    Case(203, 113, "packed", "everything", "bfloat16", N=4, K=2, H=40, Hv=24),
    Case(70, 90, "packed", "everything", "float64", N=4, K=2, H=16, Hv=8),
    Case(239, 1, "full", "plain", "bfloat16", N=4, K=2, H=16, Hv=16),
    Case(1, 7, "full", "bias_other_dtype", "float16", N=4, K=2, H=16, Hv=16),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tangents(case, check_tangents):
    check_tangents(case, "xla")


@pytest.mark.parametrize(
    "case",
    (
        Case(150, 113, "packed", "everything", N=4, K=2, H=16, Hv=24),
        Case(150, 113, "lengths", "bias_shared", "bfloat16", N=4, K=2, H=16, Hv=24),
    ),
    ids=str,
)
def test_gradients_are_the_transpose_of_the_tangents(case, check):
    check(case, "xla", gradients=True, forward_mode=True)


def test_the_reference_takes_the_flag_too(check_tangents):
    check_tangents(Case(20, 30, "segments", "bias", N=4, K=2, H=8, Hv=8), "reference")


# ---- second derivatives ---------------------------------------------------------------------------------------------

_SHAPES = {"query": (2, 80, 2, 4), "key": (2, 70, 1, 4), "value": (2, 70, 1, 3), "bias": (2, 1, 70), "gain": (80, 1)}


def _draws(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in _SHAPES.items()}


def _loss(implementation, a):
    """A scalar of out and lse."""
    out, lse = attend(
        a["query"], a["key"], a["value"], a["bias"], logits_soft_cap=3.0, score=scores.Custom(wave, a["gain"]),
        mask=masks.Causal(offset=10) & masks.Lengths(np.array([80, 31]), np.array([0, 70])), implementation=implementation,
    )  # fmt: skip
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))


def _forward_over_reverse(loss, x, direction):
    return jax.jvp(jax.grad(loss), (x,), (direction,))[1]


def _reverse_over_forward(loss, x, direction):
    return jax.grad(lambda x: jax.jvp(loss, (x,), (direction,))[1])(x)


def _reverse_over_reverse(loss, x, direction):
    along = lambda x: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(x), direction)))
    return jax.grad(along)(x)


def test_hessian_vector_products():
    """In any order of forward and reverse, over several chunks."""
    x, direction = _draws(0), _draws(1)
    run = lambda product, name: jit(functools.partial(product, functools.partial(_loss, name)))
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, run(_reverse_over_reverse, "reference")(x, direction))
    for product in (_forward_over_reverse, _reverse_over_forward, _reverse_over_reverse):
        close(run(product, "xla")(*jax.tree.map(jnp.float32, (x, direction))), want)


def test_jacobians_and_hessians(rng):
    """jacfwd == jacrev; jax.hessian, which is jacfwd of jacrev; forward over forward."""
    q, k = (rng.standard_normal(shape) for shape in ((3, 2, 2), (4, 1, 2)))
    transforms = jax.jacfwd, jax.jacrev, jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f))

    def run(implementation, dtype):
        f = lambda q: attend(
            q, jnp.asarray(k, dtype), jnp.asarray(k, dtype), is_causal=True, implementation=implementation
        )
        return jit(lambda q: [transform(f)(q) for transform in transforms])(q.astype(dtype))

    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, run("reference", np.float64))
    close(run("xla", np.float32), want)


# ---- transformations ------------------------------------------------------------------------------------------------


_NAMES = "query", "key", "value", "bias"


@pytest.fixture
def primals(rng):
    """Of two chunks."""
    shapes = (2, 80, 2, 4), (2, 70, 1, 4), (2, 70, 1, 4), (2, 1, 70)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


@pytest.fixture
def dots(primals):
    return tuple(jnp.flip(x) for x in primals)


def _tangents(implementation, primals, dots, **keywords):
    return jax.jvp(functools.partial(attend, implementation=implementation, **keywords), primals, dots)[1]


def test_vmap(primals, dots):
    """vmap of jvp, jvp of vmap, and a map of the mask."""
    stacked = lambda tree: jax.tree.map(lambda x: jnp.stack([x, jnp.cos(x), -x]), tree)
    offsets = jnp.asarray([3, 0, -9])

    def one(implementation, primals, dots, offset):
        return _tangents(implementation, primals, dots, mask=masks.Causal(offset=offset) | masks.Window(0, 0))

    arguments = stacked(primals), stacked(dots), offsets
    want = jit(jax.vmap(functools.partial(one, "reference")))(*arguments)
    close(jit(jax.vmap(functools.partial(one, "xla")))(*arguments), want)

    def mapped(*primals):
        each = lambda offset, *x: attend(*x, mask=masks.Causal(offset=offset) | masks.Window(0, 0))
        return jax.vmap(each)(offsets, *primals)

    close(jit(lambda x, dots: jax.jvp(mapped, x, dots)[1])(*arguments[:2]), want)


def test_eager_calls_linearize_and_scan(primals, dots):
    want = jit(functools.partial(_tangents, "reference"))(primals, dots)
    close(jax.jvp(attend, primals, dots)[1], want)
    close(jax.linearize(attend, *primals)[1](*dots), want)

    @functools.partial(jit, static_argnums=0)
    def layers(implementation, q, q_dot):
        layer = lambda q, _: (q + attend(q, *primals[1:], implementation=implementation)[0], None)
        return jax.jvp(lambda q: jax.lax.scan(layer, q, None, length=2)[0], (q,), (q_dot,))[1]

    close(layers("xla", primals[0], dots[0]), layers("reference", primals[0], dots[0]))


@pytest.mark.parametrize("moving", ("query", "value", "bias"))
def test_the_others_may_stay(moving, primals, dots):
    named, n = dict(zip(_NAMES, primals, strict=True)), _NAMES.index(moving)

    def along(implementation):
        f = lambda x: attend(**{**named, moving: x}, implementation=implementation)
        return jit(lambda x, dot: jax.jvp(f, (x,), (dot,))[1])(primals[n], dots[n])

    close(along("xla"), along("reference"))


def test_masks_and_integer_arrays_do_not_move(primals, dots):
    """Tangents go through a function that builds its mask of floats, with nothing from the mask."""
    q, k, v, _ = primals

    def f(implementation, q, threshold):
        mask = masks.Dense(q[..., 0].swapaxes(1, 2)[..., None] > threshold) | masks.Window(0, 0)
        marked = (jnp.abs(k[0, :, 0, 0]) > threshold).astype(jnp.int32)
        return attend(q, k, v, mask=mask, score=scores.Custom(steeper_in, marked), implementation=implementation)

    @functools.partial(jit, static_argnums=0)
    def along(implementation, q_dot):
        return jax.jvp(functools.partial(f, implementation), (q, 0.2), (q_dot, 1.0))[1]

    close(along("xla", dots[0]), along("reference", dots[0]))
    for x in along("xla", jnp.zeros_like(q)):
        assert (x == 0).all()
    for x in jax.jvp(functools.partial(f, "xla", q), (0.2,), (1.0,))[1]:
        assert (x == 0).all()


_SPECS = P("data"), P("data"), P("data"), P()


def _mesh(kind):
    return jax.make_mesh((2,), ("data",), axis_types=(kind,))


def test_shard_map_with_its_checks(primals, dots):
    """Tangents, and gradients, of which that of the bias is summed over the devices."""
    local = jax.shard_map(
        functools.partial(attend, is_causal=True), mesh=_mesh(AxisType.Auto), in_specs=_SPECS, out_specs=P("data")
    )
    inside = jax.shard_map(
        functools.partial(_tangents, "xla", is_causal=True), mesh=_mesh(AxisType.Auto), in_specs=(_SPECS,) * 2,
        out_specs=P("data"),
    )  # fmt: skip
    want = jit(functools.partial(_tangents, "reference", is_causal=True))(primals, dots)
    close(jit(lambda x, dots: jax.jvp(local, x, dots)[1])(primals, dots), want)
    close(jit(inside)(primals, dots), want)

    loss = lambda f, x: sum(jnp.sum(jnp.sin(y)) for y in f(*x))
    reference = functools.partial(attend, is_causal=True, implementation="reference")
    got, want = (jit(jax.grad(functools.partial(loss, f)))(primals) for f in (local, reference))
    close(got, want)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_arrays_that_jit_shards(kind, primals, dots):
    mesh = _mesh(kind)
    on = lambda xs: tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, _SPECS, strict=True))
    compiled = jit(functools.partial(_tangents, "xla")).lower(on(primals), on(dots)).compile()
    assert "all-gather" not in str(compiled.as_text())
    got = compiled(on(primals), on(dots))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 4)
    close(got, jit(functools.partial(_tangents, "reference"))(primals, dots))


def test_pmap(primals, dots):
    alone = lambda xs: jax.tree.map(lambda x: jnp.stack([x, -x]), xs)
    got = jax.pmap(functools.partial(_tangents, "xla"))(alone(primals), alone(dots))
    close(got, jit(jax.vmap(functools.partial(_tangents, "reference")))(alone(primals), alone(dots)))


# ---- padding --------------------------------------------------------------------------------------------------------


def test_padding_may_hold_anything(primals, dots, rng):
    """NaN and Inf in primals, tangents and cotangents there: everything is bitwise what it was."""
    q, k, v, _ = primals
    bias, bias_dot = (jnp.asarray(rng.standard_normal((2, 1, 80, 70)), jnp.float32) for _ in range(2))
    primals, dots = (q, k, v, bias), (*dots[:3], bias_dot)
    q_lengths, kv_lengths = np.array([41, 80]), np.array([70, 9])
    rows, keys = np.arange(80) >= q_lengths[:, None], np.arange(70) >= kv_lengths[:, None]
    rows_of_q, rows_of_k = rows[..., None, None], keys[..., None, None]
    padding = rows_of_q, rows_of_k, rows_of_k, rows[:, None, :, None] | keys[:, None, None, :]
    call = functools.partial(attend, query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths, logits_soft_cap=4.0)
    squares = lambda x, where: jnp.sum(jnp.where(where, 0, x) ** 2)

    @jit
    def run(primals, dots, cotangents):
        def second(*x):
            out_dot, lse_dot = jax.jvp(call, x, dots)[1]
            return squares(out_dot, rows_of_q) + squares(lse_dot, rows[..., None])

        first = jax.jvp(call, primals, dots)[1], jax.vjp(call, *primals)[1](cotangents)
        return first, jax.grad(second, (0, 1, 2, 3))(*primals)

    def with_padding(value, xs, where):
        return tuple(jnp.where(w, value, x) for x, w in zip(xs, where, strict=True))

    cotangents = jnp.cos(q), q[..., 0]
    clean = run(primals, dots, cotangents)
    for value in (np.nan, np.inf):
        got = run(
            with_padding(value, primals, padding), with_padding(value, dots, padding),
            with_padding(value, cotangents, (rows_of_q, rows[..., None])),
        )  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, got, clean)
    for x in clean[0][0]:
        assert (np.asarray(x)[rows] == 0).all()


# ---- kernels --------------------------------------------------------------------------------------------------------


def test_values_come_from_the_kernels():
    """As programs for CUDA: one kernel, whatever is differentiated; the rest is XLA's."""
    q, k = jnp.ones((2, 40, 4, 64), jnp.bfloat16), jnp.ones((2, 40, 2, 64), jnp.bfloat16)
    call = functools.partial(attend, is_causal=True, implementation="mosaic_gpu")
    tangents = lambda q, k: jax.jvp(call, (q, k, k), (q, k, k))
    loss = lambda q, k: sum(jnp.sum(x.astype(jnp.float32)) for x in call(q, k, k))
    local = jax.shard_map(tangents, mesh=_mesh(AxisType.Auto), in_specs=P("data"), out_specs=P("data"))
    assert kernels(tangents, q, k) == 1
    assert kernels(jax.vmap(tangents), q[None], k[None]) == 1
    assert kernels(local, q, k) == 1
    assert kernels(jax.grad(loss), q, k) == 1
    keep = jax.checkpoint_policies.save_only_these_names("pallas_fa_out", "pallas_fa_lse")
    assert kernels(jax.value_and_grad(jax.checkpoint(loss, policy=keep)), q, k) == 1


def test_explain_says_what_computes_the_derivatives():
    x = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16)
    assert "xla computes its gradients, because forward_mode=True" in pallas_fa.explain(x, x, x, forward_mode=True)


def test_forward_mode_has_to_be_asked_for(primals, dots):
    with pytest.raises(
        TypeError, match="forward-mode autodiff .* custom_vjp"
    ):  # JAX's message, quoted in docs/forward-mode.md
        jax.jvp(pallas_fa.dot_product_attention, primals, dots)
