"""`decode_attention`: few queries, the same on all devices, against a cache that is sharded by sequence."""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_fa import masks
from pallas_fa.arguments.keywords import Arguments, with_signature
from pallas_fa.arguments.masks import segment_mask
from pallas_fa.arguments.settings import refuse_forward_mode
from pallas_fa.attention import run
from pallas_fa.context_parallel import checks
from pallas_fa.context_parallel import placement as placements
from pallas_fa.context_parallel.placement import Placement
from pallas_fa.masks import Lengths, Mask
from pallas_fa.masks.base import all_of
from pallas_fa.operands import diagonals, varying
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.layout import transpose
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import as_flag
from pallas_fa.problem import Operands, Problem, normalise
from pallas_fa.softmax.merging import PartialResult, merge


@overload
def decode_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement = "contiguous",
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> jax.Array: ...


@overload
def decode_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement = "contiguous",
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]: ...


@with_signature
def decode_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement = "contiguous",
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention of queries that all devices have to keys of which each device has a part.

    Split-KV over devices (flash-decoding, Dao et al., 2023). For use inside `jax.shard_map` (or `pmap`), with its checks on
    or off. Each of the R devices along `axis_name` attends to its 1/R of the cache. One all-gather of the partial results,
    T * N * (Hv + 1) numbers of a sequence from each device, is all that travels; every device merges them by their
    log-sum-exps, and has the result. A device whose part lies past the lengths, or behind a window, has nothing to read.

    Masks and scores see positions of keys in the whole cache, whose length is S. As in `dot_product_attention`, they count
    queries from position 0, and so do `is_causal` and `local_window_size`. Where the last query is the last position
    filled, pass the lengths, and `align="bottom_right"` to each: `mask=Causal(align="bottom_right")` for several queries,
    `score=Alibi(slopes, align="bottom_right")` for any number. Arguments that are not listed, and shape letters, are those
    of `dot_product_attention`.

    Args:
      query: [*B, T, N, H], the same on all devices along `axis_name`.
      key: [*B, S/R, K, H], this device's shard.
      value: [*B, S/R, K, Hv], this device's shard.
      bias: float, broadcastable to [*B, N, T, S]: the whole array, replicated, in the order of the sequence.
      mask: bool, broadcastable to [*B, N, T, S]: likewise; or a `pallas_fa.masks.Mask` of the whole problem.
      axis_name: the mesh axis, one name, over which the cache is sharded.
      placement: the order of the cache on the devices. "contiguous": device i holds the i-th of R shards. "zigzag": as in
        `ring_attention`, for a cache that such a prefill left.
      query_seq_lengths: int [*B].
      key_value_seq_lengths: int [*B], lengths of the whole sequences, the same on all devices.
      query_segment_ids: int [*B, T], those of all queries.
      key_value_segment_ids: int [*B, S/R], this device's shard.
      score: a `pallas_fa.scores.Score` of the whole problem.
      sinks: float [N] or [*B, N]; a sink counts once.

    Returns:
      out [*B, T, N, Hv], with `return_residual` (out, lse), lse [*B, T, N]: the same on all devices. Differentiable.

    Raises:
      ValueError, TypeError: an argument is wrong; raised while tracing.
      NotImplementedError: the named implementation cannot do the call; the message says why.
    """
    size = checks.axis_size(axis_name)
    placement = placements.check(placement)
    return_residual = as_flag("return_residual", return_residual)
    checks.require_shards(axis_name, key=key, value=value)
    whole = {name: x for name, x in arguments.items() if name != "key_value_segment_ids"}
    checks.require_replicated(axis_name, query=query, bias=bias, mask=mask, **whole)
    refuse_forward_mode(arguments)
    # Of the key segment ids each device has its shard. The arrays of other masks span all keys.
    ids = arguments.pop("query_segment_ids", None), arguments.pop("key_value_segment_ids", None)
    problem, operands = normalise(
        query, key, value, bias, mask, **arguments, whole=lambda d: Dims(d.batch, d.T, d.S * size, d.N)
    )
    dims = problem.dims
    checks.require_blocks(Dims(dims.batch, 0, dims.S, dims.N), size, placement)
    segments = segment_mask(dims, *ids)
    if segments is not None:
        segments = segments.bind(dims, Lengths())

    starts = placements.starts(placement, lax.axis_index(axis_name), size, dims.S // placements.blocks_of(placement))
    results = []
    for block, start in enumerate(starts):
        part = _block(problem, operands, segments, block, len(starts), start)
        out, lse = run(problem.with_operands(part), part, implementation)
        results.append(PartialResult(_flat_btnh(problem, out), lse.reshape(dims.B, *lse.shape[-2:])))
    out, lse = _merge_devices(results, axis_name, operands.sinks)
    out = transpose(problem.layout, out.astype(problem.dtype).reshape(*dims.batch, *out.shape[1:]))
    return (out, lse.reshape(*dims.batch, *lse.shape[1:])) if return_residual else out


def _block(
    problem: Problem, operands: Operands, segments: masks.Segments | None, block: int, blocks: int, start: Any
) -> Operands:
    """Returns the operands of one block of this device's keys, without the sinks, which belong to no block.

    Args:
      problem: that of this device's shards.
      operands: q, k and v of this device; mask, score and dropout of the whole problem.
      segments: bound to this device's shards, or None.
      block: the index of the block on this device.
      blocks: how many blocks a device holds.
      start: the position in the whole cache at which the block starts.
    """
    B, N, T, length = problem.dims.B, problem.dims.N, problem.dims.T, problem.dims.S // blocks
    part = Part((0, 0, 0, start), (B, N, T, length), diagonals.first(T, 0, T, start))
    score, mask = (None if x is None else part.cut(x).moved(part) for x in (operands.score, operands.mask))
    of_block = lambda x, axis: lax.slice_in_dim(x, block * length, (block + 1) * length, axis=axis)
    if segments is not None:
        own = masks.Segments(segments.q_ids, of_block(segments.kv_ids, 3))
        mask = all_of([own] if mask is None else [mask, own])
    k, v = (of_block(x, 1 if problem.layout == "BTNH" else 2) for x in (operands.k, operands.v))
    return Operands(operands.q, k, v, score, mask, dropout=operands.dropout and operands.dropout.moved(part))


def _flat_btnh(problem, out):
    """Returns out [*B, ...] in the problem's layout as [B, T, N, Hv]."""
    return transpose(problem.layout, out.reshape(problem.dims.B, *out.shape[-3:]))


def _merge_devices(results: list[PartialResult], axis_name: Hashable, sinks: Any) -> PartialResult:
    """Merges this device's `results` with those of the others, and with `sinks` [B|1, N, 1, 1] if given.

    One all-gather takes the place of a maximum and a sum over devices: such messages cost their latency.
    Decision record: context-parallel/decode-by-one-all-gather.
    """
    out, lse = merge(*results)
    travelling = jnp.concatenate([out, lse[..., None]], axis=-1)
    # Without JAX's checks each device gets 1/R of the cotangent of what is the same on all: summed, as from varying arrays.
    to = "invarying" if varying.is_checked(axis_name) else "varying"
    # Tiled: of the transpose of the other form, the `vmap` rule of JAX (0.11) misplaces the mapped dim.
    gathered = lax.all_gather(travelling[None], axis_name, tiled=True, to=to)
    results = [PartialResult(x[..., :-1], x[..., -1]) for x in gathered]
    if sinks is not None:
        results.append(PartialResult.empty(out.shape, out.dtype, sinks))
    return merge(*results)
