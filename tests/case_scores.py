"""The scores of the table of cases: their arrays, what a caller writes, and step by step what it means.

A case is a `tests.cases.Case`; only its sizes and its dtype are read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_fa import scores


class Step(NamedTuple):
    """One function of the logits x. `array` [*B|1, N|1, T|1, S|1] is a view of the array `name` (None: no array).

    `of_view`: the gradient of the array from that of its view, which may have other elements.
    """

    name: str | None
    apply: Callable[..., Any]  # (numpy or jax.numpy, x, array, t, s) -> x
    derivatives: Callable[..., Any]  # (x, array, t, s) -> (d apply / d x, d apply / d array)
    view: Callable[[Any], Any] = lambda array: array
    of_view: Callable[[Any], Any] = lambda gradient: gradient


class ScoreCase(NamedTuple):
    """A score: its arrays, the keyword arguments made of them, and what they mean, step after step."""

    arrays: dict[str, np.ndarray]  # all get gradients
    keywords: Callable[[dict[str, Any]], dict[str, Any]]
    steps: tuple[Step, ...] = ()
    scale: float | None = None  # None: 1 / sqrt(H)


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of this name, bfloat16 and 8-bit floats included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _normal(rng, shape, dtype):
    return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def _at_least_float32(case):
    return "float64" if case.dtype == "float64" else "float32"


def _add(name):
    return Step(name, lambda xp, x, a, t, s: x + a, lambda x, a, t, s: (1.0, 1.0))


def _cap(cap):
    return Step(
        None,
        lambda xp, x, a, t, s: cap * xp.tanh(x / cap),
        lambda x, a, t, s: (1 - np.tanh(x / cap) ** 2, None),
    )


def _times(name):
    return Step(name, lambda xp, x, a, t, s: x * a, lambda x, a, t, s: (a, x))


def _alibi(name, offset=0):
    return Step(
        name,
        lambda xp, x, a, t, s: x - a * abs(t + offset - s),
        lambda x, a, t, s: (1.0, -abs(t + offset - s)),
        view=lambda a: a[..., None, None],
    )


def wave(x, b, n, t, s, gain):
    """A custom score in which x fans out and whose array gets a gradient."""
    return x + gain * jnp.sin(x)


def _wave(name):
    return Step(name, lambda xp, x, a, t, s: x + a * xp.sin(x), lambda x, a, t, s: (1 + a * np.cos(x), np.sin(x)))


def steeper_in(x, b, n, t, s, marked):
    """A custom score with an integer array, which gets no gradient."""
    return jnp.where(marked > 0, 1.5 * x, x)


def _plain_score(case, rng):
    return ScoreCase({}, lambda a: {})


def _static_scale(case, rng):
    return ScoreCase({}, lambda a: {"scale": 0.3}, scale=0.3)


def _traced_scale(case, rng):
    scale = np.asarray(0.2, numpy_dtype(_at_least_float32(case)))
    return ScoreCase({"scale": scale}, lambda a: {"scale": a["scale"]}, (_times("scale"),), scale=1.0)


def _bias(shape_of, other_dtype=False):
    def make(case, rng):
        dtype = case.dtype if not other_dtype else "bfloat16" if case.dtype == "float32" else _at_least_float32(case)
        arrays = {"bias": _normal(rng, shape_of(case), dtype)}
        return ScoreCase(arrays, lambda a: {"bias": a["bias"]}, (_add("bias"),))

    return make


def _soft_cap(case, rng):
    return ScoreCase({}, lambda a: {"logits_soft_cap": 1.5}, (_cap(1.5),))


def _alibi_score(shape_of, offset=0):
    def make(case, rng):
        arrays = {"slopes": 0.1 * abs(_normal(rng, shape_of(case), _at_least_float32(case)))}
        return ScoreCase(arrays, lambda a: {"score": scores.Alibi(a["slopes"], offset)}, (_alibi("slopes", offset),))

    return make


def _relative_bias(shape_of, other_dtype=False):
    """Each T x S view is made of its T + S - 1 diagonals, the last query and key 0 first."""

    def make(case, rng):
        index = np.arange(case.S) - np.arange(case.T)[:, None] + case.T - 1
        dtype = "bfloat16" if other_dtype else _at_least_float32(case)
        strip = _normal(rng, (*shape_of(case), case.T + case.S - 1), dtype)

        def of_view(gradient):
            found = np.zeros((*gradient.shape[:-2], case.T + case.S - 1))
            np.add.at(found, (..., index), gradient)
            return found

        step = _add("strip")._replace(view=lambda a: a[..., index], of_view=of_view)
        return ScoreCase({"strip": strip}, lambda a: {"score": scores.RelativeBias(a["strip"])}, (step,))

    return make


def _custom(case, rng):
    arrays = {"gain": 0.3 * _normal(rng, (case.N, 1, 1), _at_least_float32(case))}
    return ScoreCase(arrays, lambda a: {"score": scores.Custom(wave, a["gain"])}, (_wave("gain"),))


def _integers(case, rng):
    marked = np.asarray(rng.integers(0, 2, (*case.batch, 1, 1, case.S)), np.int32)
    factor = np.where(marked > 0, 1.5, 1.0)
    step = Step(None, lambda xp, x, a, t, s: x * xp.asarray(factor, x.dtype), lambda x, a, t, s: (factor, None))
    return ScoreCase({}, lambda a: {"score": scores.Custom(steeper_in, marked)}, (step,))


def _everything(case, rng):
    """scale, then bias, then soft cap, then the score's parts in their order."""
    wide = _at_least_float32(case)
    arrays = {
        "scale": np.asarray(0.2, numpy_dtype(wide)),
        "bias": _normal(rng, (case.N, case.T, case.S), case.dtype),
        "slopes": 0.1 * abs(_normal(rng, (*case.batch, case.N), wide)),
        "gain": 0.3 * _normal(rng, (*case.batch, 1, case.T, 1), wide),
        "second_bias": _normal(rng, (case.S,), wide),
    }

    def keywords(a):
        score = scores.Custom(wave, a["gain"]).then(scores.Alibi(a["slopes"])).then(scores.SoftCap(2.5))
        score = score.then(scores.Bias(a["second_bias"]))
        return {"scale": a["scale"], "bias": a["bias"], "logits_soft_cap": 3.0, "score": score}

    steps = (_times("scale"), _add("bias"), _cap(3.0), _wave("gain"), _alibi("slopes"), _cap(2.5), _add("second_bias"))
    return ScoreCase(arrays, keywords, steps, scale=1.0)


SCORES: dict[str, Callable[[Any, np.random.Generator], ScoreCase]] = {
    "plain": _plain_score,
    "static_scale": _static_scale,
    "traced_scale": _traced_scale,
    "bias": _bias(lambda c: (*c.batch, c.N, c.T, c.S)),
    "bias_shared": _bias(lambda c: (c.N, c.T, c.S)),
    "bias_keys": _bias(lambda c: (*c.batch, 1, 1, c.S)),
    "bias_head_keys": _bias(lambda c: (c.N, 1, c.S)),
    "bias_head_rows": _bias(lambda c: (c.N, c.T, 1)),
    "bias_other_dtype": _bias(lambda c: (1, c.T, c.S), other_dtype=True),
    "bias_partial_batch": _bias(lambda c: (*c.batch[:-1], *(1,) * len(c.batch[-1:]), c.N, 1, c.S)),
    "soft_cap": _soft_cap,
    "alibi": _alibi_score(lambda c: (c.N,)),
    "alibi_batch": _alibi_score(lambda c: (*c.batch, c.N), offset=7),
    "relative_bias": _relative_bias(lambda c: (c.N,)),
    "relative_bias_shared": _relative_bias(lambda c: (), other_dtype=True),
    "custom": _custom,
    "integers": _integers,
    "everything": _everything,
}
