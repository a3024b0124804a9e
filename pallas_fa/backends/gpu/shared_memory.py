"""Shared memory: the layout of tiles in it, and whether a kernel's scratch fits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.device import Gpu

_ALIGNMENT = 1024  # Pallas aligns each part of the scratch so
_RESERVED = 512  # bytes for barriers and the alignment of the whole


def swizzle(dtype: Any, width: int) -> tuple[Any, ...]:
    """Returns the layout of tiles whose rows are copied in pieces that divide `width` bytes: the widest swizzle, or none."""
    width = math.gcd(width, 128)
    tiling = plgpu.TilingTransform((8, width // np.dtype(dtype).itemsize))
    return (tiling, plgpu.SwizzleTransform(width)) if width > 16 else (tiling,)


def scratch_bytes(scratch: dict[str, Any]) -> int:
    """Returns the bytes of shared memory that a kernel's scratch takes, barriers left out."""
    sizes = (_bytes(x) for x in scratch.values() if not isinstance(x, plgpu.Barrier))
    return sum(pl.cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _bytes(smem):
    if isinstance(smem, plgpu.RefUnion):
        return max(map(_bytes, smem.refs))
    return math.prod(smem.shape) * np.dtype(smem.dtype).itemsize


def fits(scratch: dict[str, Any], gpu: Gpu) -> bool:
    """Returns whether a CTA with this scratch can run on `gpu`."""
    return scratch_bytes(scratch) + _RESERVED <= gpu.shared_memory


def first_that_fits[P](plans: Sequence[P], scratch: Callable[[P], dict[str, Any]], gpu: Gpu) -> P:
    """Returns the first of `plans` whose scratch fits `gpu`; the last if none does, so that a caller can say why."""
    return next((plan for plan in plans if fits(scratch(plan), gpu)), plans[-1])
