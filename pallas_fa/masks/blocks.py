"""`BlockMask`: which blocks of queries and keys hold something."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import BOUNDARY, EMPTY, FULL, Mask, Tiles, remedy_for
from pallas_fa.masks.block_bits import BlockBits
from pallas_fa.masks.lengths import Lengths
from pallas_fa.operands import intervals
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import Range
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import is_array, is_static_int


@dataclasses.dataclass(frozen=True)
class BlockMask(Mask):
    """Which blocks hold allowed pairs; the others are not visited, wherever they lie.

    `block_mask` computes one from any mask, which then decides inside the blocks. Made from `blocks` alone, it allows all
    pairs of a True block. As `ranges=` of a `Custom` it says where the function may allow something. Its blocks need not be
    the kernels' tiles. (FlexAttention's BlockMask, Dong et al., arXiv 2412.05496.)

    Attributes:
      blocks: bool [.., ceil(T / q), ceil(S / kv)], whose leading dims broadcast to [*B, N]; or, as `block_mask` makes it,
        int8: 0 where no pair of the block is allowed, 1 where some may be, 2 where all are.
      block: (q, kv), the positions of a block; an int for both.
      mask: which pairs are allowed. It must allow none in a block of 0 or False, and all in one of 2. None: all in the rest.
      size: the lengths (T, S) for which `blocks` was made; None for any that have so many blocks.
      t0: the first query, counted from the start of `blocks`: 0, or in a part of a problem an int or int32 [1, 1, 1, 1].
      s0: the first key, likewise.
      lists: which blocks each row of blocks and each column visits, as `block_lists.of_blocks` makes them with `blocks`, so
        that kernels whose tiles divide the blocks need not; None: they are made in each call.
      indices: (batch entries, heads) for which `blocks` was made, where `mask` depends on their index; else None.
    """

    blocks: Any
    block: Any = 128
    mask: Mask | None = None
    size: tuple[int, int] | None = None
    t0: Any = 0
    s0: Any = 0
    lists: tuple[Any, Any] | None = None
    indices: tuple[int | None, int | None] = (None, None)

    def __post_init__(self):
        blocks = _array_of(self.blocks)
        if not is_array(blocks) or blocks.dtype not in (jnp.bool_, jnp.int8) or blocks.ndim < 2:
            kind = f"{blocks.dtype} {list(blocks.shape)}" if is_array(blocks) else type(blocks).__name__
            raise TypeError(
                f"BlockMask takes a bool array with a value for each block, [.., T / q, S / kv], got {kind}. True means"
                " 'visited'; for 0 and 1 pass `blocks != 0`; for the blocks of a mask use block_mask(mask, T, S)."
            )
        if self.mask is not None and not isinstance(self.mask, Mask):
            remedy = remedy_for(self.mask, "Leave it out for all pairs of the blocks.")
            raise TypeError(f"mask is a {type(self.mask).__name__}; it must be a Mask or None. {remedy}")
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "block", block_sizes(self.block))

    def bind(self, dims: Dims, lengths: Any) -> "BlockMask":
        counts = tuple(-(-size // block) for size, block in zip((dims.T, dims.S), self.block, strict=True))
        if dims.has_symbolic_length and self.blocks.shape[-2:] != counts:
            raise ValueError(
                f"the block mask has {self.blocks.shape[-2:]} blocks, and the call has the symbolic lengths (T, S)="
                f"({dims.T}, {dims.S}). Export with known lengths, or pass the mask without its blocks."
            )
        if self.size not in (None, (dims.T, dims.S)):
            raise ValueError(
                f"the block mask was made for (T, S)={self.size}, and the call has ({dims.T}, {dims.S}). Make it for these:"
                f" block_mask(mask, {dims.T}, {dims.S})."
            )
        for made, size, what, name in zip(
            self.indices, (dims.B, dims.N), ("batch entries", "query heads"), ("batch", "heads"), strict=True
        ):
            if made not in (None, size):
                raise ValueError(
                    f"the block mask was made for {made} {what}, on whose index the mask depends, and the call has {size}."
                    f" Make it for these: block_mask(mask, {dims.T}, {dims.S}, {name}={size})."
                )
        if self.blocks.shape[-2:] != counts:
            raise ValueError(
                f"blocks.shape={self.blocks.shape} must end in {counts}: T={dims.T} queries in blocks of {self.block[0]} and"
                f" S={dims.S} keys in blocks of {self.block[1]}. Pass block= if its blocks have another size."
            )
        blocks = Dims(dims.batch, T=counts[0], S=counts[1], N=dims.N).broadcastable("blocks", self.blocks)
        if blocks.dtype == jnp.bool_:
            blocks = blocks.astype(jnp.int8) * (FULL if self.mask is None else BOUNDARY)
        # Dims of size 1 in the places of T and S, so that nobody cuts it to a part of these.
        blocks = blocks.reshape(*blocks.shape[:2], 1, 1, *counts)
        lists = self.lists and tuple(_bound_list(dims, x) for x in self.lists)
        # `blocks` knew of no lengths, so `mask` is not aligned to those of the call.
        mask = None if self.mask is None else self.mask.bind(dims, Lengths())
        return dataclasses.replace(self, blocks=blocks, mask=mask, lists=lists)

    def counted_from_start(self, dims: Dims) -> str | None:
        return None if self.mask is None else "BlockMask"  # whatever its alignment, it knew of no lengths

    def at_end(self) -> "BlockMask":
        if self.mask is not None:
            raise ValueError(
                "mask holds a BlockMask of a mask, made for queries from position 0, but those of a cache are its last rows."
                " Pass the mask without blocks."
            )
        return self

    def moved(self, part: Part) -> "BlockMask":
        t0, s0 = (x if is_static_int(x) else origin for x, origin in zip(part.start[2:], part.origin[2:], strict=True))
        mask = None if self.mask is None else self.mask.moved(part)
        moved = dataclasses.replace(self, mask=mask, t0=self.t0 + t0, s0=self.s0 + s0)
        is_whole = self.size == part.size[2:] and all(is_static_int(x) and x == 0 for x in (moved.t0, moved.s0))
        return moved if is_whole else dataclasses.replace(moved, lists=None)

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        if self.mask is not None:
            return self.mask.allowed(b, n, t, s)
        b, n = (i if size != 1 else 0 for i, size in zip((b, n), self.blocks.shape, strict=False))
        index = b, n, 0, 0, (t + self.t0) // self.block[0], (s + self.s0) // self.block[1]
        index = jnp.broadcast_arrays(*intervals.with_equal_ranks(*map(jnp.asarray, index)))
        return jnp.asarray(self.blocks).at[tuple(index)].get(mode="clip") > EMPTY

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._range(tile_ranges.hull, self._pooled(self._states, 2, (t_lo, t_hi), jnp.max) > EMPTY, 3)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._range(tile_ranges.hull, self._pooled(self._states, 3, (s_lo, s_hi), jnp.max) > EMPTY, 2)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._range(tile_ranges.first_run, self._pooled(self._states, 2, (t_lo, t_hi), jnp.min) == FULL, 3)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._range(tile_ranges.first_run, self._pooled(self._states, 3, (s_lo, s_hi), jnp.min) == FULL, 2)

    @property
    def has_blocks(self) -> bool:
        return True

    def tile_states(self, queries: Tiles, keys: Tiles) -> Any:
        pool = lambda reduce: self._pooled(self._pooled(self._states, 2, queries, reduce), 3, keys, reduce)
        return jnp.where(pool(jnp.min) == FULL, FULL, jnp.minimum(pool(jnp.max), BOUNDARY)).astype(jnp.int8)

    def tiles_of_lists(self, sizes: tuple[int, int], tiles: tuple[int, int]) -> tuple[int, int] | None:
        divide = all(block % tile == 0 for block, tile in zip(self.block, tiles, strict=True))
        if self.lists is None or self.size != sizes or not divide:
            return None
        return self.block[0] // tiles[0], self.block[1] // tiles[1]

    def in_tiles(self, sizes: tuple[int, int], tiles: tuple[int, int]) -> Mask:
        if self.mask is not None:
            return self.mask.in_tiles(sizes, tiles)
        x, counts = self._states > EMPTY, []
        for axis in (3, 2):
            first, _, count = self._touched(axis, *intervals.tiles(sizes[axis - 2], tiles[axis - 2]))
            index = first[:, None] + (np.arange(count, dtype=np.int32)[None] - first[:, None]) % count
            x, counts = jnp.take(x, index, axis=axis, mode="clip"), [count, *counts]
        bits = np.arange(counts[0] * counts[1], dtype=np.int32).reshape(1, 1, 1, counts[0], 1, counts[1])
        words = jnp.sum(x.astype(jnp.int32) << bits, axis=(3, 5), dtype=jnp.int32)
        return BlockBits(words[:, :, None, None], self.block, (counts[0], counts[1]), self.t0, self.s0)

    @property
    def _states(self):
        return jnp.asarray(self.blocks)[:, :, 0, 0]

    def _start(self, axis):
        start = self.s0 if axis == 3 else self.t0
        return start.reshape(()) if is_array(start) else start

    def _touched(self, axis, lo, hi):
        """(the first block that each tile touches along an axis of [B, N, T, S], the last, how many any may touch)."""
        lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
        block, start = self.block[axis - 2], self._start(axis)
        first, last = (lo + start) // block, (hi - 1 + start) // block
        if is_array(start):  # wherever a tile starts
            return first, last, int((hi - lo).max() + block - 2) // block + 1
        return first, last, max(int((last - first).max()) + 1, 1)

    def _pooled(self, x, axis, tiles, reduce):
        """Reduces the blocks that each tile touches, along an axis of [B|1, N|1, blocks, blocks], to one value."""
        first, last, count = self._touched(axis, *tiles)
        if count == 1 and intervals.array_module(first) is np and np.array_equal(first, np.arange(x.shape[axis])):
            return x
        index = intervals.minimum(first[:, None] + np.arange(count, dtype=np.int32)[None], last[:, None])
        return reduce(jnp.take(x, index, axis=axis, mode="clip"), axis=axis + 1)

    def _range(self, answer, hit, axis):
        """`answer` is of `tile_ranges`; `hit`: bool [B|1, N|1, ..], where `axis` has the blocks and the other the tiles."""
        lo, hi = answer(hit if axis == 3 else jnp.swapaxes(hit, 2, 3), self.block[axis - 2])
        return lo - self._start(axis), hi - self._start(axis)


def _array_of(blocks: Any) -> Any:
    """Returns a list as an array, where it is one; anything else as it is."""
    try:
        return jnp.asarray(blocks) if isinstance(blocks, list) else blocks
    except (TypeError, ValueError):
        return blocks


def _bound_list(dims, x):
    x = Dims(dims.batch, T=x.shape[-2], S=x.shape[-1], N=dims.N).broadcastable("lists", x)
    return x.reshape(*x.shape[:2], 1, 1, *x.shape[2:])


def block_sizes(block: Any) -> tuple[int, int]:
    """Returns `block`, an int or (q, kv), as (q, kv)."""
    sizes = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(sizes) != 2 or not all(is_static_int(size) and size > 0 for size in sizes):
        raise ValueError(f"block={block!r} must be the positions of a block: an int > 0, or a pair (q, kv) of them.")
    return int(sizes[0]), int(sizes[1])
