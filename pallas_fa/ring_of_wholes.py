"""The hops of a ring in which whole blocks see whole blocks: without a mask, or with a causal one in zigzag order.

Only a device's own keys, in the first hop, then need a mask, and it is the causal one of the shard as it lies: its second
block comes later than its first. Of keys from an earlier device, both blocks of queries see the first block; of keys from
a later one, the second block of queries sees both. So a hop is two full problems of a pair of blocks, the same on all
devices but for which blocks they take: no branch, no mask, the fastest kernels.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from pallas_fa import dispatch, masks, scores
from pallas_fa.dims import Dims
from pallas_fa.merging import Seen, merged
from pallas_fa.problem import Problem
from pallas_fa.pytree import is_static_int

if TYPE_CHECKING:
    from pallas_fa.ring import Ring

_UNROLLED = 8  # hops, so that the compiler sees what of the next can be under way


def does(ring: "Ring", score: Any, mask: Any, segments: Any) -> bool:
    """Whether the hops of `ring` are of this kind."""
    nowhere = score is None or isinstance(score, scores.SoftCap)  # a score that asks for no position
    if segments is not None or not nowhere:
        return False
    dims = ring.problem.dims
    is_causal = isinstance(mask, masks.Causal) and is_static_int(mask.offset) and mask.offset == 0
    return mask is None or (is_causal and ring.placement == "zigzag" and dims.T == dims.S)


def forward(ring: "Ring", attend: Callable[..., Any], q: Any, k: Any, v: Any, score: Any, mask: Any) -> tuple[Any, Any]:
    """(out, lse) of this device's queries; `attend(problem, q, k, v, score, mask)`."""
    problem, device = ring.problem, lax.axis_index(ring.axis_name)
    out, lse = attend(problem, q, k, v, score, mask)
    following = ring.rotate((k, v))
    pair = _problem_of_pair(problem, mask)

    def one_hop(hop, carry):
        (k, v), seen = carry
        following = ring.rotate((k, v))  # travels while this hop is computed
        if mask is None:
            return following, (merged(seen[0], Seen(*attend(pair, q, k, v, score, None))),)
        first, second = _Pair.of_hop(device, hop)
        one = Seen(*attend(pair, first.rows(q), first.keys(k), first.keys(v), score, None))
        two = Seen(*attend(pair, second.rows(q), second.keys(k), second.keys(v), score, None))
        later = merged(merged(seen[1], two), one.only_if(first.a == 1))
        return following, (merged(seen[0], one.only_if(first.a == 0)), later)

    whole = Seen(out.astype(problem.acc_dtype), lse)
    seen = (whole,) if mask is None else tuple(Seen(*(_block(x, i) for x in whole)) for i in range(2))
    _, seen = lax.fori_loop(1, ring.size, one_hop, (following, seen), unroll=ring.size <= _UNROLLED)
    out, lse = (jnp.concatenate(blocks, axis=1) for blocks in zip(*seen, strict=True))
    return out.astype(problem.dtype), lse


def backward(
    ring: "Ring", q: Any, k: Any, v: Any, score: Any, mask: Any, out: Any, lse: Any, d_out: Any, d_lse: Any
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of this device's shards."""
    problem, device = ring.problem, lax.axis_index(ring.axis_name)
    wide = lambda xs: tuple(x.astype(problem.acc_dtype) for x in xs)

    def gradients(problem, keys, rows, mask):
        q, *rest = rows
        backward = dispatch.choose(problem, ring.implementation).backward
        d_q, d_k, d_v, _ = backward(problem, q, *keys, score, mask, *rest)
        return wide((d_q, d_k, d_v))

    rows = q, out, lse, d_out, d_lse
    d_q, *d_keys = gradients(problem, (k, v), rows, mask)
    pair = _problem_of_pair(problem, mask)

    def one_hop(hop, carry):
        keys, d_keys, d_q = carry
        # The sums so far arrive while this hop's gradients are computed, and are added to them afterwards.
        following, d_keys = ring.rotate((keys, d_keys))
        if mask is None:
            found = gradients(pair, keys, rows, None)
            return following, tuple(a + b for a, b in zip(d_keys, found[1:], strict=True)), d_q + found[0]
        for which in _Pair.of_hop(device, hop):
            found = gradients(pair, tuple(map(which.keys, keys)), tuple(map(which.rows, rows)), None)
            d_q = _add_to_block(d_q, which.a, found[0])
            d_keys = tuple(_add_to_block(x, which.b, d) for x, d in zip(d_keys, found[1:], strict=True))
        return following, d_keys, d_q

    carry = ring.rotate((k, v)), tuple(d_keys), d_q
    _, d_keys, d_q = lax.fori_loop(1, ring.size, one_hop, carry, unroll=ring.size <= _UNROLLED)
    d_k, d_v = ring.rotate(d_keys, 1 - ring.size)  # home
    d_q, d_k, d_v = (x.astype(problem.dtype) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Block `a` of a device's queries with block `b` of the keys that it holds; numbers known at run time."""

    a: Any
    b: Any

    @classmethod
    def of_hop(cls, device: Any, hop: Any) -> "tuple[_Pair, _Pair]":
        """The pairs of hop > 0, under a causal mask in zigzag order."""
        from_later = jnp.int32(device < hop)
        return cls(from_later, 0), cls(1, from_later)

    def rows(self, x: Any) -> Any:
        return _block(x, self.a)

    def keys(self, x: Any) -> Any:
        return _block(x, self.b)


def _problem_of_pair(problem: Problem, mask) -> Problem:
    """What a hop after the first computes: all of a shard, or under the causal mask a pair of blocks."""
    dims, blocks = problem.dims, 1 if mask is None else 2
    return dataclasses.replace(problem, dims=Dims(dims.batch, dims.T // blocks, dims.S // blocks, dims.N), mask=None)


def _block(x, i):
    """One of the two blocks of a shard."""
    return lax.dynamic_slice_in_dim(x, i * (x.shape[1] // 2), x.shape[1] // 2, axis=1)


def _add_to_block(x, i, d):
    return lax.dynamic_update_slice_in_dim(x, _block(x, i) + d, i * (x.shape[1] // 2), axis=1)
