"""Attention in a ring of devices (Liu et al., arXiv 2310.01889): queries stay, keys and values go round.

In each hop a device attends to the keys that it holds, while these travel on to the next device; partial results are
merged by their log-sum-exp. The backward goes round in the same way: with the log-sum-exp of the whole row, each hop
gives its own share of every gradient, and those of keys and values travel with them.

Shards consist of contiguous blocks (placement.py), so a hop is one problem, or four, for a pair of blocks each, with the
mask and the score of the positions that the blocks have in the whole sequence. Pairs that the mask rules out are skipped
at run time; hops that it rules out on all devices, known while tracing, are left out. The usual cases need none of this
(ring_of_wholes.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa import masks
from pallas_fa.autodiff import by_rows, vjp
from pallas_fa.backends import reference
from pallas_fa.context_parallel import ring_of_wholes
from pallas_fa.context_parallel.ring import Ring, any_allowed, without_sharded_segments
from pallas_fa.masks.base import all_of
from pallas_fa.operands.part import Part
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays
from pallas_fa.softmax.merging import Seen, merged


class _Keys(NamedTuple):
    """What goes round: keys, values and segment ids, each in blocks."""

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    ids: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Block `a` of this device's queries with block `b` of the keys that it holds.

    `held` is its place in the arrays of masks and scores; `score` and `mask` are its own. `problem`: that of the ring.
    """

    a: int
    b: int
    held: Part
    problem: Problem
    score: Any
    mask: Any

    def operands(self, q: Any, k: Any, v: Any) -> Operands:
        """What attends to what."""
        return Operands(q, k, v, self.score, self.mask)

    def where_needed(self, fn: Callable[[Any], Any], x: Any) -> Any:
        """fn(x), or x where the mask rules out the whole pair."""
        if self.mask is None:
            return fn(x)
        return lax.cond(any_allowed(self.mask, *self.held.size[2:]), fn, lambda x: x, x)


def _pairs(ring: Ring, hop: Any, key_ids: Any, score: Any, mask: Any, query_ids: Any) -> Iterator[_Pair]:
    """The pairs of blocks of one hop."""
    size = ring.part_size
    T, S = size[2:]
    device = lax.axis_index(ring.axis_name)
    for a, t in enumerate(ring.starts(device, T)):
        for b, s in enumerate(ring.starts((device - hop) % ring.size, S)):
            held, place = Part((0, 0, a * T, s), size), Part((0, 0, t, s), size)
            part_score, moved_mask = (
                held.cut(tree).moved(place) if tree is not None else None for tree in (score, mask)
            )
            segments = masks.Segments(query_ids[a], key_ids[b]) if query_ids else None
            part_mask = all_of([m for m in (moved_mask, segments) if m is not None])
            yield _Pair(a, b, held, ring.problem, part_score, part_mask)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The ring as `autodiff` wants it."""

    ring: Ring

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        return _forward(self.ring, self.ring.attend, operands)

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        return _backward(self.ring, residuals, d_out, d_lse)

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """A ring of plain operations."""
        return _forward(self.ring, functools.partial(by_rows.attention, reference.attention), operands)


def attention(ring: Ring, operands: Operands) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]) of this device's queries.

    q, k, v are this device's shards. The arrays of masks and scores have its rows and all columns, but those of
    `with_sharded_segments`.
    """
    return vjp.attention(_Rules(ring), operands)


def _keys(ring, operands, segments):
    return _Keys(
        ring.split(operands.k, 1),
        ring.split(operands.v, 1),
        ring.split(segments.kv_ids, 3) if segments is not None else (),
    )


def _query_ids(ring, segments):
    return ring.split(segments.q_ids, 2) if segments is not None else ()


def _forward(ring, attend, operands):
    if ring_of_wholes.does(ring, operands):
        return ring_of_wholes.forward(ring, attend, operands)
    problem, (mask, segments) = ring.problem, without_sharded_segments(operands.mask)
    q, query_ids = ring.split(operands.q, 1), _query_ids(ring, segments)

    def one_hop(hop, carry):
        keys, seen = carry
        following = ring.rotate(keys)  # travels while this hop is computed
        seen = list(seen)
        for pair in _pairs(ring, hop, keys.ids, operands.score, mask, query_ids):
            see = functools.partial(_see, pair, attend, q[pair.a], keys.k[pair.b], keys.v[pair.b])
            seen[pair.a] = pair.where_needed(see, seen[pair.a])
        return following, tuple(seen)

    start = tuple(Seen.nothing((*x.shape[:3], problem.Hv), problem.acc_dtype) for x in q)
    _, seen = lax.fori_loop(0, ring.hops, one_hop, (_keys(ring, operands, segments), start))
    out, lse = (jnp.concatenate(blocks, axis=1) for blocks in zip(*seen, strict=True))
    return out.astype(problem.dtype), lse


def _see(pair, attend, q, k, v, seen):
    """What was `seen`, and the keys of a pair."""
    operands = pair.operands(q, k, v)
    return merged(seen, Seen(*attend(pair.problem.with_operands(operands), operands)))


class _Gradients(NamedTuple):
    """Sums of gradients, in the dtype of accumulation: of one pair of blocks, and of all float arrays of the score."""

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]


def _backward(ring, residuals, d_out, d_lse):
    operands, out, lse = residuals
    if ring_of_wholes.does(ring, operands):
        return ring_of_wholes.backward(ring, residuals, d_out, d_lse)
    mask, segments = without_sharded_segments(operands.mask)
    rows = list(zip(*(ring.split(x, 1) for x in (operands.q, out, lse, d_out, d_lse)), strict=True))
    query_ids, keys = _query_ids(ring, segments), _keys(ring, operands, segments)

    def one_hop(hop, carry):
        keys, d_keys, d_q, d_arrays = carry
        # The sums so far arrive while this hop's gradients are computed, and are added to them afterwards.
        following, (d_k, d_v) = ring.rotate((keys, d_keys))
        d_q, d_k, d_v = list(d_q), list(d_k), list(d_v)
        for pair in _pairs(ring, hop, keys.ids, operands.score, mask, query_ids):
            a, b = pair.a, pair.b
            add = functools.partial(_add_gradients, ring, pair, rows[a], keys.k[b], keys.v[b])
            d_q[a], d_k[b], d_v[b], d_arrays = pair.where_needed(add, _Gradients(d_q[a], d_k[b], d_v[b], d_arrays))
        return following, (tuple(d_k), tuple(d_v)), tuple(d_q), d_arrays

    arrays = float_arrays(operands.score)
    zeros = lambda blocks: tuple(jnp.zeros(x.shape, ring.problem.acc_dtype) for x in blocks)
    d_arrays = tuple(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)
    carry = keys, (zeros(keys.k), zeros(keys.v)), zeros(ring.split(operands.q, 1)), d_arrays
    _, d_keys, d_q, d_arrays = lax.fori_loop(0, ring.hops, one_hop, carry)
    d_k, d_v = ring.rotate(d_keys, 1 - ring.hops)  # home
    found = (*(jnp.concatenate(blocks, axis=1) for blocks in (d_q, d_k, d_v)), *d_arrays)
    return tuple(d.astype(x.dtype) for d, x in zip(found, operands.differentiable, strict=True))


def _add_gradients(ring, pair, rows, k, v, sums):
    """`sums` with the gradients of a pair; `rows`: q, and out, lse and their cotangents of the whole rows."""
    q, out, lse, d_out, d_lse = rows
    residuals = Residuals(pair.operands(q, k, v), out, lse)
    d_q, d_k, d_v, *d_arrays = ring.gradients(pair.problem, residuals, d_out, d_lse)
    arrays = tuple(pair.held.add(total, d) for total, d in zip(sums.arrays, d_arrays, strict=True))
    return _Gradients(sums.q + d_q, sums.k + d_k, sums.v + d_v, arrays)
