"""How far an implementation is from the truth, and how far it may be.

float32 must be within 2e-5 of float64 truth, relative to its largest element, and float64 within 1e-13. 16-bit floats
may err twice as much as the plain computation in the same precision does (all logits stored, differentiated by JAX),
plus one rounding; in the maximum and in the mean.
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

RELATIVE = {"float32": 2e-5, "float64": 1e-13}


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


def library(inputs: Inputs, implementation: str | None) -> Any:
    """The library on `inputs` as a function (q, k, v, arrays) -> (out, lse)."""

    def attention(q, k, v, arrays):
        keywords = inputs.keywords(arrays)
        return pallas_fa.dot_product_attention(q, k, v, **keywords, implementation=implementation, return_residual=True)

    return attention


def plain(inputs: Inputs) -> Any:
    """The same maths written plainly, as `jax.nn` does it: a function (q, k, v, arrays) -> (out, lse)."""
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
        p = jnp.where(some[..., None], jax.nn.softmax(x, axis=-1), 0).astype(q.dtype)
        lse = jnp.where(some, jax.nn.logsumexp(x, axis=-1), -jnp.inf)
        return jnp.einsum("...nts,...snh->...tnh", p, v), jnp.swapaxes(lse, -1, -2)

    return attention


def results(attention: Any, inputs: Inputs, gradients: bool) -> dict[str, np.ndarray]:
    """out, lse and, when asked for, the gradients of `attention`, by name; one jitted program."""

    @jax.jit
    def run(q, k, v, arrays, cotangents):
        if not gradients:
            return attention(q, k, v, arrays), None
        outputs, pullback = jax.vjp(attention, q, k, v, arrays)
        return outputs, pullback(cotangents)

    (out, lse), grads = run(*inputs.qkv, inputs.arrays, (inputs.d_out, inputs.d_lse))
    found = {"out": out, "lse": lse}
    if grads is not None:
        found |= {"query": grads[0], "key": grads[1], "value": grads[2], **grads[3]}
    return {name: np.asarray(x) for name, x in found.items()}


@functools.lru_cache(maxsize=2)
def truth(case: Case) -> dict[str, np.ndarray]:
    """float64 truth of all results, by name."""
    found = oracle.attention(case.inputs())
    return {"out": found.out, "lse": found.lse, **found.gradients}


def errors(case: Case, implementation: str, gradients: bool) -> list[Error]:
    """The error of each result of `implementation` on `case`, beside what it may be."""
    inputs = case.inputs()
    with precision_of(case):
        got = results(library(inputs, implementation), inputs, gradients)
        base = {} if case.dtype in RELATIVE else results(plain(inputs), inputs, gradients)
    found = []
    for name, x in got.items():
        want = truth(case)[name]
        expected = {"out": inputs.qkv[0].dtype, "lse": inputs.d_lse.dtype, **_input_dtypes(inputs)}[name]
        assert x.dtype == expected, f"{name}.dtype is {x.dtype}, expected {expected}"
        assert x.shape == want.shape, f"{name}.shape is {x.shape}, expected {want.shape}"
        assert not np.isnan(x).any(), f"{name} of {implementation} has NaN; {case}"
        if name == "lse":
            np.testing.assert_array_equal(np.isinf(x), np.isinf(want), "lse is -inf in other rows than it should be")
        found.append(_error(case, implementation, name, x, base.get(name), want))
    return found


def _input_dtypes(inputs):
    named = dict(zip(("query", "key", "value"), inputs.qkv, strict=True))
    return {name: x.dtype for name, x in {**named, **inputs.arrays}.items()}


def _error(case, implementation, name, x, base, want):
    # Where the truth is nothing but cancellation (one key: softmax is constant), errors are on the scale of the inputs.
    largest = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    size = largest if largest > 1e-9 else 1.0
    biggest, mean = _distance(x, want, size)
    inputs_dtype = numpy_dtype(case.dtype)
    # Rounded once: the result to its own dtype, or something on the way to it to that of the inputs.
    rounding = max(_unit(x.dtype), _unit(inputs_dtype)) if name != "lse" else _unit(x.dtype)
    floor = max(rounding, RELATIVE.get(case.dtype, RELATIVE["float32"]))
    base_max, base_mean = (0.0, 0.0) if base is None else _distance(base, want, size)
    return Error(case, implementation, name, biggest, 2 * base_max + floor, mean, 2 * base_mean + floor)


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
