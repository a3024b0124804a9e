"""Tiles of the kernels by mma.sync: what `config=` of `dot_product_attention` may name, and what the tables choose from."""

import dataclasses

from pallas_fa.backends.gpu.config_types import check_types


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tiles of the forward kernel.

    Args:
      wgs: warpgroups of a CTA (a CUDA thread block).
      rows: queries that a warpgroup holds.
      block_kv: keys of a key block.
      stages: key blocks in shared memory. With 1, keys are loaded under the softmax and values under Q K^T, as in
        FlashAttention-2; with 2, a key block is loaded while the one before is used.
      l2_head_group: heads whose CTAs run concurrently, so that their keys and values stay in the L2 cache.
    """

    wgs: int = 1
    rows: int = 128
    block_kv: int = 64
    stages: int = 1
    l2_head_group: int = 8

    def __post_init__(self):
        _check(self)
        if self.block_kv not in (16, 32, 64, 128):
            raise ValueError(f"block_kv={self.block_kv} must be 16, 32, 64 or 128: a tile of logits lies in registers.")

    @property
    def block_q(self) -> int:
        """Queries of a query block."""
        return self.rows * self.wgs


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of one pass of the backward kernel.

    A CTA holds a block of one sequence, the stationary one, and loops over tiles of the other, the streamed one: keys and
    queries, or queries and keys in the pass for dQ.

    Args:
      wgs: warpgroups of a CTA.
      rows: stationary positions that a warpgroup holds.
      width: positions of a streamed tile.
      stages: streamed tiles in shared memory. With 2, one is loaded while the one before is used.
      l2_head_group: as for the forward kernel.
      head_parts: parts of the query heads of a key head, each with CTAs of its own, whose gradients of keys and values XLA
        adds up: a divisor of these heads, for calls whose blocks of keys do not fill the GPU. For the passes that hold keys.
    """

    wgs: int = 1
    rows: int = 64
    width: int = 64
    stages: int = 2
    l2_head_group: int = 8
    head_parts: int = 1

    def __post_init__(self):
        _check(self)
        if self.width not in (16, 32, 64, 128):
            raise ValueError(f"width={self.width} must be 16, 32, 64 or 128: two tiles of logits lie in registers.")

    @property
    def block(self) -> int:
        """Stationary positions of a CTA."""
        return self.rows * self.wgs

    @property
    def tile(self) -> int:
        """Streamed positions of a step."""
        return self.width


@dataclasses.dataclass(frozen=True)
class FusedBackwardConfig:
    """Tiles of the backward kernel that gives all gradients in one pass.

    A CTA holds a block of keys and loops over tiles of queries. Each warpgroup computes the logits of all of these keys and
    of a part of the queries; P and dS go to the others through shared memory, and each holds a part of the columns of dK
    and dV.

    Args:
      wgs: warpgroups of a CTA. Head dims, rounded up to a multiple of 64, are to be multiples of 64 * wgs.
      rows: keys of a CTA.
      width: queries of which a warpgroup computes the logits in a step; all of a CTA are at most 128.
      stages: tiles of queries in shared memory. With 2, one is loaded while the one before is used.
      values_in_registers: each warpgroup holds V of these keys in registers; there is none in shared memory.
      l2_head_group: as for the forward kernel.
      head_parts: parts of the query heads of a key head, each with CTAs of its own, whose gradients of keys and values XLA
        adds up: a divisor of these heads, for calls whose blocks of keys do not fill the GPU.
    """

    wgs: int = 2
    rows: int = 128
    width: int = 32
    stages: int = 2
    values_in_registers: bool = False
    l2_head_group: int = 8
    head_parts: int = 1

    def __post_init__(self):
        _check(self)
        if self.width not in (16, 32, 64):
            raise ValueError(f"width={self.width} must be 16, 32 or 64: two tiles of logits lie in registers.")
        if self.tile > 128:
            raise ValueError(
                f"width={self.width} with wgs={self.wgs} makes steps of {self.tile} queries; the most is 128. Take a smaller"
                " width."
            )

    @property
    def block(self) -> int:
        """Stationary positions of a CTA."""
        return self.rows

    @property
    def tile(self) -> int:
        """Streamed positions of a step."""
        return self.width * self.wgs


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tiles of the kernel for few queries.

    Args:
      rows: queries of a CTA, those of all heads of a key head together: 16, 32 or 64. The four warps hold them 4, 2 times
        or once, and split the keys of a key block so many times.
      block_kv: keys of a key block.
      stages: key blocks in shared memory.
      kv_splits: parts of the keys of a sequence, each with a CTA of its own.
    """

    rows: int = 16
    block_kv: int = 64
    stages: int = 3
    kv_splits: int = 1

    def __post_init__(self):
        check_types(self)
        if self.rows not in (16, 32, 64):
            raise ValueError(f"rows={self.rows} must be 16, 32 or 64: four warps hold 16 rows each.")
        if self.block_kv not in (16, 32, 64, 128) or self.block_kv * self.rows < 1024:
            raise ValueError(
                f"block_kv={self.block_kv} with rows={self.rows} must be 16, 32, 64 or 128, and at least 1024 / rows: each"
                " warp has 16 keys or more."
            )
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2: keys are loaded while others are used.")
        if not 1 <= self.kv_splits <= 64:
            raise ValueError(f"kv_splits={self.kv_splits} must be from 1, for keys in one part, to 64.")

    @property
    def block_q(self) -> int:
        """Queries of a query block."""
        return self.rows


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles for one call, `config=` of `dot_product_attention`. None: those of the tables.

    `forward` also says that the ordinary forward kernel takes the call where there are few queries.
    """

    forward: ForwardConfig | None = None
    backward: BackwardConfig | FusedBackwardConfig | None = None
    decode: DecodeConfig | None = None

    def __post_init__(self):
        backward = BackwardConfig, FusedBackwardConfig
        for name, kinds in (("forward", (ForwardConfig,)), ("backward", backward), ("decode", (DecodeConfig,))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                names = " or a ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name}={value!r} must be a {names} of pallas_fa.backends.mma.config, or None.")


def _check(config: ForwardConfig | BackwardConfig | FusedBackwardConfig) -> None:
    check_types(config)
    if config.wgs not in (1, 2, 4):
        raise ValueError(f"wgs={config.wgs} must be 1, 2 or 4: a CTA has registers for no more.")
    if config.rows not in (64, 128):
        raise ValueError(f"rows={config.rows} must be 64 or 128: each of four warps holds 16 rows, once or twice.")
    if config.stages not in (1, 2):
        raise ValueError(f"stages={config.stages} must be 1 or 2.")
    if config.l2_head_group < 1:
        raise ValueError(f"l2_head_group={config.l2_head_group} must be at least 1.")
    if not isinstance(config, ForwardConfig) and config.head_parts < 1:
        raise ValueError(f"head_parts={config.head_parts} must be at least 1, for all query heads in one part.")
