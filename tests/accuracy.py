"""How far an implementation is from the truth, and how far it may be.

float32 must be within 2e-5 of float64 truth, relative to its largest element, and float64 within 1e-13. The kernels,
which make float32 products from bfloat16 ones, may err twice as much as the plain computation at JAX's precision HIGH
does, plus 2e-5; arrays of several float32 numbers must be within 1e-4, and that is all that is asked of the gradients
of queries and keys where no query sees a second key: they are what is left of sums of products that cancel. 16-bit
floats may err twice as much as the plain computation in the same precision does (all logits stored, differentiated by
JAX), plus one rounding; in the maximum and in the mean. One number, such as the gradient of a scale, may be nearly
right by chance: for gradients of few elements in 16 bits, maximum and mean are those of the root mean square over
several draws of the cotangents. To the plain error is added what the rounding of `out` does, which those gradients add
up over all rows: its product with its cotangent is taken of the rounded `out`, but in the plain computation of what is
not rounded yet.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa
from tests import oracle
from tests.cases import Case, Inputs, numpy_dtype

KERNELS = "mosaic_gpu", "mma"
RELATIVE = {"float32": 2e-5, "float64": 1e-13}
IN_PARTS = 1e-4
FEW, DRAWS, FACTOR = 16, 8, 2
_QUICK_COMPILATION = {"xla_backend_optimization_level": 0}  # of what runs once; it takes 0.6 of the time


@dataclasses.dataclass(frozen=True)
class Error:
    """One result of one case: errors and their limits, relative to the largest element of the truth."""

    case: Case
    implementation: str
    result: str
    max: float
    max_limit: float
    mean: float
    mean_limit: float

    def __str__(self):
        return (
            f"{self.result} of {self.implementation}: max error {self.max:.2e} (limit {self.max_limit:.2e}), mean error"
            f" {self.mean:.2e} (limit {self.mean_limit:.2e}), relative to the largest element; {self.case}"
        )


def precision_of(case: Case) -> Any:
    """The context in which the arrays of `case` keep their dtype."""
    return jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext()


def library(inputs: Inputs, implementation: str | None, **options: Any) -> Any:
    """The library on `inputs`, with more `options`, as a function (q, k, v, arrays) -> (out, lse).

    Its arrays are BTNH whatever the option `layout` is.
    """
    other = lambda x: jnp.swapaxes(x, -3, -2) if options.get("layout") == "BNTH" else x

    def attention(q, k, v, arrays):
        keywords = dict(**inputs.keywords(arrays), implementation=implementation, **options)
        out, lse = pallas_fa.dot_product_attention(*map(other, (q, k, v)), **keywords, return_residual=True)
        return other(out), lse

    return attention


def plain(inputs: Inputs, subtracts_max: bool = True) -> Any:
    """The same maths written plainly, as `jax.nn` does it: a function (q, k, v, arrays) -> (out, lse).

    Without subtracting the maximum: as the kernels do it where a soft cap bounds the logits. Then the one probability of a
    row with one key is rounded, too, which otherwise is 1.
    """
    case = inputs.case
    t, s = jnp.arange(case.T)[:, None], jnp.arange(case.S)[None, :]
    scale = case.H**-0.5 if inputs.score.scale is None else inputs.score.scale
    allowed = inputs.allowed

    def attention(q, k, v, arrays):
        k, v = (jnp.repeat(x, case.N // case.K, axis=-2) for x in (k, v))
        x = scale * jnp.einsum("...tnh,...snh->...nts", q, k, preferred_element_type=jnp.float32)
        for step in inputs.score.steps:
            array = None if step.name is None else step.view(arrays[step.name]).astype(x.dtype)
            x = step.apply(jnp, x, array, t, s)
        x = jnp.where(allowed, x, -1e30)
        some = jnp.any(allowed, axis=-1)
        if inputs.sinks:  # a key whose value is 0
            x = jnp.append(x, jnp.broadcast_to(arrays["sinks"][..., None, None], (*x.shape[:-1], 1)), axis=-1)
            some = some | jnp.isfinite(x[..., -1])
        lse = jnp.where(some, jax.nn.logsumexp(x, axis=-1), -jnp.inf)
        p = jax.nn.softmax(x, axis=-1) if subtracts_max else jnp.exp(x)
        p = jnp.where(some[..., None], p, 0)[..., : case.S]
        p = (p * jnp.asarray(inputs.multipliers, p.dtype)).astype(q.dtype)
        if subtracts_max:
            return jnp.einsum("...nts,...snh->...tnh", p, v), jnp.swapaxes(lse, -1, -2)
        out = jnp.einsum("...nts,...snh->...nth", p, v, preferred_element_type=jnp.float32)
        out = out * jnp.where(some, jnp.exp(-lse), 0)[..., None]
        return jnp.swapaxes(out, -2, -3).astype(q.dtype), jnp.swapaxes(lse, -1, -2)

    return attention


def runner(attention: Any, inputs: Inputs, gradients: bool) -> Any:
    """A jitted function of (d_out, d_lse): out, lse and, when asked for, the gradients of `attention`, by name."""

    @functools.partial(jax.jit, compiler_options=_QUICK_COMPILATION if jax.default_backend() == "cpu" else None)
    def run(q, k, v, arrays, cotangents):
        if not gradients:
            return attention(q, k, v, arrays), None
        outputs, pullback = jax.vjp(attention, q, k, v, arrays)
        return outputs, pullback(cotangents)

    def results(*cotangents):
        (out, lse), grads = run(*inputs.qkv, inputs.arrays, cotangents)
        found = {"out": out, "lse": lse}
        if grads is not None:
            found |= {"query": grads[0], "key": grads[1], "value": grads[2], **grads[3]}
        return {name: np.asarray(x) for name, x in found.items()}

    return results


@functools.lru_cache(maxsize=4)
def truth(case: Case) -> dict[str, np.ndarray]:
    """float64 truth of all results, by name."""
    found = oracle.attention(case.inputs())
    return {"out": found.out, "lse": found.lse, **found.gradients}


@functools.lru_cache(maxsize=4)
def _plain_runner(case: Case, subtracts_max: bool) -> Any:
    """`plain` with its gradients, compiled once for all implementations."""
    inputs = case.inputs()
    return runner(plain(inputs, subtracts_max), inputs, gradients=True)


def errors(case: Case, implementation: str, gradients: bool, **options: Any) -> list[Error]:
    """The error of each result of `implementation` on `case`, beside what it may be."""
    inputs = case.inputs()
    with precision_of(case):
        run = runner(library(inputs, implementation, **options), inputs, gradients)
        bounded = implementation in KERNELS and "logits_soft_cap" in inputs.keywords(inputs.arrays)
        run_plain = _plain_runner(case, subtracts_max=not bounded)
        got = run(inputs.d_out, inputs.d_lse)
        base = {} if case.dtype in RELATIVE else run_plain(inputs.d_out, inputs.d_lse)
    few = [name for name, x in got.items() if name not in ("out", "lse") and x.size < FEW] if base else []
    in_parts = case.dtype == "float32" and implementation == "mosaic_gpu"
    if in_parts:
        with jax.default_matmul_precision("high"):
            base = run_plain(inputs.d_out, inputs.d_lse)
    found = _errors_of_few(case, implementation, inputs, few, run, run_plain) if few else []
    for name, x in got.items():
        want = truth(case)[name]
        expected = {"out": inputs.qkv[0].dtype, "lse": inputs.d_lse.dtype, **_input_dtypes(inputs)}[name]
        assert x.dtype == expected, f"{name}.dtype is {x.dtype}, expected {expected}"
        assert x.shape == want.shape, f"{name}.shape is {x.shape}, expected {want.shape}"
        assert not np.isnan(x).any(), f"{name} of {implementation} has NaN; {case}"
        if name == "lse":
            np.testing.assert_array_equal(np.isinf(x), np.isinf(want), "lse is -inf in other rows than it should be")
        if name not in few:
            found.append(_error(case, implementation, name, x, base.get(name), want))
    if in_parts:  # one number, such as the gradient of a scale, may be what is left of large ones
        capped = lambda x: x.size >= FEW and x.dtype == np.float32
        one_key = np.sum(inputs.allowed, axis=-1).max(initial=0) == 1

        def limit(error):
            if one_key and error.result in ("query", "key"):
                return IN_PARTS
            return min(error.max_limit, IN_PARTS) if capped(got[error.result]) else error.max_limit

        found = [dataclasses.replace(error, max_limit=limit(error)) for error in found]
    return found


def _errors_of_few(case, implementation, inputs, names, run, run_plain):
    """As `_error` of the results `names`, with root mean squares over draws in the places of single values."""
    exact = dataclasses.replace(inputs, qkv=tuple(x.astype(np.float32) for x in inputs.qkv))
    run_exact = runner(library(exact, "reference"), exact, gradients=True)
    rng, drawn = np.random.default_rng(0), []
    for _ in range(DRAWS):
        d_out, d_lse = (rng.standard_normal(x.shape).astype(x.dtype) for x in (inputs.d_out, inputs.d_lse))
        exact_d_out = d_out.astype(np.float32)
        want = run_exact(exact_d_out, d_lse)
        lost = want["out"] - want["out"].astype(d_out.dtype).astype(np.float32)
        of_rounded = run_exact(exact_d_out, d_lse + (lost * exact_d_out).sum(axis=-1))
        drawn.append((run(d_out, d_lse), run_plain(d_out, d_lse), want, of_rounded))
    rms = lambda values: np.sqrt(np.mean(np.square(values), axis=0))
    found = []
    for name in names:
        got, base, want, of_rounded = (
            np.stack([x[name].astype(np.float64) for x in column]) for column in zip(*drawn, strict=True)
        )
        zero, dtype = np.zeros(got.shape[1:]), drawn[0][0][name].dtype
        size = np.max(rms(want))
        relative = lambda x, want=want, size=size: rms(x - want) / size
        base_error = np.hypot(relative(base), relative(of_rounded))
        found.append(_error(case, implementation, name, relative(got), base_error, zero, size=1.0, dtype=dtype))
    return found


def tangent_errors(case: Case, implementation: str) -> list[Error]:
    """As `errors`, of the tangents of out and lse where all float arguments move."""
    inputs = case.inputs()
    rng = np.random.default_rng(0)
    named = dict(zip(("query", "key", "value"), inputs.qkv, strict=True)) | inputs.arrays
    dots = {name: np.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in named.items()}
    want = dict(zip(("out", "lse"), oracle.tangents(inputs, dots), strict=True))

    @functools.partial(jax.jit, static_argnums=0)
    def along(attention, x, dots):
        arguments = lambda x: (x["query"], x["key"], x["value"], {name: x[name] for name in inputs.arrays})
        return jax.jvp(attention, arguments(x), arguments(dots))[1]

    with precision_of(case):
        got = along(library(inputs, implementation, forward_mode=True), named, dots)
        base = (None, None) if case.dtype in RELATIVE else along(plain(inputs), named, dots)
    found = []
    for (name, truth), x, plain_x, like in zip(want.items(), got, base, (inputs.qkv[0], inputs.d_lse), strict=True):
        assert x.dtype == like.dtype and x.shape == truth.shape and np.isfinite(x).all(), f"tangent of {name}; {case}"
        plain_x = None if plain_x is None else np.asarray(plain_x)
        found.append(_error(case, implementation, f"{name}_dot", np.asarray(x), plain_x, truth))
    return found


def _input_dtypes(inputs):
    named = dict(zip(("query", "key", "value"), inputs.qkv, strict=True))
    return {name: x.dtype for name, x in {**named, **inputs.arrays}.items()}


def _error(case, implementation, name, x, base, want, size=None, dtype=None):
    if size is None:
        # Where the truth is nothing but cancellation (one key: softmax is constant), errors are on the scale of the inputs.
        largest = np.max(np.abs(want), initial=0, where=np.isfinite(want))
        size = largest if largest > 1e-9 else 1.0
    biggest, mean = _distance(x, want, size)
    inputs_dtype, dtype = numpy_dtype(case.dtype), dtype or x.dtype
    # Rounded once: the result to its own dtype, or something on the way to it to that of the inputs.
    rounding = max(_unit(dtype), _unit(inputs_dtype)) if name != "lse" else _unit(dtype)
    floor = max(rounding, RELATIVE.get(case.dtype, RELATIVE["float32"]))
    base_max, base_mean = (0.0, 0.0) if base is None else _distance(base, want, size)
    limits = FACTOR * base_max + floor, FACTOR * base_mean + floor
    return Error(case, implementation, name, biggest, limits[0], mean, limits[1])


def _unit(dtype):
    """The largest relative error of one rounding."""
    return float(jnp.finfo(dtype).eps) / 2


def _distance(x, want, size):
    """(max, mean) of |x - want| / size over the finite elements."""
    finite = np.isfinite(want)
    if not finite.any():
        return 0.0, 0.0
    difference = np.abs(x.astype(np.float64)[finite] - want[finite]) / size
    return float(difference.max()), float(difference.mean())
