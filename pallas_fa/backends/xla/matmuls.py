"""Matrix products of a tile, for grouped heads: query head n reads key head n // (N // K)."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax import tile


def matmul_dtype(problem: Problem) -> Any:
    """Returns the dtype of matmul operands: that of the inputs, but float32 for 8-bit ones, which few platforms multiply."""
    return problem.dtype if problem.dtype.itemsize > 1 else jnp.float32


def prepare(problem: Problem, operands: Operands) -> tuple[Any, ...]:
    """Returns q, k and v [B, length, heads, dim] in the dtype of the matmuls, with zeroed padding; pages as they are."""
    lengths = lengths_of(operands.mask)
    prepared = lambda x, n: x if isinstance(x, Paged) else tile.zero_padding(x, n).astype(matmul_dtype(problem))
    padded = ((operands.q, lengths.q_lengths), (operands.k, lengths.kv_lengths), (operands.v, lengths.kv_lengths))
    return tuple(prepared(x, n) for x, n in padded)


def cut_keys(problem: Problem, operands: Operands, x: Any, keys: Chunks, j: Any) -> Any:
    """Returns key chunk j of x, keys or values that `prepare` gave: [B, K, chunk, dim]."""
    if isinstance(x, Paged):
        first = lax.div(keys.start(j), jnp.int32(x.size))
        lengths = lengths_of(operands.mask).kv_lengths
        rows = x.gather(first, keys.chunk // x.size)
        x = tile.zero_padding(rows, lengths - keys.start(j)).astype(matmul_dtype(problem))
    else:
        x = keys.cut(x, j, 1)
    return heads_first(x)


def qk(problem: Problem, a: Any, b: Any) -> Any:
    """Multiplies [B, N, T, H] x [B, K, S, H] -> [B, N, T, S]."""
    return _grouped_matmul(problem, a, b, 3)


def pv(problem: Problem, p: Any, b: Any) -> Any:
    """Multiplies [B, N, T, S] x [B, K, S, H] -> [B, N, T, H]."""
    return _grouped_matmul(problem, p, b, 2)


def _grouped_matmul(problem, a, b, contracted):
    B, N, T, _ = a.shape
    a = a.astype(b.dtype).reshape(B, problem.K, -1, a.shape[-1])
    dimensions = (((3,), (contracted,)), ((0, 1), (0, 1)))
    result = lax.dot_general(a, b, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)
    return result.reshape(B, N, T, -1)


def xp(problem: Problem, x: Any, p: Any) -> Any:
    """Multiplies [B, K, H, G, T] x [B, N, T, S] -> [B, K, H, S], summing over T and the G query heads of a group."""
    B, K, _, G, T = x.shape
    p = p.astype(x.dtype).reshape(B, K, G, T, -1)
    dimensions = (((3, 4), (2, 3)), ((0, 1), (0, 1)))
    return lax.dot_general(x, p, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)


def heads_first(x: Any) -> Any:
    """Swaps axes: [B, T, N, ...] -> [B, N, T, ...] and back."""
    return jnp.swapaxes(x, 1, 2)


def transpose_grouped(problem: Problem, x: Any) -> Any:
    """Groups heads and moves T last, for `xp`: [B, T, N, H] -> [B, K, H, G, T]."""
    B, T, _, H = x.shape
    return jnp.transpose(x.reshape(B, T, problem.K, -1, H), (0, 2, 4, 3, 1))
