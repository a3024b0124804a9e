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


def ds_dtype(problem: Problem) -> Any:
    """Returns the dtype of dS in its matmuls: float32 for float16 inputs, since dS may exceed the largest float16."""
    return jnp.float32 if problem.dtype == jnp.float16 else matmul_dtype(problem)


def prepare(problem: Problem, operands: Operands) -> tuple[Any, ...]:
    """Returns q, k and v [B, length, heads, dim] in the dtype of the matmuls, with zeroed padding."""
    lengths = lengths_of(operands.mask)
    padded = ((operands.q, lengths.q_lengths), (operands.k, lengths.kv_lengths), (operands.v, lengths.kv_lengths))
    return tuple(without_padding(problem, x, n) for x, n in padded)


def without_padding(problem: Problem, x: Any, lengths: Any) -> Any:
    """Returns x [B, length, heads, dim] in the dtype of the matmuls, 0 at and past its lengths."""
    return tile.zero_padding(x, lengths).astype(matmul_dtype(problem))


def cut_keys(problem: Problem, x: Any, lengths: Any, keys: Chunks, j: Any) -> Any:
    """Returns key chunk j of x, keys or values of the call, as `prepare` does, but [B, K, chunk, dim].

    A chunk at a time, so that a decoding step copies neither its cache nor its pages.
    """
    start = keys.start(j)
    rows = (
        x.gather(lax.div(start, jnp.int32(x.size)), keys.chunk // x.size) if isinstance(x, Paged) else keys.cut(x, j, 1)
    )
    return heads_first(without_padding(problem, rows, None if lengths is None else lengths - start))


def qk(problem: Problem, a: Any, b: Any) -> Any:
    """Multiplies [B, N, T, H] x [B, K, S, H] -> [B, N, T, S]."""
    return joined(qk_in_groups(problem, a, b))


def qk_in_groups(problem: Problem, a: Any, b: Any) -> Any:
    """Multiplies [B, N, T, H] x [B, K, S, H] -> [B, K, N // K, T, S]."""
    B, N, T, _ = a.shape
    return _grouped_matmul(problem, a, b, 3).reshape(B, b.shape[1], -1, T, b.shape[2])


def in_groups(x: Any, K: int) -> Any:
    """Splits heads into groups: [B, N, ...] -> [B, K, N // K, ...]; [B, 1, ...] -> [B, 1, 1, ...]."""
    return x.reshape(x.shape[0], min(K, x.shape[1]), -1, *x.shape[2:])


def joined(x: Any) -> Any:
    """Joins groups: [B, K, N // K, ...] -> [B, N, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def pv(problem: Problem, p: Any, b: Any) -> Any:
    """Multiplies [B, N, T, S] x [B, K, S, H] -> [B, N, T, H]."""
    B, N, T, _ = p.shape
    return _grouped_matmul(problem, p, b, 2).reshape(B, N, T, -1)


def _grouped_matmul(problem, a, b, contracted):
    a = a.astype(b.dtype).reshape(a.shape[0], b.shape[1], -1, a.shape[-1])
    dimensions = (((3,), (contracted,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)


def xp(problem: Problem, x: Any, p: Any) -> Any:
    """Multiplies [B, K, H, G, T] x [B, N, T, S] -> [B, K, H, S], summing over T and the G query heads of a group."""
    B, K, _, G, T = x.shape
    p = p.astype(x.dtype).reshape(B, K, G, T, -1)
    dimensions = (((3, 4), (2, 3)), ((0, 1), (0, 1)))
    return lax.dot_general(x, p, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)


def ptx(problem: Problem, p: Any, x: Any, K: int) -> Any:
    """Multiplies [B, N, T, S] x [B, N, T, H] -> [B, K, S, H], summing over T and the query heads of a group."""
    B, N, T, _ = x.shape
    p, x = (a.astype(x.dtype).reshape(B, K, N // K * T, -1) for a in (p, x))
    dimensions = (((2,), (2,)), ((0, 1), (0, 1)))
    return lax.dot_general(p, x, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)


def heads_first(x: Any) -> Any:
    """Swaps axes: [B, T, N, ...] -> [B, N, T, ...] and back."""
    return jnp.swapaxes(x, 1, 2)


def transpose_grouped(problem: Problem, x: Any) -> Any:
    """Groups heads and moves T last, for `xp`: [B, T, N, H] -> [B, K, H, G, T]."""
    B, T, _, H = x.shape
    return jnp.transpose(x.reshape(B, T, problem.K, -1, H), (0, 2, 4, 3, 1))
