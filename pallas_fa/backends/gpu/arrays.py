"""How the arrays of masks and scores reach a kernel's tiles.

An array [B|1, N|1, T|1, S|1] is, seen from a tile of queries and keys, a scalar, a row (one value per key), a column
(one value per query) or a tile. Scalars are read from device memory where they are used; the others come by TMA, which
asks for rows of a multiple of 16 bytes (32 here, for tiles). No broadcast dim is ever materialised.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.tiles import swizzle

_EXACT_IN_FLOAT32 = ("bfloat16", "float16", "float32")
_EXACT_IN_INT32 = ("bool", "int8", "int16", "int32", "uint8", "uint16")
_TILE_DTYPES = ("bfloat16", "float16", "float32", "bool", "int8", "int32")


@dataclasses.dataclass(frozen=True)
class KernelArray:
    """One array of a mask or a score as a kernel sees it: its kind, its dtypes outside and inside device memory."""

    kind: Literal["scalar", "row", "column", "tile"]
    dtype: np.dtype
    stored_dtype: np.dtype
    batched: bool
    per_head: bool
    row_bytes: int

    @classmethod
    def of(cls, x: Any) -> "KernelArray":
        """Describes a bound array, [B|1, N|1, T|1, S|1]."""
        spans_t, spans_s = x.shape[2] > 1, x.shape[3] > 1
        kind = ("tile" if spans_s else "column") if spans_t else ("row" if spans_s else "scalar")
        dtype = np.dtype(x.dtype)
        if kind == "tile":
            stored = np.dtype(np.int8) if dtype == np.bool_ else dtype
        else:
            stored = np.dtype(np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int32)
        row = x.shape[3] if spans_s else x.shape[2]
        unit = 32 if kind == "tile" else 16  # float32 tiles have no register layout for pieces of 16 bytes
        row_bytes = -(-row * stored.itemsize // unit) * unit
        return cls(kind, dtype, stored, x.shape[0] > 1, x.shape[1] > 1, row_bytes)

    def why_not(self) -> str | None:
        """None if a kernel can load it, else the reason."""
        names = _TILE_DTYPES if self.kind == "tile" else _EXACT_IN_FLOAT32 + _EXACT_IN_INT32
        if self.dtype.name in names:
            return None
        return f"an array of a mask or score has dtype {self.dtype.name}; the kernels load {', '.join(names)}"

    def in_memory(self, x: jax.Array) -> jax.Array:
        """The array as the kernel takes it: [B|1, N|1] + [], [S], [T] or [T, S], rows padded to 16 bytes."""
        x = x.astype(self.stored_dtype)
        if self.kind == "scalar":
            return x[:, :, 0, 0]
        x = x[:, :, 0, :] if self.kind == "row" else x[:, :, :, 0] if self.kind == "column" else x
        padding = [(0, 0)] * (x.ndim - 1) + [(0, self.row_bytes // self.stored_dtype.itemsize - x.shape[-1])]
        if self.kind == "tile":
            padding[2] = (0, -x.shape[2] % 8)  # TMA copies tiles in groups of 8 rows
        return jnp.pad(x, padding) if any(after for _, after in padding) else x

    def index(self, b: Any, n: Any) -> tuple[Any, Any]:
        """Where batch entry b and query head n lie in its first two dims."""
        return (b if self.batched else 0), (n if self.per_head else 0)

    def scratch(self, stages: int, compute_wgs: int, rows: int, columns: int) -> Any:
        """Shared memory for it: `stages` of rows or tiles; columns stay for the whole block of queries."""
        if self.kind == "row":
            return plgpu.SMEM((stages, columns), self.stored_dtype)
        if self.kind == "column":
            return plgpu.SMEM((compute_wgs, rows), self.stored_dtype)
        width = math.gcd(self.row_bytes, columns * self.stored_dtype.itemsize)
        return plgpu.SMEM(
            (stages, compute_wgs, rows, columns), self.stored_dtype, transforms=swizzle(self.stored_dtype, width)
        )

    def restore(self, x: Any) -> Any:
        """Values from device memory as a mask or score function takes them: floats in float32."""
        if jnp.issubdtype(self.dtype, jnp.floating):
            return x.astype(jnp.float32)
        return x != 0 if self.dtype == np.bool_ else x.astype(self.dtype)
