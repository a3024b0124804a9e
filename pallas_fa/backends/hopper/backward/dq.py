"""How the fused pass adds up dQ, or stores it where a CTA holds all keys of a head."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.backends.hopper.config import BackwardConfig
from pallas_fa.backends.hopper.tiles import Tiles
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.layout import Layout, ordered


@dataclasses.dataclass(frozen=True)
class DqSums:
    """Float32 sums of dQ in device memory, to which each CTA adds a tile in each step.

    Args:
      config: tiles; its `first_store` says that the first CTA to have something for a tile of the sums stores it.
      dims: sizes of the problem.
      layout: that of the queries, and of the sums.
      padded_dim: the head dim, rounded up to what the tensor cores take.
      key_blocks: CTAs of a head, which add to the same sums.
      tiles: tiles of queries.
      store_warps: warps that add, in turns.
      one_order: whether all CTAs of a head visit the tiles in one order.
      interpret: JAX's interpreter can't add to device memory: there each CTA has sums of its own.
      tile: how a tile of queries lies in memory, and with it one of dQ that is stored.
      covers: whether the key blocks visit every tile of queries, as is known while tracing.
    """

    config: BackwardConfig
    dims: Dims
    layout: Layout
    padded_dim: int
    key_blocks: int
    tiles: int
    store_warps: int
    one_order: bool
    interpret: bool
    tile: Tiles
    covers: bool

    @property
    def is_final(self) -> bool:
        """Whether a tile of one CTA is dQ itself and needs no sum, since the CTA holds all keys of its head."""
        return self.key_blocks == 1 and self.by_rows

    @property
    def first_store(self) -> bool:
        """Whether the first CTA to have something for a tile of the sums stores it, as `first_store` says."""
        return self.config.first_store and not self.is_final

    @property
    def claims_late(self) -> bool:
        """Whether a warp claims a tile of the sums only once it is computed (see `first_store`)."""
        return self.first_store and self.store_warps > 1 and not self.one_order

    @property
    def start(self) -> tuple[tuple[int, ...], Any] | None:
        """Shape and dtype of what is zero before the kernel; None for nothing."""
        if self.first_store:
            return self.claims_shape, jnp.int32
        return None if self.is_final and self.covers else (self.shape, self.dtype)

    @property
    def is_result(self) -> bool:
        """Whether the kernel stores it into memory of its own; else it writes into what `start` says."""
        return self.first_store or self.start is None

    @property
    def dtype(self) -> Any:
        """Of the sums, or of dQ."""
        return self.tile.dtype if self.is_final else jnp.float32

    @property
    def by_rows(self) -> bool:
        """Whether the warpgroups share a tile of dQ by rows; else by columns."""
        return self.config.width == self.config.block

    @property
    def columns(self) -> int:
        """Columns of dQ that one warpgroup computes, of 64 rows."""
        return self.padded_dim if self.by_rows else self.padded_dim // self.config.compute_wgs

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sums, whose rows are padded as TMA demands, or of dQ."""
        if self.is_final:
            return ordered(self.layout, (self.dims.B, self.dims.T, self.dims.N, self.tile.dim))
        shape = self.dims.B, -(-self.dims.T // 8) * 8, self.dims.N, self.padded_dim
        return self._of_each_cta(*ordered(self.layout, shape))

    @property
    def claims_shape(self) -> tuple[int, ...]:
        """Of the counters of the tiles of these sums (see `first_store`), in the order in which "BTNH" has the tiles."""
        return self._of_each_cta(self.dims.B, self.tiles, self.dims.N)

    def _of_each_cta(self, *shape):
        return (self.key_blocks, *shape) if self.interpret else shape


def can_share_dq(config: BackwardConfig, keys: Tiles, queries: Tiles) -> bool:
    """Returns whether the warpgroups can share a tile of dQ = dS K, 64 rows for each: by rows, or by columns.

    `keys`, `queries`: how their tiles lie in memory. Of an odd number of chunks of 64 columns no warpgroup could take half.
    """
    whole = keys.whole and queries.whole
    halves = keys.padded_dim in (96, 128) or (keys.padded_dim in (64, 192) and whole)
    return config.width == config.block or (config.width == 64 and halves and config.compute_wgs == 2)
