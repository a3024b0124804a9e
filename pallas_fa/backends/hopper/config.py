"""Tiles of the kernels: what `config=` of `dot_product_attention` may name, and what the tables choose from."""

import dataclasses

from pallas_fa.backends.gpu.config_types import check_types


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tiles of the forward kernel.

    Args:
      compute_wgs: compute warpgroups of a CTA (a CUDA thread block); each holds 64 queries.
      block_kv: keys of a key block, a multiple of 16.
      stages: depth of the rings of K and V.
      l2_head_group: heads whose CTAs run concurrently, so that their keys and values stay in the L2 cache; the CTAs with
        the most work first. It applies where there is a mask.
      pin_softmax: stores a statistic of the softmax in each step. Nothing reads it: the store stops ptxas from sinking what
        it depends on below the wait for P V. It is the row sums, and so all exponentials; with rescale_under_qk the
        maximum (evidence: forward/pin-the-softmax).
      q_block_pairs: pairs of query blocks per CTA; 0: a single block. Each block's loads overlap the epilogue of the
        block before.
      ping_pong: the warpgroups issue their matmuls alternately, so that one's softmax overlaps the other's matmuls
        (evidence: forward/ping-pong).
      q_in_registers: queries are an operand in registers, not in shared memory.
      kv_splits: parts of the keys of a query block, each with a CTA of its own; the partial results are merged. For calls
        that would not fill the GPU: of up to 16 queries, or of more with `split_heads`.
      split_heads: the last heads, of all batch entries counted together, whose keys are in parts: of the last entry alone,
        or of whole entries (evidence: forward/split-heads). 0: all, which is for up to 16 queries without dropout.
      persistent_ctas: CTAs that process what else a CTA each would, one after the other: the loads of each block overlap the
        epilogue of the block before, of another head too. 0: none.
      by_tickets: such a CTA takes the first block that none has begun; else blocks are dealt out in turn, as they are where
        queries are few and under `jax.vmap` (evidence: forward/by-tickets).
      rescale_under_qk: the sums of P V are rescaled to a new maximum while the tensor cores compute the next Q K^T; else
        after the wait for P V, while they may be idle (evidence: forward/rescale-under-qk).
      out_chunks: chunks of the output's rows, of at most 128 bytes, that have shared memory at a time, where a CTA processes
        several query blocks. They are stored in turns, and the rest of that memory is free for longer key blocks. 0: all
        chunks (evidence: forward/output-in-turns).
      grouped_rows: the query heads of a key head are the rows of a query block, and its key blocks are counted from the
        first key that it sees. For windows (evidence: forward/grouped-rows).
    """

    compute_wgs: int = 2
    block_kv: int = 128
    stages: int = 2
    l2_head_group: int = 8
    pin_softmax: bool = True
    q_block_pairs: int = 0
    ping_pong: bool = False
    q_in_registers: bool = False
    kv_splits: int = 1
    split_heads: int = 0
    persistent_ctas: int = 0
    by_tickets: bool = False
    rescale_under_qk: bool = False
    out_chunks: int = 0
    grouped_rows: bool = False

    def __post_init__(self):
        check_types(self)
        if self.compute_wgs not in (1, 2, 3):
            raise ValueError(f"compute_wgs={self.compute_wgs} must be 1, 2 or 3: a CTA has registers for no more.")
        if not 64 <= self.block_kv <= 256 or self.block_kv % 16:
            raise ValueError(
                f"block_kv={self.block_kv} must be a multiple of 16 from 64 to 256, which a matmul instruction takes."
            )
        if self.stages < 1:
            raise ValueError(f"stages={self.stages} must be at least 1.")
        if self.q_block_pairs < 0:
            raise ValueError(f"q_block_pairs={self.q_block_pairs} must be at least 0, for single query blocks.")
        if self.l2_head_group < 1:
            raise ValueError(f"l2_head_group={self.l2_head_group} must be at least 1.")
        if not 1 <= self.kv_splits <= 64:
            raise ValueError(f"kv_splits={self.kv_splits} must be from 1, for keys in one part, to 64.")
        if self.split_heads < 0:
            raise ValueError(f"split_heads={self.split_heads} must be at least 0, for no heads.")
        if self.split_heads and self.kv_splits == 1:
            raise ValueError(f"split_heads={self.split_heads} needs keys in parts, and kv_splits is 1.")
        if self.persistent_ctas < 0:
            raise ValueError(f"persistent_ctas={self.persistent_ctas} must be at least 0, for a CTA for each block.")
        if self.out_chunks < 0:
            raise ValueError(f"out_chunks={self.out_chunks} must be at least 0, for memory for all of the output.")

    @property
    def block_q(self) -> int:
        """Queries of a query block."""
        return 64 * self.compute_wgs

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the load warpgroup; their sum must fit the pool at launch."""
        return {1: (240, 56), 2: (240, 24), 3: (160, 32)}[self.compute_wgs]


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of one pass of the backward kernel.

    A CTA holds a block of one sequence, the stationary one, and loops over tiles of the other, the streamed one: keys and
    queries, or queries and keys in the pass for dQ alone. `ds_stages`, `first_store`, `store_warps`, `stagger`, `by_tile`,
    `p_before_dp` and `dk_last` are for a pass that adds dQ up.

    Args:
      compute_wgs: compute warpgroups of a CTA; each holds 64 stationary positions.
      width: positions of a streamed tile.
      stages: depths of the rings of the two streamed operands (queries and output gradients, or keys and values).
      ds_stages: tiles of logit gradients in shared memory.
      l2_head_group: as for the forward kernel; of key heads in parts, parts.
      first_store: sums of dQ start at what the first CTA stores that has something for them; else at zeros, which XLA
        writes before the kernel.
      store_warps: warps that store tiles of dQ, alternately, where all CTAs visit the tiles in one order. With two, each
        has the time of two steps to learn whether its CTA is the first.
      stagger: where there is no mask, how many tiles further on each CTA starts than the one before. CTAs that add to the
        same tile of dQ serialise.
      by_tile: CTAs process the query heads of a tile before the next tile, where `Order.by_tile` says so; else head after
        head.
      statistics_last: row statistics are added to the results of the matmuls, which need not wait for them; else
        accumulators start at them. Where no element is tested for padding.
      p_before_dp: P is rounded, and the matmul for dV issued, before that for dP, so that registers hold one tile of logits
        in float32; the matmul for dK takes dS from shared memory. For a pass that gives all three gradients, where
        `BackwardPlan.p_before_dp` says so (evidence: backward/one-pass-at-192).
      dk_last: a step's matmul for dK is issued once its tile of dQ is staged; else before, and it is under way meanwhile
        (evidence: backward/dk-matmul-last).
      chunk_slots: 0: operands are streamed as whole tiles. Else the one of them that only products for logits read passes
        through a ring of so many chunks of 64 columns, and the compute warpgroups hold the same 64 stationary positions and
        share the columns of their gradient, for head dims past 256 (evidence: backward/wide-heads).
      persistent_ctas: CTAs that process key blocks one after the other: the loads of each overlap the block before. 0: a CTA
        for each block. For passes that hold keys, without `chunk_slots`.
      by_tickets: such a CTA takes the first block that none has begun; else blocks are dealt out in turn.
      head_parts: parts of the query heads of a key head, each with CTAs of its own, whose gradients of keys and values XLA
        adds up. For calls whose blocks of keys do not fill the GPU. A divisor of the number of these heads; for passes that
        hold keys.
      by_gradient: the two compute warpgroups hold the same 64 keys, and one adds to dV, the other to dK. For a pass that
        gives these two, where `BackwardPlan.by_gradient` says so: head dims up to 256 (evidence: backward/by-gradient). The
        rings of the pass for dQ are less deep where `stages` do not fit it.
      ping_pong: the warpgroups issue the matmuls of their logits alternately, as for the forward kernel. For the pass for
        dQ alone (evidence: backward/score-derivative).
    """

    compute_wgs: int = 2
    width: int = 64
    stages: tuple[int, int] = (2, 2)
    ds_stages: int = 2
    l2_head_group: int = 8
    first_store: bool = True
    store_warps: int = 2
    stagger: int = 0
    by_tile: bool = False
    statistics_last: bool = False
    p_before_dp: bool = False
    dk_last: bool = False
    chunk_slots: int = 0
    persistent_ctas: int = 0
    by_tickets: bool = False
    head_parts: int = 1
    by_gradient: bool = False
    ping_pong: bool = False

    def __post_init__(self):
        check_types(self)
        if self.compute_wgs not in (1, 2):
            raise ValueError(f"compute_wgs={self.compute_wgs} must be 1 or 2: a CTA has registers for no more.")
        if self.width not in (64, 128):
            raise ValueError(f"width={self.width} must be 64 or 128: two tiles of logits lie in registers.")
        if any(n not in (1, 2) for n in (*self.stages, self.ds_stages)):
            raise ValueError(f"stages={self.stages} and ds_stages={self.ds_stages} must be 1 or 2.")
        if self.chunk_slots not in (0, 2, 4):
            raise ValueError(f"chunk_slots={self.chunk_slots} must be 0, 2 or 4: a CTA has barriers for no more.")
        if self.chunk_slots and self.stages[0] != self.stages[1]:
            raise ValueError(f"stages={self.stages} must be equal with chunk_slots={self.chunk_slots}.")
        if self.store_warps not in (1, 2):
            raise ValueError(f"store_warps={self.store_warps} must be 1 or 2: a CTA has barriers for no more.")
        if self.stagger < 0:
            raise ValueError(f"stagger={self.stagger} must be at least 0, a number of tiles.")
        if self.l2_head_group < 1:
            raise ValueError(f"l2_head_group={self.l2_head_group} must be at least 1.")
        if self.persistent_ctas < 0:
            raise ValueError(f"persistent_ctas={self.persistent_ctas} must be at least 0, for a CTA for each block.")
        if self.by_gradient and (self.compute_wgs != 2 or self.chunk_slots):
            raise ValueError(
                f"by_gradient=True needs compute_wgs=2 and chunk_slots=0, and they are {self.compute_wgs} and"
                f" {self.chunk_slots}."
            )
        if self.head_parts < 1:
            raise ValueError(f"head_parts={self.head_parts} must be at least 1, for all query heads in one part.")

    @property
    def rows(self) -> int:
        """Stationary positions of a warpgroup."""
        return 64

    @property
    def row_groups(self) -> int:
        """Groups of warpgroups that hold the same positions."""
        return 1 if self.chunk_slots or self.by_gradient else self.compute_wgs

    @property
    def block(self) -> int:
        """Stationary positions of a CTA."""
        return self.rows * self.row_groups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the memory warpgroup; their sum must fit the pool at launch."""
        return {1: (240, 56), 2: (240, 24)}[self.compute_wgs]


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles for one call, `config=` of `dot_product_attention`. None: those of the tables."""

    forward: ForwardConfig | None = None
    backward: BackwardConfig | None = None

    def __post_init__(self):
        for name, kind in (("forward", ForwardConfig), ("backward", BackwardConfig)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}={value!r} must be a {kind.__name__} of pallas_fa.mosaic_gpu.config, or None.")
