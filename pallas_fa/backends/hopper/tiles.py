"""Tiles of q, k, v and out in shared memory, in the swizzled layout that the tensor cores read.

TMA copies a tile of the whole head dim at once where the sequence length is a multiple of 8 and the head dim one of 64,
or 80 or 96. Otherwise it copies chunks of 128 bytes. In a chunk, the order that TMA writes is the order that the tensor
cores read, so its bounds check may cut rows and columns anywhere, and it fills what lies outside with zeros. A tile is
therefore [chunks, rows, columns of a chunk], with two views of the same memory: `matrix` for the tensor cores, `copied`
for TMA. Of an operand that is split (see `products`), the chunks of one part follow those of another.

Where CTAs or warpgroups share the columns of an operand (`column_parts`), a tile has the columns of one of them. The
head dim is rounded up to `multiple`, and columns past it are zeros.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.operands.layout import Layout, ordered

# Head dims of 16-bit operands that are not padded to 128 (evidence: library/columns-of-80-and-96).
_NARROWER = (80, 96)
OfChunk = Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tiles of one operand, [B, length, heads, dim] in the order of `layout`, lie in shared memory.

    `group`: so many heads lie together in a tile, as rows that alternate (`grouped_rows`); a head is then such a group.
    `sharers`: warpgroups that each take a part of the columns as operand of a matmul, where the head dim is one chunk.
    `swizzle_bytes`: the width of the swizzled pieces of a row at most, and of a chunk where the tile is not copied at once.
    """

    length: int
    dim: int
    dtype: np.dtype
    layout: Layout
    interpret: bool
    in_chunks: bool = False
    parts: int = 1
    column_parts: int = 1
    multiple: int = 64
    sharers: int = 1
    swizzle_bytes: int = 128
    group: int = 1

    def summed_over(self, rows: int) -> "Tiles":
        """Returns tiles of `rows` rows that a matmul sums over: it takes as many at once as a swizzled piece is wide."""
        return dataclasses.replace(self, swizzle_bytes=math.gcd(rows * self.dtype.itemsize, 128))

    @property
    def padded_dim(self) -> int:
        """Columns of a tile: the head dim, or a part of it, rounded up to what the tensor cores take."""
        multiple = 16 * self.sharers if self._is_narrower else self.multiple
        return -(-self.dim // multiple) * multiple // self.column_parts

    @property
    def _is_narrower(self) -> bool:
        """Whether a head dim past 64 is not padded to 128."""
        if self.in_chunks or self.length % 8 or self.parts > 1 or self.column_parts > 1 or self.multiple > 64:
            return False
        return self.dim in _NARROWER and self.dtype.itemsize == 2

    @property
    def whole(self) -> bool:
        """Whether TMA copies the whole head dim at once."""
        return self._is_narrower or (self.length % 8 == 0 and self.dim % self.multiple == 0 and not self.in_chunks)

    @property
    def _one_view(self) -> bool:
        return self.whole or self.interpret  # the interpreter has no layouts

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return self.padded_dim if self.whole else self.swizzle_bytes // self.dtype.itemsize

    @property
    def chunks(self) -> int:
        """Chunks of the head dim."""
        return self.padded_dim // self.chunk

    @property
    def swizzled(self) -> int:
        """Bytes of the widest swizzle of which a chunk, or the part of each sharer, has a whole number."""
        sharers = self.sharers if self.whole else 1
        return math.gcd(self.chunk * self.dtype.itemsize // sharers, self.swizzle_bytes)

    @property
    def piece(self) -> int:
        """Columns that ordinary loads take at a time."""
        return math.gcd(self.chunk, 64)

    @property
    def copies(self) -> int:
        """Chunks of a tile, of all its parts, each copied by one TMA instruction."""
        return self.parts * self.chunks

    def arrivals(self, rows: int) -> int:
        """Returns how often loading a tile of `rows` rows arrives on its barriers."""
        return self.copies * (rows // self.group if self.group > 1 and self._one_view else 1)

    def scratch(self, *lead: int, rows: int, chunks: int = 0) -> Any:
        """Returns shared memory for tiles of `rows` rows, with leading dims `lead`; for `chunks` chunks, if not for all."""
        views = self.views(*lead, rows=rows, chunks=chunks)
        return views[0] if len(views) == 1 else plgpu.RefUnion(*views)

    def rows_of(self, other: "Tiles", rows: int) -> int | None:
        """Returns how many rows of `other` take the bytes of `rows` rows of these; None if no such tile has `rows` rows.

        Tiles of two warpgroups that share memory must be apart by the same bytes: one may store while another still reads.
        """
        own, others = (x.copies * x.chunk * x.dtype.itemsize for x in (self, other))
        fitting, rest = divmod(rows * own, others)
        return None if rest or fitting < rows or fitting % 8 else fitting  # swizzled tiles have whole groups of 8 rows

    def views(self, *lead: int, rows: int, chunks: int = 0) -> tuple[Any, ...]:
        """Returns the views of this memory: one for both, or `matrix` and `copied`."""
        lead = (*lead, chunks or self.copies)
        shape = (*lead, rows, self.chunk)
        matrix = plgpu.SMEM(shape, self.dtype, transforms=swizzle(self.dtype, self.swizzled))
        if self._one_view:
            return (matrix,)
        rows_of_chunk = (rows,) if self.group == 1 else (rows // self.group, self.group)
        shape = (*lead, *rows_of_chunk, self.chunk)
        return matrix, plgpu.SMEM(shape, self.dtype, transforms=(plgpu.SwizzleTransform(self.swizzle_bytes),))

    def scratch_with(self, other: "Tiles", *lead: int, rows: int) -> Any:
        """Returns shared memory for tiles like these, and for `other`, no larger, later (see `over_another`)."""
        rows_of_other = self.rows_of(other, rows)
        assert rows_of_other is not None
        return plgpu.RefUnion(*self.views(*lead, rows=rows), *other.views(*lead, rows=rows_of_other))

    def matrix(self, ref: Any) -> Any:
        """Returns the tensor cores' view of what `scratch` gave."""
        return ref if self._one_view else ref[0]

    def copied(self, ref: Any) -> Any:
        """Returns TMA's view of what `scratch` gave."""
        return ref if self._one_view else ref[1]

    def load(
        self, gmem: Any, b: Any, rows: Any, head: Any, copied: Any, barrier: "Any | OfChunk", column_part: Any = 0
    ) -> None:
        """Starts copying rows of one head into a tile; arrives on `barrier`, or on that of each chunk, `arrivals` times."""
        barrier_of = of_chunk(barrier)
        for i in range(self.copies):
            self.load_chunk(i, gmem, b, rows, head, copied.at[i], barrier_of(i), column_part)

    def load_chunk(
        self, i: int, gmem: Any, b: Any, rows: Any, head: Any, copied: Any, barrier: Any, column_part: Any = 0
    ) -> None:
        """Starts the copy of chunk i; of heads of their own, arrives on `barrier` once."""
        for source, target in self._boxes(gmem, b, rows, head, i, column_part, copied):
            plgpu.copy_gmem_to_smem(source, target, barrier)

    def store(self, copied: Any, gmem: Any, b: Any, rows: Any, head: Any, column_part: Any = 0) -> None:
        """Starts copying a tile to rows of one head; rows and columns outside are dropped."""
        for i in range(self.copies):
            self.store_chunk(i, copied.at[i], gmem, b, rows, head, column_part)

    def store_chunk(self, i: int, copied: Any, gmem: Any, b: Any, rows: Any, head: Any, column_part: Any = 0) -> None:
        """Starts copying chunk i of a tile, which lies in `copied`."""
        for target, source in self._boxes(gmem, b, rows, head, i, column_part, copied):
            plgpu.copy_smem_to_gmem(source, target)

    def _boxes(self, gmem, b, rows, head, i, column_part, copied):
        """Yields what is copied at once of a chunk: its place in device memory, and its part of the tile."""
        if self.group == 1:
            yield self._part(gmem, b, rows, head, i, column_part), copied
            return
        first, count = lax.div(rows.start, jnp.int32(self.group)), rows.size // self.group
        heads = pl.ds(head * self.group, self.group)
        if not self._one_view:
            yield self._part(gmem, b, pl.ds(first, count), heads, i, column_part), copied
            return
        for query in range(count):
            here = copied.at[pl.ds(query * self.group, self.group)]
            yield self._part(gmem, b, first + query, heads, i, column_part), here

    def _part(self, gmem, b, rows, head, i, column_part):
        part, chunk = divmod(i, self.chunks)
        if part:
            head = head + part * (gmem.shape[self.layout.index("N")] // self.parts)
        return gmem.at[ordered(self.layout, (b, rows, head, self.columns(chunk, column_part)))]

    def columns(self, chunk: int, column_part: Any = 0) -> Any:
        """Returns where the columns of a chunk lie."""
        # A traced start: Pallas refuses a static slice that reaches past the end, which TMA cuts.
        first = lax.mul(lax.axis_index(AXIS), jnp.int32(0)) if self.column_parts == 1 else column_part * self.padded_dim
        return pl.ds(chunk * self.chunk + first, self.chunk)


def of_chunk(barrier: "Any | OfChunk") -> OfChunk:
    """Returns the function that has the barrier of each chunk."""
    return barrier if callable(barrier) else lambda i: barrier


def pieces(chunks: Sequence[Any], width: int) -> Iterator[Any]:
    """Yields arrays [rows, width] of the columns of `chunks`, of which each has a multiple of `width`."""
    for x in chunks:
        for column in range(0, x.shape[1], width):
            yield x[:, column : column + width] if width < x.shape[1] else x


def over_another(
    scratch: dict[str, Any], name: str, tiles: Tiles, other_name: str, other: Tiles, rows: int
) -> dict[str, Any]:
    """Returns `scratch`, in which tiles `other` share the memory of `tiles`, with a ref of each under its own name.

    `rows`: those of a tile of either; narrower tiles `other` lie as far apart as those that they share memory with.
    """
    views = tuple(scratch[f"{name}_smem"])
    first = len(tiles.views(rows=rows))
    one_or_all = lambda views: views if len(views) > 1 else views[0]
    if tiles.rows_of(other, rows) != rows:
        of_tile = (*(slice(None) for _ in views[first].shape[:-2]), pl.ds(0, rows))
        views = (*views[:first], *(x.at[of_tile] for x in views[first:]))
    return scratch | {f"{name}_smem": one_or_all(views[:first]), f"{other_name}_smem": one_or_all(views[first:])}


def in_same_chunks(a: Tiles, b: Tiles) -> tuple[Tiles, Tiles]:
    """Returns both operands in chunks of the same size: in chunks of 128 bytes if one of them has to be."""
    if a.chunk == b.chunk:
        return a, b
    return dataclasses.replace(a, in_chunks=True), dataclasses.replace(b, in_chunks=True)
