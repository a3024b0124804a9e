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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_fa import masks
from pallas_fa.autodiff import by_rows, vjp
from pallas_fa.backends import dispatch
from pallas_fa.context_parallel import placement, ring_of_wholes
from pallas_fa.masks.base import all_of
from pallas_fa.operands import intervals, manual_axes
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.problem import Problem, abstract
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax.merging import Seen, merged


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is static. `problem` has the sizes of one device's shards, and the mask and score of the whole problem.

    `mask` and `score` are bound to arrays with the rows of one device and all columns.
    """

    problem: Problem
    implementation: Any
    axis_name: Any
    size: int
    placement: placement.Placement

    def split(self, x: Any, axis: int) -> tuple[Any, ...]:
        """The blocks of a shard."""
        return tuple(jnp.split(x, placement.blocks_of(self.placement), axis))

    def rotate(self, tree: Any, hops: int = 1) -> Any:
        """The arrays of `tree` from the device that is `hops` places before this one."""
        if hops % self.size == 0:
            return tree
        pairs = [(i, (i + hops) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

    @property
    def part_size(self) -> tuple[int, int, int, int]:
        """(B, N, T, S) of a pair of blocks."""
        dims, blocks = self.problem.dims, placement.blocks_of(self.placement)
        return dims.B, dims.N, dims.T // blocks, dims.S // blocks

    def starts(self, device: Any, block: int) -> tuple[Any, ...]:
        """The positions in the whole sequence at which the blocks of `device` start."""
        return placement.starts(self.placement, device, self.size, block)

    @functools.cached_property
    def hops(self) -> int:
        """How many hops it takes until no device needs any more keys: all where that depends on arrays."""
        mask = self.problem.mask
        if mask is None or jax.tree.leaves(mask):
            return self.size
        T, S = self.part_size[2:]

        @functools.cache
        def needed(shift):  # without arrays, only the distance between the blocks matters
            with jax.ensure_compile_time_eval():
                return bool(_any_allowed(mask.moved(Part((0, 0, shift, 0), self.part_size)), T, S))

        def needed_by(device, hop):
            holder = (device - hop) % self.size
            return any(needed(t - s) for t in self.starts(device, T) for s in self.starts(holder, S))

        hops = self.size
        while hops > 1 and not any(needed_by(device, hops - 1) for device in range(self.size)):
            hops -= 1
        return hops


class _Keys(NamedTuple):
    """What goes round: keys, values and segment ids, each in blocks."""

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    ids: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Block `a` of this device's queries with block `b` of the keys that it holds.

    `held` is its place in the arrays of masks and scores; `score` and `mask` are its own.
    """

    a: int
    b: int
    held: Part
    problem: Problem
    score: Any
    mask: Any

    def where_needed(self, fn: Callable[[Any], Any], x: Any) -> Any:
        """fn(x), or x where the mask rules out the whole pair."""
        if self.mask is None:
            return fn(x)
        return lax.cond(_any_allowed(self.mask, *self.held.size[2:]), fn, lambda x: x, x)


def _any_allowed(mask, T, S):
    """Whether a mask of T queries and S keys lets any attend; conservative."""
    lo, hi = mask.kv_range(np.array([0]), np.array([T]))
    found = intervals.maximum(lo, 0) < intervals.minimum(hi, S)
    return found.any() if hasattr(found, "any") else found


def _pairs(ring: Ring, hop: Any, key_ids: Any, score: Any, mask: Any, query_ids: Any) -> Iterator[_Pair]:
    """The pairs of blocks of one hop."""
    size, dims = ring.part_size, ring.problem.dims
    T, S = size[2:]
    device = lax.axis_index(ring.axis_name)
    for a, t in enumerate(ring.starts(device, T)):
        for b, s in enumerate(ring.starts((device - hop) % ring.size, S)):
            held, place = Part((0, 0, a * T, s), size), Part((0, 0, t, s), size)
            part_score = score and held.cut(score).moved(place)
            found = [mask and held.cut(mask).moved(place), query_ids and masks.Segments(query_ids[a], key_ids[b])]
            part_mask = all_of([m for m in found if m])
            problem = dataclasses.replace(
                ring.problem,
                dims=Dims(dims.batch, T, S, dims.N),
                mask=abstract(part_mask),
                score=abstract(part_score),
            )
            yield _Pair(a, b, held, problem, part_score, part_mask)


_with_rules: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


@_with_rules
def _attention(ring: Ring, q: Any, k: Any, v: Any, score: Any, mask: Any, segments: Any) -> tuple[Any, Any]:
    return manual_axes.unchecked(functools.partial(_forward, ring, _chosen(ring)), q, k, v, score, mask, segments)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def attention(ring: Ring, q: Any, k: Any, v: Any, score: Any, mask: Any, segments: Any) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]) of this device's queries.

    q, k, v are this device's shards, and so are the arrays of `segments`, a bound `masks.Segments` or None. Jitted, since
    outside of any jit shard_map would run the hops one operation at a time.
    """
    return _attention(ring, *manual_axes.made_alike(q, k, v, score, mask, segments))


def _forward_rule(ring, *operands):
    out, lse = _attention(ring, *operands)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    return (out, lse), (*operands, out, lse)


def _backward_rule(ring, residuals, cotangents):
    score = residuals[3]
    dq, dk, dv, d_arrays = _gradients(ring, *residuals, *cotangents)
    return dq, dk, dv, vjp.score_gradient(score, d_arrays), None, None


_attention.defvjp(_forward_rule, _backward_rule)


@_with_rules
def _gradients(ring, *operands):
    return manual_axes.unchecked(functools.partial(_backward, ring), *operands)


def _gradients_forward(ring, *operands):
    *inputs, _out, _lse, d_out, d_lse = operands
    return _gradients(ring, *operands), (*inputs, d_out, d_lse)


def _gradients_backward(ring, residuals, cotangents):
    """As in vjp.py: a ring of plain operations, differentiated twice."""

    def pullback(q, k, v, score, mask, segments, d_out, d_lse, cotangents):
        def gradients(q, k, v, arrays, d_out, d_lse):
            def primal(q, k, v, arrays):
                return _forward(ring, by_rows.attention, q, k, v, with_float_arrays(score, arrays), mask, segments)

            return jax.vjp(primal, q, k, v, arrays)[1]((d_out, d_lse))

        return jax.vjp(gradients, q, k, v, float_arrays(score), d_out, d_lse)[1](cotangents)

    dq, dk, dv, d_arrays, dd_out, dd_lse = manual_axes.unchecked(pullback, *residuals, cotangents)
    d_score = vjp.score_gradient(residuals[3], d_arrays)
    return dq, dk, dv, d_score, None, None, None, None, dd_out, dd_lse


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _chosen(ring):
    """The forward of the implementation chosen for a pair."""
    return lambda problem, *operands: dispatch.choose(problem, ring.implementation).forward(problem, *operands)


def _keys(ring, k, v, segments):
    return _Keys(ring.split(k, 1), ring.split(v, 1), ring.split(segments.kv_ids, 3) if segments else ())


def _query_ids(ring, segments):
    return ring.split(segments.q_ids, 2) if segments else ()


def _forward(ring, attend, q, k, v, score, mask, segments):
    if ring_of_wholes.does(ring, score, mask, segments):
        return ring_of_wholes.forward(ring, attend, q, k, v, score, mask)
    problem = ring.problem
    q, query_ids = ring.split(q, 1), _query_ids(ring, segments)

    def one_hop(hop, carry):
        keys, seen = carry
        following = ring.rotate(keys)  # travels while this hop is computed
        seen = list(seen)
        for pair in _pairs(ring, hop, keys.ids, score, mask, query_ids):
            see = functools.partial(_see, pair, attend, q[pair.a], keys.k[pair.b], keys.v[pair.b])
            seen[pair.a] = pair.where_needed(see, seen[pair.a])
        return following, tuple(seen)

    start = tuple(Seen.nothing((*x.shape[:3], problem.Hv), problem.acc_dtype) for x in q)
    _, seen = lax.fori_loop(0, ring.hops, one_hop, (_keys(ring, k, v, segments), start))
    out, lse = (jnp.concatenate(blocks, axis=1) for blocks in zip(*seen, strict=True))
    return out.astype(problem.dtype), lse


def _see(pair, attend, q, k, v, seen):
    """What was `seen`, and the keys of a pair."""
    return merged(seen, Seen(*attend(pair.problem, q, k, v, pair.score, pair.mask)))


class _Gradients(NamedTuple):
    """Sums of gradients, in the dtype of accumulation: of one pair of blocks, and of all float arrays of the score."""

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]


def _backward(ring, q, k, v, score, mask, segments, out, lse, d_out, d_lse):
    if ring_of_wholes.does(ring, score, mask, segments):
        return *ring_of_wholes.backward(ring, q, k, v, score, mask, out, lse, d_out, d_lse), ()
    rows = list(zip(*(ring.split(x, 1) for x in (q, out, lse, d_out, d_lse)), strict=True))
    query_ids, keys = _query_ids(ring, segments), _keys(ring, k, v, segments)

    def one_hop(hop, carry):
        keys, d_keys, d_q, d_arrays = carry
        # The sums so far arrive while this hop's gradients are computed, and are added to them afterwards.
        following, (d_k, d_v) = ring.rotate((keys, d_keys))
        d_q, d_k, d_v = list(d_q), list(d_k), list(d_v)
        for pair in _pairs(ring, hop, keys.ids, score, mask, query_ids):
            a, b = pair.a, pair.b
            add = functools.partial(_add_gradients, pair, ring.implementation, rows[a], keys.k[b], keys.v[b])
            d_q[a], d_k[b], d_v[b], d_arrays = pair.where_needed(add, _Gradients(d_q[a], d_k[b], d_v[b], d_arrays))
        return following, (tuple(d_k), tuple(d_v)), tuple(d_q), d_arrays

    arrays = float_arrays(score)
    zeros = lambda blocks: tuple(jnp.zeros(x.shape, ring.problem.acc_dtype) for x in blocks)
    d_arrays = tuple(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)
    carry = keys, (zeros(keys.k), zeros(keys.v)), zeros(ring.split(q, 1)), d_arrays
    _, d_keys, d_q, d_arrays = lax.fori_loop(0, ring.hops, one_hop, carry)
    d_k, d_v = ring.rotate(d_keys, 1 - ring.hops)  # home
    d_q, d_k, d_v = (jnp.concatenate(blocks, axis=1).astype(ring.problem.dtype) for blocks in (d_q, d_k, d_v))
    return d_q, d_k, d_v, tuple(d.astype(x.dtype) for d, x in zip(d_arrays, arrays, strict=True))


def _add_gradients(pair, implementation, rows, k, v, sums):
    """`sums` with the gradients of a pair; `rows`: q, and out, lse and their cotangents of the whole rows."""
    q, out, lse, d_out, d_lse = rows
    chosen = dispatch.choose(pair.problem, implementation)
    d_q, d_k, d_v, d_arrays = chosen.backward(pair.problem, q, k, v, pair.score, pair.mask, out, lse, d_out, d_lse)
    arrays = tuple(pair.held.add(total, d) for total, d in zip(sums.arrays, d_arrays, strict=True))
    return _Gradients(sums.q + d_q, sums.k + d_k, sums.v + d_v, arrays)
