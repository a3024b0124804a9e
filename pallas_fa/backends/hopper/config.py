"""Tiles of the kernels: frozen configurations and the tables that choose them."""

import dataclasses
from typing import Any

from pallas_fa.backends.gpu.device import Gpu


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tiles of the forward kernel: each of `compute_wgs` warpgroups holds 64 queries, against `block_kv` keys at a time.

    `stages`: depth of the K and V rings. `head_section`: heads whose tiles run side by side, the longest tiles first,
    where the work of tiles differs; it keeps their keys and values in the L2 cache. `pin_softmax`: write the row sums to
    shared memory in each step, where nobody reads them. ptxas otherwise moves the exponentials behind the wait for the
    P V matmul that they are meant to run under; it cannot move them behind a store. `pairs`: a block of threads does that
    many pairs of blocks of queries, the loads of each block under the end of the one before; 0: a single block.
    `takes_turns`: the warpgroups issue their matmuls in turn, so that the softmax of one runs under the matmuls of
    another. `q_in_registers`: queries are a matmul operand in registers, not in shared memory.
    """

    compute_wgs: int = 2
    block_kv: int = 128
    stages: int = 2
    head_section: int = 8
    pin_softmax: bool = True
    pairs: int = 0
    takes_turns: bool = False
    q_in_registers: bool = False

    def __post_init__(self):
        if self.compute_wgs not in (1, 2, 3):
            raise ValueError(f"compute_wgs={self.compute_wgs} must be 1, 2 or 3: a block has registers for no more.")
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(
                f"block_kv={self.block_kv} must be a positive multiple of 64, the width of a swizzled tile."
            )
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2, to load one tile while another is used.")
        if self.head_section < 1:
            raise ValueError(f"head_section={self.head_section} must be at least 1.")
        if self.pairs < 0:
            raise ValueError(f"pairs={self.pairs} must be at least 0, for single blocks of queries.")

    @property
    def block_q(self) -> int:
        return 64 * self.compute_wgs

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the load warpgroup; their sum must fit the pool at launch."""
        return {1: (240, 56), 2: (240, 24), 3: (160, 32)}[self.compute_wgs]


def forward_configs(
    head_dim: int, value_dim: int, length: int, heads: int, alike: bool, from_table: bool, packed: bool, gpu: Gpu
) -> tuple[ForwardConfig, ...]:
    """Tiles for padded head dims of q, k and of v, multiples of 64; the first that fits shared memory is the best.

    `length`: T. `heads`: those of all batch entries. `alike`: all queries visit the same keys, and there is no score.
    `from_table`: the mask has arrays: blocks read from memory which keys they visit. `packed`: by segment ids, so that
    these may be few. The log is in benchmarks/NOTES.md.
    """
    Config, widest = ForwardConfig, max(head_dim, value_dim)
    small = Config(2, 64), Config(1, 64)
    if widest <= 64:
        if packed:  # 1.39 times as fast as three warpgroups, documents of 1024
            return _with_pairs(Config(2, takes_turns=True, head_section=16), (4, 2, 1, 0), length, heads, gpu), *small
        best = Config(3, pin_softmax=False, takes_turns=True, head_section=16)
        # Pairs spill registers under a causal mask, and lose; but all of a head is 1.05 times as fast at 1024 queries.
        whole = 960 < length <= 1024 and not alike and not from_table
        return _with_pairs(best, (3, 0) if whole else (0,), length, heads, gpu), Config(2, takes_turns=True), *small
    if widest > 128 and (value_dim > 128 or head_dim > 192):
        return small
    section = 1 if from_table else 8
    best = Config(2, takes_turns=True, head_section=section)
    if alike and widest <= 128:
        best = Config(2, q_in_registers=True, head_section=section)
    if from_table:  # documents of 1024: 1.10 times as fast with one pair as without, 1.18 with four
        pairs = 4, 2, 1, 0
    elif alike:  # without a mask: 1.07 at 1024 queries, 1.03 at 4096, 0.98 at 16384
        pairs = (1, 0) if length <= 8192 else (0,)
    else:  # causal: 1.08 with two pairs at 1024 queries, 1.04 at 2048, 1.00 at 4096
        pairs = (2, 1, 0) if length <= 2048 else (0,)
    return _with_pairs(best, pairs, length, heads, gpu), best, Config(2, pin_softmax=False), *small


def _with_pairs(config, choices, length, heads, gpu):
    """`config` with the one of these numbers of pairs that takes least time, if all blocks of queries take the same."""
    blocks = -(-length // config.block_q)

    def time(pairs):
        each = max(1, min(2 * pairs, blocks))
        rounds = -(-heads * -(-blocks // each) // gpu.multiprocessors)
        return rounds * (each + 0.25)  # to start a block of threads has cost a quarter of a block of queries

    return dataclasses.replace(config, pairs=min(choices, key=time))


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of one pass of the backward kernel.

    Each of `compute_wgs` warpgroups holds 64 positions of one sequence (keys, or queries for the pass of dQ alone),
    against `width` positions of the other at a time. `stages`: depths of the rings of the two operands that come with
    these (of queries and output gradients, or keys and values). `head_section`: as for the forward kernel. Of the fused
    pass: `ds_stages`: tiles of logit gradients in shared memory. `first_store`: sums of dQ start at what the first block
    stores that has something for them; else at zeros, all of which XLA writes before the kernel. `store_warps`: warps
    that store tiles of dQ, in turns, where all blocks go through the tiles in one order; with two, each has the time of
    two steps to see who was there before. `stagger`: how many tiles further on each block of keys starts than the one
    before, where there is no mask; blocks that add to one tile of dQ at a time wait for each other. `by_tile`: blocks of
    keys go through the query heads of a tile before the next tile, where `Plan.by_tile` says so; else head after head.
    """

    compute_wgs: int = 2
    width: int = 64
    stages: tuple[int, int] = (2, 2)
    ds_stages: int = 2
    head_section: int = 8
    first_store: bool = True
    store_warps: int = 2
    stagger: int = 0
    by_tile: bool = False

    def __post_init__(self):
        if self.compute_wgs not in (1, 2):
            raise ValueError(f"compute_wgs={self.compute_wgs} must be 1 or 2: a block has registers for no more.")
        if self.width not in (64, 128):
            raise ValueError(f"width={self.width} must be 64 or 128: two tiles of logits lie in registers.")
        if any(n not in (1, 2) for n in (*self.stages, self.ds_stages)):
            raise ValueError(f"stages={self.stages} and ds_stages={self.ds_stages} must be 1 or 2.")
        if self.store_warps not in (1, 2):
            raise ValueError(f"store_warps={self.store_warps} must be 1 or 2: a block has barriers for no more.")
        if self.stagger < 0:
            raise ValueError(f"stagger={self.stagger} must be at least 0, a number of tiles.")
        if self.head_section < 1:
            raise ValueError(f"head_section={self.head_section} must be at least 1.")

    @property
    def block(self) -> int:
        """Positions that a block of threads holds."""
        return 64 * self.compute_wgs

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the memory warpgroup; their sum must fit the pool at launch."""
        return {1: (240, 56), 2: (240, 24)}[self.compute_wgs]


def backward_configs(
    gives: tuple[str, ...], head_dim: int, value_dim: int, length: int, group: int, alike: bool, from_table: bool
) -> tuple[BackwardConfig, ...]:
    """Tiles of the pass that gives these gradients, for padded head dims of q, k and of v, multiples of 64.

    The first that fits shared memory is the best. Empty where the gradients don't fit a warpgroup's registers. `length`:
    S. `group`: query heads of a key head. `alike`: there is no mask. `from_table`: as for the forward kernel. The log is
    in benchmarks/NOTES.md.
    """
    Config = BackwardConfig
    small = Config(1, 64), Config(1, 64, ds_stages=1), Config(1, 64, (1, 1), 1)
    widest = max(head_dim, value_dim)
    if widest > 256 or (len(gives) > 1 and widest > 128):
        return ()
    if widest > 128:
        return Config(2, 64), Config(2, 64, (2, 1)), Config(1, 64, (2, 1)), Config(1, 64, (1, 1))
    # Measured, under a causal mask: with 8 query heads 1.05 to 1.24 times as fast; with 4, 0.95 at 1024 and 1.02 at 4096;
    # with 2, 0.96 at 4096.
    by_tile = group >= 8 or (group >= 4 and length >= 4096)
    if widest == 64 or len(gives) == 1:
        # Zeros cost the same however many blocks add to them; looking who was there costs each of them something.
        first_store = from_table or length <= (2048 if alike else 8192)
        section = 32 if widest == 64 else 8
        best = Config(2, 128, head_section=section, first_store=first_store, store_warps=1, by_tile=by_tile)
        return best, *((Config(2, 64),) if "dq" not in gives or len(gives) == 1 else ()), *small
    if head_dim == 128 or "dq" not in gives:
        section, warps = 16 if group > 1 else 8, 1 if from_table else 2
        stagger = 2 if length <= 8192 else 7  # 1.02 to 1.05 times as fast as 0; 7 is 0.99 of 2 at 8192, 1.03 at 16384
        best = Config(head_section=section, store_warps=warps, stagger=stagger, by_tile=by_tile)
        fewer = dict(ds_stages=1), dict(stages=(2, 1), ds_stages=1), dict(stages=(1, 1), ds_stages=1)
        return best, *(dataclasses.replace(best, **x) for x in fewer), *small
    return small


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles for one call, `config=` of `dot_product_attention`. None: those of the tables."""

    forward: ForwardConfig | None = None
    backward: BackwardConfig | None = None

    def __post_init__(self):
        for name, kind in (("forward", ForwardConfig), ("backward", BackwardConfig)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}={value!r} must be a {kind.__name__}, or None for the tables.")


def named_or(given: Any, direction: str, table: tuple[Any, ...]) -> tuple[Any, ...]:
    """The configuration of `given` (a Config or None) for "forward" or "backward", where there is one; else the table."""
    named = getattr(given, direction, None)
    return table if named is None else (named,)
