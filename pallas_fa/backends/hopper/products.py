"""How matmuls are made from operands: one 16-bit product, or several for float32 operands, which are split into parts.

The tensor cores multiply 16-bit numbers exactly and add in float32. A float32 number is the sum of bfloat16 numbers: the
nearest one, that of what is left, and so on, each with 8 more bits. A float32 matmul is a sum of matmuls of such parts
(Henry, Tang and Heinecke, arXiv 1904.06376): three of two parts, six of three, as JAX's algorithms BF16_BF16_F32_X3 and
BF16_BF16_F32_X6.

Queries, keys, values and output gradients are split before a kernel, since many CTAs read each of them. The parts of an
array lie side by side along its heads, so that a tile is loaded part by part with the strides of one array. P and dS are
split in registers (evidence: library/float32-products).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.backends.gpu import row_statistics, support
from pallas_fa.operands.layout import Layout
from pallas_fa.problem import Problem

_LARGEST_HEAD_DIM = {2: 128, 3: 64}  # whose tiles fit shared memory, by parts

_Precision, _Algorithm = jax.lax.Precision, jax.lax.DotAlgorithmPreset
# JAX's default and HIGH mean TensorFloat-32 on a GPU, which three products exceed.
_PARTS = {
    None: 2,
    _Precision.DEFAULT: 2,
    _Precision.HIGH: 2,
    _Precision.HIGHEST: 3,
    _Algorithm.BF16_BF16_F32_X3: 2,
    _Algorithm.BF16_BF16_F32_X6: 3,
}


def why_not(problem: Problem) -> str | None:
    """Returns None if the matmuls can be made as the problem's precision says, with tiles that fit, else the reason."""
    if problem.dtype != jnp.float32:
        return support.why_not(problem, support.LARGEST_WIDE_HEAD_DIM)
    precision = f"precision={problem.precision}"
    if not all(each in _PARTS for each in _each(problem.precision)):
        return f"{precision}; it makes float32 products as BF16_BF16_F32_X3 and BF16_BF16_F32_X6 do"
    return support.why_not_sizes(problem, _LARGEST_HEAD_DIM[parts_of(problem)], f" of float32 with {precision}")


def _each(precision):
    return precision if isinstance(precision, tuple) else (precision,)


def parts_of(problem: Problem) -> int:
    """Returns how many parts each operand is split into; of a problem whose products can be made."""
    if problem.dtype != jnp.float32:
        return 1
    return max(_PARTS[each] for each in _each(problem.precision))


def operand_dtype(problem: Problem) -> np.dtype:
    """Returns the dtype of these parts."""
    return np.dtype(jnp.bfloat16) if parts_of(problem) > 1 else problem.dtype


def remark(problem: Problem) -> str | None:
    """Returns what is done with the operands, in words; None for nothing."""
    parts = parts_of(problem)
    if parts == 1:
        return None
    count = len(pairs(parts))
    return f"copies q, k and v once in each direction, split into {parts} bfloat16 parts each, for {count} products"


def pairs(parts: int) -> tuple[tuple[int, int], ...]:
    """Returns which parts of two operands are multiplied, by number; the smallest products first."""
    return tuple((i, total - i) for total in reversed(range(parts)) for i in range(total + 1))


def _rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _rounded_by_xla(x):
    # XLA drops conversions there and back on a GPU.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def split(x: Any, parts: int, rounded: Callable[[Any], Any] = _rounded) -> tuple[Any, ...]:
    """Returns bfloat16 parts whose sum is the float32 array x, the largest first; `rounded` rounds to bfloat16."""
    found, rest = [], x
    for _ in range(parts - 1):
        nearest = rounded(rest)
        found.append(nearest.astype(jnp.bfloat16))
        rest = rest - nearest
    return *found, rest.astype(jnp.bfloat16)


def operand(problem: Problem, x: Any) -> tuple[Any, ...]:
    """Returns the parts of a float32 x in registers, as a left operand of matmuls with operands of the problem."""
    parts = parts_of(problem)
    return (x.astype(problem.dtype),) if parts == 1 else split(x, parts)


def in_memory(problem: Problem, x: Any, layout: Layout) -> Any:
    """Returns an operand [B, length, heads, dim] as kernels read it: its parts side by side along the heads."""
    parts = parts_of(problem)
    if parts == 1:
        return x
    first, *others = split(x, parts, _rounded_by_xla)
    # Of a number that is or becomes infinite nothing is left, and inf - inf would be NaN.
    others = (jnp.where(jnp.isfinite(first), part, 0) for part in others)
    return jnp.concatenate([first, *others], axis=layout.index("N"))


def row_sums(problem: Problem, x: Any, y: Any) -> Any:
    """Returns `row_statistics.row_sums` as matmuls of `in_memory(x)` and `in_memory(y)` have it."""
    parts = parts_of(problem)
    if parts == 1:
        return row_statistics.row_sums(problem, x, y)
    x, y = (tuple(part.astype(jnp.float32) for part in split(z, parts, _rounded_by_xla)) for z in (x, y))
    return jnp.sum(sum((x[i] * y[j] for i, j in pairs(parts)), jnp.float32(0)), axis=-1)
