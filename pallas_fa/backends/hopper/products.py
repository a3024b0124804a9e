"""How matmuls are made from operands: one 16-bit product, or several for float32 operands, which are split.

The tensor cores multiply 16-bit numbers exactly and add in float32. A float32 number is split into bfloat16 numbers that
add up to it: hi, the nearest one, and lo, that of what is left. Of hi and lo together 16 to 17 bits are kept. A float32
matmul is the sum of hi hi, hi lo and lo hi (Henry, Tang and Heinecke, arXiv 1904.06376; XLA's `BF16_BF16_F32_X3`).

Queries, keys, values and output gradients are split before a kernel, since many CTAs read each of them. The parts of an
array lie side by side along its heads, so that a tile is loaded part by part with the strides of one array. P and dS are
split in registers (evidence: library/float32-products).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.operands.layout import Layout

LARGEST_SPLIT_HEAD_DIM = 128  # the parts of larger tiles don't fit shared memory
_ALGORITHMS = jax.lax.DotAlgorithmPreset.DEFAULT, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


def why_not(dtype: Any, precision: Any) -> str | None:
    """Returns None if matmuls of operands of `dtype` can be made at `precision`, as JAX means it, else the reason.

    For float32 operands JAX's default and HIGH mean TensorFloat-32 on a GPU, which three products exceed.
    """
    of_algorithm = isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset))
    if dtype in (jnp.bfloat16, jnp.float16):
        return f"precision={precision}; its matmuls multiply exactly and add in float32" if of_algorithm else None
    if dtype != jnp.float32:
        return f"{dtype} inputs; its matmuls are of bfloat16, float16 or float32, and nothing is downcast silently"
    each = precision if isinstance(precision, tuple) else (precision,)
    if jax.lax.Precision.HIGHEST in each or (of_algorithm and precision not in _ALGORITHMS):
        return (
            f"precision={precision} of float32 inputs; it makes their matmuls by three bfloat16 ones (BF16_BF16_F32_X3)"
        )
    return None


def parts_of(dtype: Any) -> int:
    """Returns how many parts an operand of this dtype is split into."""
    return 2 if np.dtype(dtype) == np.float32 else 1


def operand_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of these parts."""
    return np.dtype(dtype) if parts_of(dtype) == 1 else np.dtype(jnp.bfloat16)


def pairs(parts: int) -> tuple[tuple[int, int], ...]:
    """Returns which parts of two operands are multiplied, by number; the smallest products first."""
    return tuple((i, total - i) for total in reversed(range(parts)) for i in range(total + 1))


def split(x: Any) -> tuple[Any, ...]:
    """Returns the parts of x as operands of matmuls: of a 16-bit array itself."""
    if parts_of(x.dtype) == 1:
        return (x,)
    hi = x.astype(jnp.bfloat16)
    return hi, (x - hi.astype(jnp.float32)).astype(jnp.bfloat16)


def remark(dtype: Any) -> str | None:
    """Returns what is done with operands of `dtype`, in words; None for nothing."""
    if parts_of(dtype) == 1:
        return None
    return "copies q, k and v once in each direction, split into two bfloat16 parts each: three products (BF16_BF16_F32_X3)"


def operand(x: Any, dtype: Any) -> tuple[Any, ...]:
    """Returns a float32 x as an operand of matmuls with operands that were split from arrays of `dtype`."""
    return split(x.astype(dtype))


def in_memory(x: Any, layout: Layout) -> Any:
    """Returns an operand [B, length, heads, dim] as kernels read it: its parts side by side along the heads."""
    if parts_of(x.dtype) == 1:
        return x
    hi, lo = split(x)
    # Of an infinite number nothing is left.
    lo = jnp.where(jnp.isfinite(x) & jnp.isfinite(hi), lo, 0)
    return jnp.concatenate([hi, lo], axis=layout.index("N"))
