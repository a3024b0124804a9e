"""Ring attention: queries stay, and keys and values travel round the devices of a ring (Liu et al., arXiv 2310.01889).

In each hop a device attends to the keys that it holds, while they travel on to the next device. Partial results merge by
their log-sum-exp. In the backward each hop recomputes its probabilities from the log-sum-exp of whole rows, and adds to all
gradients; the sums of key and value gradients travel with the keys.

A shard consists of contiguous blocks (placement.py). A hop computes each pair of a query block and a key block as a problem
of its own, with the mask and score at the blocks' global positions. Pairs that the mask rules out are skipped at run time.
Hops that it rules out on all devices are left out, if that is known while tracing. The usual masks need no pairs
(whole_blocks.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa import masks
from pallas_fa.autodiff import recompute_by_rows, vjp
from pallas_fa.backends import reference
from pallas_fa.context_parallel import whole_blocks
from pallas_fa.context_parallel.ring import Ring, any_allowed, without_sharded_segments
from pallas_fa.masks.base import all_of
from pallas_fa.operands import diagonals
from pallas_fa.operands.part import Part
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays
from pallas_fa.softmax import sinks
from pallas_fa.softmax.merging import PartialResult, merge


class _KeyBlocks(NamedTuple):
    """What travels round the ring: keys, values and segment ids, each in blocks."""

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    ids: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _BlockPair:
    """A query block of this device, and a block of the keys that it holds in one hop.

    Attributes:
      query_block: the index of the query block.
      key_block: the index of the key block.
      array_part: the part of the arrays of masks and scores that belongs to the pair.
      problem: that of the ring.
      score: bound to the pair.
      mask: bound to the pair.
      dropout: bound to the pair.
    """

    query_block: int
    key_block: int
    array_part: Part
    problem: Problem
    score: Any
    mask: Any
    dropout: Any

    def operands(self, q: Any, k: Any, v: Any) -> Operands:
        """Returns the operands of the pair; q, k and v are its blocks."""
        return Operands(q, k, v, self.score, self.mask, dropout=self.dropout)

    def unless_skipped(self, fn: Callable[[Any], Any], x: Any) -> Any:
        """Returns fn(x), or x where the mask rules out the whole pair."""
        if self.mask is None:
            return fn(x)
        return lax.cond(any_allowed(self.mask, *self.array_part.size[2:]), fn, lambda x: x, x)


def _block_pairs(
    ring: Ring, hop: Any, key_ids: Any, operands: Operands, mask: Any, query_ids: Any
) -> Iterator[_BlockPair]:
    """Yields the pairs of blocks of one hop."""
    size = ring.part_size
    T, S = size[2:]
    device = lax.axis_index(ring.axis_name)
    for a, t in enumerate(ring.starts(device, T)):
        for b, s in enumerate(ring.starts((device - hop) % ring.size, S)):
            # Arrays have this device's rows, and all columns; or they span all diagonals.
            diagonal = diagonals.first(ring.problem.dims.T * ring.size, t, T, s)
            array_part, global_part = Part((0, 0, a * T, s), size, diagonal), Part((0, 0, t, s), size)
            pair_score, moved_mask = (
                array_part.cut(tree).moved(global_part) if tree is not None else None for tree in (operands.score, mask)
            )
            segments = masks.Segments(query_ids[a], key_ids[b]) if query_ids else None
            pair_mask = all_of([m for m in (moved_mask, segments) if m is not None])
            dropout = operands.dropout and operands.dropout.moved(global_part)
            yield _BlockPair(a, b, array_part, ring.problem, pair_score, pair_mask, dropout)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """Ring attention as the rules that `autodiff` takes."""

    ring: Ring

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        return _forward(self.ring, self.ring.attend, operands)

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        operands, out, lse = residuals
        if operands.sinks is None:
            return _backward(self.ring, residuals, d_out, d_lse)
        # Sinks belong to no hop: each has the log-sum-exp of whole rows, with them.
        gradients = _backward(self.ring, residuals._replace(operands=operands._replace(sinks=None)), d_out, d_lse)
        # In padding out is 0, and d_out may be NaN.
        products = jnp.where(out == 0, 0, out.astype(lse.dtype) * d_out.astype(lse.dtype))
        return *gradients, sinks.gradient(operands.sinks, lse, products.sum(axis=-1) - d_lse)

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        return _forward(self.ring, functools.partial(recompute_by_rows.attention, reference.attention), operands)


def attention(ring: Ring, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], lse [B, T, N]) of this device's queries.

    q, k and v of `operands` are this device's shards. The arrays of its mask and score have this device's rows and all
    columns, except those of `with_sharded_segments`.
    """
    return vjp.attention(_Rules(ring), operands)


def _key_blocks(ring, operands, segments):
    return _KeyBlocks(
        ring.split(operands.k, 1),
        ring.split(operands.v, 1),
        ring.split(segments.kv_ids, 3) if segments is not None else (),
    )


def _query_ids(ring, segments):
    return ring.split(segments.q_ids, 2) if segments is not None else ()


def _forward(ring, attend, operands):
    if whole_blocks.applies(ring, operands):
        return whole_blocks.forward(ring, attend, operands)
    problem, (mask, segments) = ring.problem, without_sharded_segments(operands.mask)
    q, query_ids = ring.split(operands.q, 1), _query_ids(ring, segments)

    def one_hop(hop, carry):
        keys, results = carry
        next_keys = ring.rotate(keys)  # travels while this hop is computed
        results = list(results)
        for pair in _block_pairs(ring, hop, keys.ids, operands, mask, query_ids):
            a, b = pair.query_block, pair.key_block
            add_pair = functools.partial(_merge_pair, pair, attend, q[a], keys.k[b], keys.v[b])
            results[a] = pair.unless_skipped(add_pair, results[a])
        return next_keys, tuple(results)

    shapes = ((*x.shape[:3], problem.Hv) for x in q)
    empty = tuple(PartialResult.empty(shape, problem.acc_dtype, operands.sinks) for shape in shapes)
    _, results = lax.fori_loop(0, ring.hops, one_hop, (_key_blocks(ring, operands, segments), empty))
    out, lse = (jnp.concatenate(blocks, axis=1) for blocks in zip(*results, strict=True))
    return out.astype(problem.dtype), lse


def _merge_pair(pair, attend, q, k, v, result):
    """Returns `result`, merged with attention of one pair of blocks."""
    operands = pair.operands(q, k, v)
    return merge(result, PartialResult(*attend(pair.problem.with_operands(operands), operands)))


class _Gradients(NamedTuple):
    """Gradient sums, in the dtype of accumulation: of the blocks of one pair, and of all float arrays of the score."""

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]


def _backward(ring, residuals, d_out, d_lse):
    operands, out, lse = residuals
    if whole_blocks.applies(ring, operands):
        return whole_blocks.backward(ring, residuals, d_out, d_lse)
    mask, segments = without_sharded_segments(operands.mask)
    rows = list(zip(*(ring.split(x, 1) for x in (operands.q, out, lse, d_out, d_lse)), strict=True))
    query_ids, keys = _query_ids(ring, segments), _key_blocks(ring, operands, segments)

    def one_hop(hop, carry):
        keys, d_keys, d_q, d_arrays = carry
        # The sums so far arrive while this hop's gradients are computed, which are then added to them.
        next_keys, (d_k, d_v) = ring.rotate((keys, d_keys))
        d_q, d_k, d_v = list(d_q), list(d_k), list(d_v)
        for pair in _block_pairs(ring, hop, keys.ids, operands, mask, query_ids):
            a, b = pair.query_block, pair.key_block
            add_pair = functools.partial(_add_gradients, ring, pair, rows[a], keys.k[b], keys.v[b])
            sums = _Gradients(d_q[a], d_k[b], d_v[b], d_arrays)
            d_q[a], d_k[b], d_v[b], d_arrays = pair.unless_skipped(add_pair, sums)
        return next_keys, (tuple(d_k), tuple(d_v)), tuple(d_q), d_arrays

    arrays = float_arrays(operands.score)
    zeros = lambda blocks: tuple(jnp.zeros(x.shape, ring.problem.acc_dtype) for x in blocks)
    d_arrays = tuple(jnp.zeros(x.shape, np.promote_types(x.dtype, np.float32)) for x in arrays)
    carry = keys, (zeros(keys.k), zeros(keys.v)), zeros(ring.split(operands.q, 1)), d_arrays
    _, d_keys, d_q, d_arrays = lax.fori_loop(0, ring.hops, one_hop, carry)
    d_k, d_v = ring.rotate(d_keys, 1 - ring.hops)  # back to the device that holds these keys
    gradients = (*(jnp.concatenate(blocks, axis=1) for blocks in (d_q, d_k, d_v)), *d_arrays)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, operands.differentiable, strict=True))


def _add_gradients(ring, pair, rows, k, v, sums):
    """Returns `sums` plus the gradients of one pair; `rows` are q, out, lse and the cotangents of the query block."""
    q, out, lse, d_out, d_lse = rows
    residuals = Residuals(pair.operands(q, k, v), out, lse)
    d_q, d_k, d_v, *d_arrays = ring.gradients(pair.problem, residuals, d_out, d_lse)
    arrays = tuple(pair.array_part.add(total, d) for total, d in zip(sums.arrays, d_arrays, strict=True))
    add = lambda total, d: total + d.astype(total.dtype)
    return _Gradients(add(sums.q, d_q), add(sums.k, d_k), add(sums.v, d_v), arrays)
