"""How the arrays of masks and scores reach a kernel's tiles of logits.

Seen from a tile of logits [queries, keys], an array [B|1, N|1, T|1, S|1] is a scalar, a row (one value per key), a column
(one value per query) or a tile; one of [B|1, N|1, 1, 1, q tiles, kv tiles] is a word for each tile. A kernel that holds
logits as [keys, queries] transposes its arrays first, or tiles of 16-bit elements as it loads them from shared memory
(`turned`). Scalars and words are read from device memory where they are used.
The others are copied to shared memory by TMA, which asks for rows of a multiple of 16 bytes (32 here, for tiles). No
broadcast dim is ever materialised. An array that spans the diagonals is a tile that lies elsewhere in memory (`skewed`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.gpu.skewed import ROWS, Skewed
from pallas_fa.operands import diagonals
from pallas_fa.operands.dims import Dims

_EXACT_IN_FLOAT32 = ("bfloat16", "float16", "float32")
_EXACT_IN_INT32 = ("bool", "int8", "int16", "int32", "uint8", "uint16")
_TILE_DTYPES = ("bfloat16", "float16", "float32", "bool", "int8", "int32")


@dataclasses.dataclass(frozen=True)
class KernelArray:
    """One array of a mask or a score as a kernel sees it.

    `dtype` is that of the call, `stored_dtype` the one in memory. `row_bytes`: of a row in memory, padding included.
    `skewed`: how a tile that spans the diagonals lies in memory; None for other arrays. `turned`: whether rows of tiles in
    memory are columns of the kernel's tiles of logits.
    """

    kind: Literal["scalar", "row", "column", "tile", "word"]
    dtype: np.dtype
    stored_dtype: np.dtype
    batched: bool
    per_head: bool
    row_bytes: int
    skewed: Skewed | None = None
    turned: bool = False

    @classmethod
    def of(cls, x: Any, rows: int, turned: bool = False) -> "KernelArray":
        """Describes a bound array, [B|1, N|1, T|1, S|1] or [B|1, N|1, T + S - 1], of tiles of so many rows T in all."""
        if diagonals.spans(x):
            dtype, skewed = np.dtype(x.dtype), Skewed(rows, x.shape[2] + 1 - rows)
            return cls("tile", dtype, dtype, x.shape[0] > 1, x.shape[1] > 1, skewed.width * dtype.itemsize, skewed)
        spans_t, spans_s = x.shape[2] > 1, x.shape[3] > 1
        kind = ("tile" if spans_s else "column") if spans_t else ("row" if spans_s else "scalar")
        kind = "word" if x.ndim > 4 else kind
        dtype = np.dtype(x.dtype)
        if kind == "tile":
            stored = np.dtype(np.int8) if dtype == np.bool_ else dtype
        else:
            stored = np.dtype(np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int32)
        row = x.shape[3] if spans_s else x.shape[2]
        unit = 32 if kind == "tile" else 16  # float32 tiles have no register layout for pieces of 16 bytes
        row_bytes = -(-row * stored.itemsize // unit) * unit
        return cls(kind, dtype, stored, x.shape[0] > 1, x.shape[1] > 1, row_bytes, turned=turned)

    def why_not(self) -> str | None:
        """Returns None if a kernel can load it, else the reason."""
        names = _TILE_DTYPES if self.kind == "tile" else _EXACT_IN_FLOAT32 + _EXACT_IN_INT32
        if self.dtype.name in names:
            return None
        return f"an array of a mask or score has dtype {self.dtype.name}; the kernels load {', '.join(names)}"

    def widened(self) -> "KernelArray":
        """Returns it with elements of four bytes instead of one in tiles: Pallas loads no rows of 16 bytes."""
        if self.kind != "tile" or self.stored_dtype.itemsize > 1:
            return self
        return dataclasses.replace(self, stored_dtype=np.dtype(np.int32), row_bytes=4 * self.row_bytes)

    def in_memory(self, x: jax.Array) -> jax.Array:
        """Returns the array as the kernel takes it: [B|1, N|1] + [], [S], [T] or [T, S], rows padded to `row_bytes`.

        Of words: [B|1, N|1, q tiles, kv tiles].
        """
        if self.skewed:
            return self.skewed.in_memory(x)
        x = x.astype(self.stored_dtype)
        if self.kind in ("scalar", "word"):
            return x[:, :, 0, 0]
        x = x[:, :, 0, :] if self.kind == "row" else x[:, :, :, 0] if self.kind == "column" else x
        padding = [(0, 0)] * (x.ndim - 1) + [(0, self.row_bytes // self.stored_dtype.itemsize - x.shape[-1])]
        if self.kind == "tile":
            padding[2] = (0, -x.shape[2] % 8)  # TMA copies tiles in groups of 8 rows
        return jnp.pad(x, padding) if any(after for _, after in padding) else x

    def index(self, b: Any, n: Any) -> tuple[Any, Any]:
        """Returns where batch entry b and query head n lie in its first two dims."""
        return (b if self.batched else 0), (n if self.per_head else 0)

    def place(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Returns where a tile lies in its last two dims; `rows` (64 for `skewed`) and `columns` are `pl.ds` slices."""
        if self.skewed is None:
            return (columns, rows) if self.turned else (rows, columns)
        return pl.ds(0, ROWS), pl.ds(self.skewed.start(rows.start, columns.start), columns.size)

    def scratch(self, *lead: int, rows: int, columns: int) -> Any:
        """Returns shared memory for its part of tiles of [rows, columns] logits, with leading dims `lead`."""
        if self.kind != "tile":
            return plgpu.SMEM((*lead, columns if self.kind == "row" else rows), self.stored_dtype)
        rows, columns = (columns, rows) if self.turned else (rows, columns)
        transforms = swizzle(self.stored_dtype, self.piece(columns))
        return plgpu.SMEM((*lead, rows, columns), self.stored_dtype, transforms=transforms)

    def place_in(self, smem: Any, columns: int) -> Any:
        """Returns the first `columns` of a row in `scratch`, which may have more."""
        return smem if smem.shape[-1] == columns else smem.at[pl.ds(0, columns)]

    def piece(self, columns: int) -> int:
        """Returns how many bytes of a row of such tiles lie together in shared memory."""
        return math.gcd(self.row_bytes, columns * self.stored_dtype.itemsize, 128)

    def load(self, smem: Any, shape: tuple[int, int], layout: Any) -> Any:
        """Loads its part of a tile of logits, broadcast to the tile's `shape` and in its `layout`; not of a scalar."""
        if self.kind == "tile":
            return self.restore(plgpu.load(smem.T if self.turned else smem, layout=layout))
        axis = 1 if self.kind == "row" else 0
        if self.kind == "row":
            smem = self.place_in(smem, shape[1])
        values = plgpu.load(smem, layout=layout.reduce(1 - axis))
        return self.restore(lax.broadcast_in_dim(values, shape, [axis]))

    def restore(self, x: Any) -> Any:
        """Returns loaded values as a mask or score function takes them: floats in float32."""
        if jnp.issubdtype(self.dtype, jnp.floating):
            return x.astype(jnp.float32)
        return x != 0 if self.dtype == np.bool_ else x.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class KernelArrays:
    """All arrays of a call, the score's before the mask's.

    `tree`: the structure of (score, mask), whose leaves they are. `in_score`: how many are the score's. `transposed`: the
    kernel holds logits as [keys, queries]; arrays that it turns as it loads them are left as they are.
    """

    arrays: tuple[KernelArray, ...]
    tree: Any
    in_score: int
    transposed: bool

    @classmethod
    def of(cls, score: Any, mask: Any, dims: Dims, transposed: bool = False, can_turn: bool = False) -> "KernelArrays":
        """Describes the arrays of a score and mask that are bound to `dims`.

        `can_turn`: whether the kernel transposes tiles of 16-bit elements as it loads them.
        """
        leaves, tree = jax.tree.flatten((score, mask))
        rows = dims.S if transposed else dims.T

        def describe(x):
            is_tile = not diagonals.spans(x) and x.ndim == 4 and min(x.shape[2:]) > 1
            if transposed and can_turn and is_tile and x.dtype.itemsize == 2:
                return KernelArray.of(x, rows, turned=True)
            return KernelArray.of(_transpose(x) if transposed else x, rows)

        return cls(tuple(map(describe, leaves)), tree, len(jax.tree.leaves(score)), transposed)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, i: int) -> KernelArray:
        return self.arrays[i]

    def __iter__(self) -> Iterator[KernelArray]:
        return iter(self.arrays)

    def widened(self) -> "KernelArrays":
        """Returns them for tiles of 16 columns."""
        return dataclasses.replace(self, arrays=tuple(array.widened() for array in self.arrays))

    def of_kind(self, *kinds: str) -> tuple[int, ...]:
        """Returns the numbers of the arrays of these kinds."""
        return tuple(i for i, array in enumerate(self.arrays) if array.kind in kinds)

    def scalars(self, refs: Any, b: Any, n: Any) -> dict[int, Any]:
        """Loads the arrays without positions, of batch entry `b` and query head `n`; by number. `refs`: in device memory."""
        return {i: self[i].restore(refs[i][self[i].index(b, n)]) for i in self.of_kind("scalar")}

    def words(self, refs: Any, b: Any, n: Any, *tile: Any) -> dict[int, Any]:
        """Loads the words of tile `tile`, its numbers along both axes, of batch entry `b` and query head `n`; by number."""
        return {i: refs[i][(*self[i].index(b, n), *tile)] for i in self.of_kind("word")}

    @property
    def in_smem(self) -> tuple[int, ...]:
        """Returns the numbers of the arrays that are copied to shared memory."""
        return self.of_kind("row", "column", "tile")

    @property
    def streamed(self) -> tuple[int, ...]:
        """The numbers of the arrays that change along a row of logits."""
        return self.of_kind("row", "tile")

    def in_memory(self, score: Any, mask: Any) -> list[jax.Array]:
        """Returns the arrays as the kernel takes them."""
        leaves: list[Any] = jax.tree.leaves((score, mask))
        turn = lambda a, x: _transpose(x) if self.transposed and not a.turned else x
        return [a.in_memory(turn(a, x)) for a, x in zip(self.arrays, leaves, strict=True)]

    def unflatten(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Returns (score, mask) with these values in the places of the arrays."""
        return jax.tree.unflatten(self.tree, leaves)

    def with_scalars(self, scalars: dict[int, Any]) -> tuple[Any, Any]:
        """Returns (score, mask) with these scalars in the places of their arrays, and None for the other arrays."""
        return self.unflatten([scalars.get(i) for i in range(len(self))])


def _transpose(x: Any) -> Any:
    if diagonals.spans(x):
        return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.flip(x, 2)
    axis = x.ndim - 2  # words have their tiles in the last two dims
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis + 1], x.shape[axis]), x.dtype)
    return jnp.swapaxes(x, axis, axis + 1)
