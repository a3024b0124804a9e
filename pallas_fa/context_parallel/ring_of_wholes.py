"""The hops of a ring in which whole blocks see whole blocks: without a mask, or with a causal one in zigzag order.

A device's own keys, in the first hop, then need the causal mask of the shard as it lies, for its second block comes later
than its first. Of keys from an earlier device, both blocks of queries see the first block; of keys from a later one, the
second block of queries sees both. That is half of a full problem either way, one kernel without a test of single logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa import masks, scores
from pallas_fa.context_parallel.bundle import bundle
from pallas_fa.context_parallel.ring import Ring
from pallas_fa.operands import intervals
from pallas_fa.operands.pytree import is_static_int
from pallas_fa.problem import Operands, Residuals
from pallas_fa.softmax.merging import Seen, merged

_UNROLLED = 4  # hops at most, so that the compiler sees what of the next can be under way; more would take more memory


def does(ring: Ring, operands: Operands) -> bool:
    """Whether the hops of `ring` are of this kind."""
    score, mask = operands.score, operands.mask
    if score is not None and not isinstance(score, scores.SoftCap):  # it may ask for positions
        return False
    dims = ring.problem.dims
    is_causal = isinstance(mask, masks.Causal) and is_static_int(mask.offset) and mask.offset == 0
    return mask is None or (is_causal and ring.placement == "zigzag" and dims.T == dims.S)


def forward(ring: Ring, attend: Callable[..., Any], operands: Operands) -> tuple[Any, Any]:
    """(out, lse) of this device's queries; `attend(problem, operands)`."""
    problem = ring.problem
    if ring.size == 1:
        return attend(problem, operands)
    keys, unbundle = bundle((operands.k, operands.v))
    keys = ring.rotate(keys)
    first = Seen(*attend(problem, operands))

    def one_hop(hop, keys):
        of_hop = _after_the_first(ring, operands, hop, unbundle(keys))
        return Seen(*attend(problem.with_operands(of_hop), of_hop))

    if ring.size <= _UNROLLED:  # merged at the end, all at once: each part is read once
        parts = [first]
        for hop in range(1, ring.size):
            keys, parts[-1] = _in_order((keys, parts[-1]))
            following = ring.rotate(keys) if hop < ring.size - 1 else None  # travels while this hop is computed
            parts.append(one_hop(hop, keys))
            keys = following
        out, lse = merged(*parts)
    else:

        def one_of_many(hop, carry):
            keys, seen = _in_order(carry)
            following = ring.rotate(keys)
            return following, merged(seen, one_hop(hop, keys))

        carry = keys, first._replace(out=first.out.astype(problem.acc_dtype))
        keys, seen = _in_order(lax.fori_loop(1, ring.size - 1, one_of_many, carry))
        out, lse = merged(seen, one_hop(ring.size - 1, keys))
    return out.astype(problem.dtype), lse


def backward(ring: Ring, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, Any, Any]:
    """The gradients of this device's shards of q, k and v."""
    operands, out, lse = residuals

    def gradients(operands, lse):
        return ring.gradients(ring.problem, Residuals(operands, out, lse), d_out, d_lse)

    own = operands.k, operands.v
    if ring.size == 1:
        return gradients(operands, lse)
    of_hop = lambda hop, keys, lse: gradients(_after_the_first(ring, operands, hop, keys), lse)
    # The own keys come last: under them the sums of the other devices travel home. The others' first travel under
    # nothing that is here; what comes before the backward may hide them.
    keys, unbundle_keys = bundle(own)
    d_q, d_keys = _of_other_keys(ring, ring.rotate(keys), unbundle_keys, lse, of_hop)
    sums, unbundle = bundle(d_keys)
    own, d_q, sums, lse = _in_order((own, d_q, sums, lse))
    k, v = own
    found = _added(ring, gradients(operands._replace(k=k, v=v), lse), d_q, unbundle(ring.rotate(sums)))
    d_q, d_k, d_v = (x.astype(ring.problem.dtype) for x in found)
    return d_q, d_k, d_v


def _of_other_keys(ring, keys, unbundle_keys, lse, of_hop):
    """(dq, (dk, dv)) of the hops after the first, whose keys come in `keys`; (dk, dv) are of the next device's keys.

    With `lse`, what is computed from it is tied to its hop.
    """
    keys, lse_here = _in_order((keys, lse))
    d_q, *d_keys = of_hop(1, unbundle_keys(keys), lse_here)
    if ring.size == 2:
        return d_q, tuple(d_keys)

    def after(hop, sent, unbundle, d_q):
        """((keys, sums of their gradients) that the next hop sends on, dq)."""
        sent, d_q, lse_here = _in_order((sent, d_q, lse))
        # The sums so far arrive while this hop's gradients are computed, and are added to them afterwards.
        arrived = ring.rotate(sent)
        keys, _ = unbundle(sent)
        following, d_keys = unbundle(arrived)
        d_q, *d_keys = _added(ring, of_hop(hop, unbundle_keys(keys), lse_here), d_q, d_keys)
        return (following, tuple(d_keys)), d_q

    to_send = ring.rotate(keys), tuple(d_keys)  # the keys travel while the first of these hops is computed
    if ring.size <= _UNROLLED:  # what are no sums yet stays in the dtype of the keys
        for hop in range(2, ring.size - 1):
            to_send, d_q = after(hop, *bundle(to_send), d_q)
    else:
        sent, unbundle = bundle((to_send[0], _widened(ring, d_keys)))

        def one_hop(hop, carry):
            to_send, d_q = after(hop, carry[0], unbundle, carry[1])
            return bundle(to_send)[0], d_q

        sent, d_q = lax.fori_loop(2, ring.size - 1, one_hop, (sent, *_widened(ring, [d_q])))
        to_send = unbundle(sent)
    keys, d_keys = to_send
    sums, unbundle = bundle(d_keys)
    keys, sums, d_q, lse_here = _in_order((keys, sums, d_q, lse))
    found = of_hop(ring.size - 1, unbundle_keys(keys), lse_here)
    d_q, *d_keys = _added(ring, found, d_q, unbundle(ring.rotate(sums)))
    return d_q, tuple(d_keys)


def _added(ring, found, d_q, d_keys):
    return tuple(a + b for a, b in zip(_widened(ring, found), (d_q, *d_keys), strict=True))


def _widened(ring, gradients):
    """In the dtype in which they are summed."""
    return tuple(x.astype(ring.problem.acc_dtype) for x in gradients)


def _in_order(carry):
    # Else, with the hops unrolled, XLA lets all keys travel before it computes anything.
    return lax.optimization_barrier(carry)


def _after_the_first(ring: Ring, operands: Operands, hop: Any, keys: tuple[Any, Any]) -> Operands:
    """The operands of a later hop, with its keys and values."""
    k, v = keys
    mask = None
    if operands.mask is not None:
        from_later = jnp.int32(lax.axis_index(ring.axis_name) < hop).reshape(1, 1, 1, 1)
        mask = _WholeBlocks(from_later, ring.problem.dims.T // 2)
    return operands._replace(k=k, v=v, mask=mask)


@dataclasses.dataclass(frozen=True)
class _WholeBlocks(masks.Mask):
    """What two blocks of queries see of two blocks of keys from another device.

    `from_later`: 1 where these come from a later device, else 0; int32 [1, 1, 1, 1]. `block`: their length.
    """

    from_later: Any
    block: int

    def allowed(self, b, n, t, s):
        return (t >= self.block) & (self.from_later > 0) | (s < self.block) & (self.from_later == 0)

    def kv_range(self, t_lo, t_hi):
        return 0, self._either(intervals.where(t_hi > self.block, 2 * self.block, 0), self.block)

    def full_kv_range(self, t_lo, t_hi):
        return 0, self._either(intervals.where(t_lo >= self.block, 2 * self.block, 0), self.block)

    def q_range(self, s_lo, s_hi):
        return self._either(self.block, 0), self._either(
            2 * self.block, intervals.where(s_lo < self.block, 2 * self.block, 0)
        )

    def full_q_range(self, s_lo, s_hi):
        return self._either(self.block, 0), self._either(
            2 * self.block, intervals.where(s_hi <= self.block, 2 * self.block, 0)
        )

    def _either(self, if_later, if_earlier):
        return jnp.where(self.from_later[..., 0] > 0, if_later, if_earlier)
