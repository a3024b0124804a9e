"""Tiles of q, k, v and out in shared memory, in the swizzled layout that the tensor cores read.

TMA copies a tile of the whole head dim at once where the sequence length is a multiple of 8 and the head dim one of 64.
Otherwise it copies chunks of 64 columns: in a chunk, the order that TMA writes is the order that the tensor cores read,
so that its bounds check may cut rows and columns anywhere and fill what lies outside with zeros. A tile is therefore
[chunks, rows, columns of a chunk], with two views of the same memory: `matrix` for the tensor cores, `copied` for TMA.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.device import Gpu

_RESERVED = 512  # bytes for barriers and alignment, which `scratch_bytes` leaves out


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tiles of one operand [B, length, heads, dim] lie in shared memory."""

    length: int
    dim: int
    dtype: np.dtype
    interpret: bool
    in_chunks: bool = False

    @property
    def padded_dim(self) -> int:
        """The head dim rounded up to what the tensor cores take."""
        return -(-self.dim // 64) * 64

    @property
    def _whole(self) -> bool:
        return self.length % 8 == 0 and self.dim % 64 == 0 and not self.in_chunks

    @property
    def _one_view(self) -> bool:
        return self._whole or self.interpret  # the interpreter has no layouts

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return self.padded_dim if self._whole else 64

    @property
    def chunks(self) -> int:
        """Chunks of a tile, each copied by one TMA instruction."""
        return self.padded_dim // self.chunk

    def scratch(self, *lead: int, rows: int) -> Any:
        """Shared memory for tiles of `rows` rows, with leading dims `lead`."""
        shape = (*lead, self.chunks, rows, self.chunk)
        matrix = plgpu.SMEM(shape, self.dtype, transforms=swizzle(self.dtype, self.chunk * self.dtype.itemsize))
        if self._one_view:
            return matrix
        return plgpu.RefUnion(matrix, plgpu.SMEM(shape, self.dtype, transforms=(plgpu.SwizzleTransform(128),)))

    def views(self, ref: Any) -> tuple[Any, Any]:
        """(matrix, copied): the views of what `scratch` gave."""
        if self._one_view:
            return ref, ref
        matrix, copied = ref
        return matrix, copied

    def load(self, gmem: Any, b: Any, rows: Any, head: Any, copied: Any, barrier: Any) -> None:
        """Starts copying rows of one head into a tile; arrives on `barrier` `chunks` times."""
        for i in range(self.chunks):
            plgpu.copy_gmem_to_smem(gmem.at[b, rows, head, self._columns(i)], copied.at[i], barrier)

    def store(self, copied: Any, gmem: Any, b: Any, rows: Any, head: Any) -> None:
        """Starts copying a tile to rows of one head; rows and columns outside are dropped."""
        for i in range(self.chunks):
            plgpu.copy_smem_to_gmem(copied.at[i], gmem.at[b, rows, head, self._columns(i)])

    def _columns(self, i):
        # A traced start: Pallas refuses a static slice that reaches past the end, which TMA cuts.
        return pl.ds(i * self.chunk + lax.mul(lax.axis_index("block"), jnp.int32(0)), self.chunk)


def alike(a: Tiles, b: Tiles) -> tuple[Tiles, Tiles]:
    """Both in chunks, if one of them has to be."""
    if a.chunk == b.chunk:
        return a, b
    return dataclasses.replace(a, in_chunks=True), dataclasses.replace(b, in_chunks=True)


def swizzle(dtype: Any, width: int) -> tuple[Any, ...]:
    """The layout of tiles whose rows TMA copies in pieces that divide `width` bytes: the widest swizzle, or none."""
    width = math.gcd(width, 128)
    tiling = plgpu.TilingTransform((8, width // np.dtype(dtype).itemsize))
    return (tiling, plgpu.SwizzleTransform(width)) if width > 16 else (tiling,)


def first_that_fits(plans: Sequence[Any], gpu: Gpu) -> Any:
    """The first of these plans whose CTAs have room in shared memory, or the last, to say how much is missing."""
    return next((plan for plan in plans if fits(plan, gpu)), plans[-1])


def fits(plan: Any, gpu: Gpu) -> bool:
    """Whether a CTA of this plan has room in shared memory."""
    return plan.shared_memory() + _RESERVED <= gpu.shared_memory


def scratch_bytes(scratch: dict[str, Any]) -> int:
    """Bytes of shared memory of a kernel's scratch, each part aligned as Pallas does; barriers left out."""
    sizes = (_bytes(x) for x in scratch.values() if not isinstance(x, plgpu.Barrier))
    return sum(rounded(size, 1024) for size in sizes)


def _bytes(smem):
    if isinstance(smem, plgpu.RefUnion):
        return max(map(_bytes, smem.refs))
    return math.prod(smem.shape) * np.dtype(smem.dtype).itemsize


def rounded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
