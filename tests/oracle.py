"""Float64 truth in NumPy: attention, its gradients and tangents, typed by hand, independent of the library and of JAX."""

from typing import Any, NamedTuple

import numpy as np

from tests.cases import Inputs


class Truth(NamedTuple):
    """float64 arrays in the layouts of the library; `gradients` by argument name."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]


class _Probabilities(NamedTuple):
    """What gradients and tangents begin with: q, k and v in heads first, one key head for each query head, and P."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    taken: list[tuple[Any, np.ndarray, Any]]  # (step, its input, its array)
    p: np.ndarray
    lse: np.ndarray
    p_sinks: np.ndarray  # [*B, N, T, 1]
    dropout: Any  # what multiplies p


def attention(inputs: Inputs) -> Truth:
    """The definition: logits, score, mask, softmax; rows that attend to nothing give 0 and -inf."""
    case = inputs.case
    group = case.N // case.K
    q, k, v, scale, taken, p, lse, p_sinks, dropout = _probabilities(inputs)
    d_out, d_lse = _heads_first(inputs.d_out), np.swapaxes(inputs.d_lse.astype(np.float64), -1, -2)
    t, s = _positions(case)

    d_p = d_out @ _contiguous(np.swapaxes(v, -1, -2)) * dropout
    delta = np.sum(p * d_p, axis=-1, keepdims=True)
    d_x = p * (d_p - delta + d_lse[..., None])
    gradients = {}
    if inputs.sinks:
        d_sinks = np.sum(p_sinks * (d_lse[..., None] - delta), axis=(-2, -1))
        gradients["sinks"] = _reduce(d_sinks, inputs.sinks["sinks"].shape)
    for step, x, array in reversed(taken):
        by_x, by_array = step.derivatives(x, array, t, s)
        if step.name is not None:
            reduced = step.of_view(_reduce(d_x * by_array, array.shape))
            gradients[step.name] = reduced.reshape(inputs.arrays[step.name].shape)
        d_x = d_x * by_x
    d_x = scale * d_x
    d_q = d_x @ k
    d_k, d_v = (_contiguous(np.swapaxes(a, -1, -2)) @ b for a, b in ((d_x, q), (p * dropout, d_out)))
    d_k, d_v = (g.reshape(*case.batch, case.K, group, *g.shape[-2:]).sum(axis=-3) for g in (d_k, d_v))
    gradients |= {"query": _back(d_q), "key": _back(d_k), "value": _back(d_v)}
    return Truth(_back((p * dropout) @ v), np.swapaxes(lse, -1, -2), gradients)


def tangents(inputs: Inputs, dots: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tangents of out and lse, where the arguments named in `dots` move by these."""
    case = inputs.case
    q, k, v, scale, taken, p, _, p_sinks, dropout = _probabilities(inputs)
    q_dot, k_dot, v_dot = (_heads_first(dots[name]) for name in ("query", "key", "value"))
    k_dot, v_dot = (np.repeat(x, case.N // case.K, axis=-3) for x in (k_dot, v_dot))
    t, s = _positions(case)

    x_dot = scale * (q_dot @ np.swapaxes(k, -1, -2) + q @ np.swapaxes(k_dot, -1, -2))
    for step, x, array in taken:
        by_x, by_array = step.derivatives(x, array, t, s)
        x_dot = by_x * x_dot
        if step.name is not None:
            x_dot = x_dot + by_array * step.view(dots[step.name].astype(np.float64))
    lse_dot = np.sum(p * x_dot, axis=-1)
    if inputs.sinks:
        lse_dot = lse_dot + p_sinks[..., 0] * dots["sinks"].astype(np.float64)[..., None]
    p_dot = p * (x_dot - lse_dot[..., None])
    return _back((p_dot * dropout) @ v + (p * dropout) @ v_dot), np.swapaxes(lse_dot, -1, -2)


def _probabilities(inputs):
    case = inputs.case
    q, k, v = (_heads_first(x) for x in inputs.qkv)
    k, v = (np.repeat(x, case.N // case.K, axis=-3) for x in (k, v))
    t, s = _positions(case)
    scale = case.H**-0.5 if inputs.score.scale is None else inputs.score.scale

    x = scale * (q @ _contiguous(np.swapaxes(k, -1, -2)))
    taken = []
    for step in inputs.score.steps:
        array = None if step.name is None else step.view(inputs.arrays[step.name].astype(np.float64))
        taken.append((step, x, array))
        x = step.apply(np, x, array, t, s)
    x = np.where(inputs.allowed, x, -np.inf)
    with np.errstate(divide="ignore"):
        sinks = inputs.sinks["sinks"].astype(np.float64)[..., None, None] if inputs.sinks else np.float64(-np.inf)
        top = np.maximum(np.max(x, axis=-1, keepdims=True, initial=-np.inf), sinks)
        p, p_sinks = (np.exp(logits - np.where(np.isinf(top), 0, top)) for logits in (x, sinks))
        total = p.sum(axis=-1, keepdims=True) + p_sinks
        lse = (np.where(np.isinf(top), 0, top) + np.log(total))[..., 0]
    p, p_sinks = (weights / np.where(total == 0, 1, total) for weights in (p, p_sinks))
    return _Probabilities(q, k, v, scale, taken, p, lse, p_sinks, inputs.multipliers)


def _positions(case):
    return np.arange(case.T)[:, None], np.arange(case.S)[None, :]


def _heads_first(x):
    """[*B, length, heads, dim] -> [*B, heads, length, dim]"""
    return _contiguous(np.swapaxes(x, -2, -3))


def _back(x):
    return np.swapaxes(x, -2, -3)


def _reduce(x, shape):
    """x summed over the dims along which an array of `shape` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


def _contiguous(x):
    return np.ascontiguousarray(x, np.float64)  # what BLAS multiplies fast
