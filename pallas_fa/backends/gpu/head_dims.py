"""Head dims that are no multiple of 8, which TMA cannot address: q, k and v are copied once, padded with zeros.

Columns of zeros in q and k add nothing to the logits, whose scale stays that of the true H. Those of v give columns of
zeros in the output, which are sliced off, as are those of gradients. The backward pads again: the residuals are the
operands of the call, and no padded copy lives between the two directions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.problem import Operands, Problem, Residuals

_MULTIPLE = 8  # of 2 bytes each: TMA asks for strides of a multiple of 16 bytes


def padded(problem: Problem) -> Problem:
    """Returns the problem that the kernels solve in the place of `problem`; itself where its head dims fit."""
    H, Hv = (-(-dim // _MULTIPLE) * _MULTIPLE for dim in (problem.H, problem.Hv))
    return problem if (H, Hv) == (problem.H, problem.Hv) else dataclasses.replace(problem, H=H, Hv=Hv)


def remark(problem: Problem) -> str | None:
    """Returns what is copied, in words, or None where nothing is."""
    kernels = padded(problem)
    copies = [f"q and k to H={kernels.H}"] if kernels.H != problem.H else []
    copies += [f"v to Hv={kernels.Hv}"] if kernels.Hv != problem.Hv else []
    if not copies:
        return None
    return f"copies {' and '.join(copies)} once in each direction, padded with zeros, since TMA loads multiples of 8"


def padded_forward(forward: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Wraps forward(problem, operands, gpu, **options) -> (out, lse), for multiples of 8, to take any head dims."""

    @functools.wraps(forward)
    def run(problem: Problem, operands: Operands, gpu: Gpu, **options: Any) -> tuple[Any, Any]:
        kernels = padded(problem)
        if kernels is problem:
            return forward(problem, operands, gpu, **options)
        out, lse = forward(kernels, _pad_operands(kernels, operands), gpu, **options)
        return out[..., : problem.Hv], lse

    return run


def padded_backward(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wraps backward(problem, residuals, d_out, d_lse, gpu, **options) -> gradients likewise."""

    @functools.wraps(backward)
    def run(
        problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any, gpu: Gpu, **options: Any
    ) -> tuple[Any, ...]:
        kernels = padded(problem)
        if kernels is problem:
            return backward(problem, residuals, d_out, d_lse, gpu, **options)
        operands = _pad_operands(kernels, residuals.operands)
        out, d_out = (_pad(x, kernels.Hv) for x in (residuals.out, d_out))
        residuals = residuals._replace(operands=operands, out=out)
        dq, dk, dv, *of_arrays = backward(kernels, residuals, d_out, d_lse, gpu, **options)
        return dq[..., : problem.H], dk[..., : problem.H], dv[..., : problem.Hv], *of_arrays

    return run


def _pad_operands(kernels, operands):
    q, k, v = operands.q, operands.k, operands.v
    return operands._replace(q=_pad(q, kernels.H), k=_pad(k, kernels.H), v=_pad(v, kernels.Hv))


def _pad(x, dim):
    missing = dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
