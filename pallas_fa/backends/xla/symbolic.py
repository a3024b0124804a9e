"""Lengths that are symbolic, from `jax.export.symbolic_shape`: padded to whole chunks.

No chunk may reach past the end of an array. The mask of the padded problem holds the true lengths, so that padding changes
nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa import masks
from pallas_fa.backends.xla import chunks
from pallas_fa.masks.base import all_of
from pallas_fa.operands import diagonals
from pallas_fa.problem import Operands, Problem, Residuals


def forward(compute: Callable[..., Any], problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """Returns compute(problem, operands), which is (out [B, T, N, Hv], lse [B, T, N]), for a symbolic T or S."""
    padded = _padded(problem, operands)
    out, lse = compute(problem.with_operands(padded), padded)
    return out[:, : problem.dims.T], lse[:, : problem.dims.T]


def backward(
    compute: Callable[..., Any], problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any
) -> tuple[Any, ...]:
    """Returns compute(problem, residuals, d_out, d_lse), the gradients of the operands, for a symbolic T or S."""
    operands, *of_rows = *residuals, d_out, d_lse
    padded = _padded(problem, operands)
    out, lse, d_out, d_lse = (_pad(x, (1, padded.q.shape[1])) for x in of_rows)
    gradients = compute(problem.with_operands(padded), Residuals(padded, out, lse), d_out, d_lse)
    before = padded.q.shape[1] - operands.q.shape[1]

    def cut(x, like):
        starts = (0, 0, before) if diagonals.spans(like) else (0,) * x.ndim
        return jax.lax.slice(x, starts, [start + size for start, size in zip(starts, like.shape, strict=True)])

    return tuple(map(cut, gradients, operands.differentiable))


def _padded(problem: Problem, operands: Operands) -> Operands:
    """Returns the operands with zeros up to whole chunks, and with the true lengths in their mask."""
    dims = problem.dims
    T, S = (axis.whole_chunks for axis in chunks.split_axes(problem))
    q, k, v = _pad(operands.q, (1, T)), _pad(operands.k, (1, S)), _pad(operands.v, (1, S))
    ends = [(0, 0), (0, 0), (T - dims.T, S - dims.S)]  # later queries come first among the diagonals
    pad_array = lambda x: jnp.pad(x, ends) if diagonals.spans(x) else _pad(x, (2, T), (3, S))
    score, mask = jax.tree.map(pad_array, (operands.score, operands.mask))
    true_lengths = masks.Lengths(*(jnp.full((1, 1, 1, 1), x, jnp.int32) for x in (dims.T, dims.S)))
    mask = true_lengths if mask is None else all_of([mask, true_lengths])  # the first are found as the padding
    return operands._replace(q=q, k=k, v=v, score=score, mask=mask)


def _pad(x: Any, *sizes: tuple[int, Any]) -> Any:
    """Returns `x` with zeros at the ends, up to a size for each axis; broadcast axes stay."""
    padding = [(0, 0)] * x.ndim
    for axis, size in sizes:
        if x.shape[axis] != 1:
            padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)
