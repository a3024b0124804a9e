"""Hops of a ring in which whole query blocks attend to whole key blocks: no mask, or a causal one in zigzag placement.

In the first hop a device attends to its own keys. Its second block comes later in the sequence than its first, so an
ordinary causal mask of the shard is right. In later hops, both query blocks attend to the first key block of an earlier
device, or the second query block attends to both key blocks of a later device. Either is half of a full problem, which one
kernel computes without testing single logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa import masks, scores
from pallas_fa.context_parallel.bundle import bundle
from pallas_fa.context_parallel.ring import Ring
from pallas_fa.masks.base import Mask
from pallas_fa.operands import intervals
from pallas_fa.operands.intervals import Range
from pallas_fa.operands.pytree import is_static_int
from pallas_fa.problem import Operands, Residuals
from pallas_fa.softmax.merging import PartialResult, merge

# Rings of up to this size are unrolled, so that XLA schedules across hops; larger ones would take more memory.
# Decision record: context-parallel/unrolled-hops.
_UNROLLED = 4


def applies(ring: Ring, operands: Operands) -> bool:
    """Returns whether all hops of `ring` are of this kind."""
    score, mask = operands.score, operands.mask
    if operands.dropout is not None or not isinstance(score, scores.SoftCap | None):  # what may depend on positions
        return False
    dims = ring.problem.dims
    is_causal = isinstance(mask, masks.Causal) and is_static_int(mask.offset) and mask.offset == 0
    return mask is None or (is_causal and ring.placement == "zigzag" and dims.T == dims.S)


def forward(ring: Ring, attend: Callable[..., Any], operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], lse [B, T, N]) of this device's queries.

    Args:
      ring: all that is static.
      attend: attend(problem, operands) -> (out, lse) computes one hop.
      operands: this device's shards.
    """
    problem = ring.problem
    if ring.size == 1:
        return attend(problem, operands)
    keys, unbundle = bundle((operands.k, operands.v))
    keys = ring.rotate(keys)
    first = PartialResult(*attend(problem, operands))

    def later_hop(hop, keys):
        hop_operands = _later_operands(ring, operands, hop, unbundle(keys))
        return PartialResult(*attend(problem.with_operands(hop_operands), hop_operands))

    if ring.size <= _UNROLLED:
        # One merge at the end reads each partial result once. Decision record: context-parallel/merge-at-the-end.
        results = [first]
        for hop in range(1, ring.size):
            keys, results[-1] = _barrier((keys, results[-1]))
            next_keys = ring.rotate(keys) if hop < ring.size - 1 else None  # travels while this hop is computed
            results.append(later_hop(hop, keys))
            keys = next_keys
        out, lse = merge(*results)
    else:

        def loop_body(hop, carry):
            keys, result = _barrier(carry)
            next_keys = ring.rotate(keys)
            return next_keys, merge(result, later_hop(hop, keys))

        carry = keys, first._replace(out=first.out.astype(problem.acc_dtype))
        keys, result = _barrier(lax.fori_loop(1, ring.size - 1, loop_body, carry))
        out, lse = merge(result, later_hop(ring.size - 1, keys))
    return out.astype(problem.dtype), lse


def backward(ring: Ring, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, Any, Any]:
    """Returns the gradients of this device's shards of q, k and v.

    Args:
      ring: all that is static.
      residuals: this device's shards.
      d_out: cotangent of out [B, T, N, Hv].
      d_lse: cotangent of lse [B, T, N].
    """
    operands, out, lse = residuals

    def gradients(operands, lse):
        return ring.gradients(ring.problem, Residuals(operands, out, lse), d_out, d_lse)

    own_keys = operands.k, operands.v
    if ring.size == 1:
        return gradients(operands, lse)
    later_hop = lambda hop, keys, lse: gradients(_later_operands(ring, operands, hop, keys), lse)
    # A device's own keys come last: under their gradients, the sums for other devices' keys travel home. Nothing here hides
    # the first exchange of keys, but work before the backward may. Decision record: context-parallel/own-keys-last.
    keys, unbundle_keys = bundle(own_keys)
    d_q, d_keys = _later_hops(ring, ring.rotate(keys), unbundle_keys, lse, later_hop)
    sums, unbundle = bundle(d_keys)
    own_keys, d_q, sums, lse = _barrier((own_keys, d_q, sums, lse))
    k, v = own_keys
    total = _add(ring, gradients(operands._replace(k=k, v=v), lse), d_q, unbundle(ring.rotate(sums)))
    d_q, d_k, d_v = (x.astype(ring.problem.dtype) for x in total)
    return d_q, d_k, d_v


def _later_hops(ring, keys, unbundle_keys, lse, later_hop):
    """Returns (dq, (dk, dv)) summed over all hops but the first; dk and dv belong to the next device's keys.

    `keys` are those of the second hop. The barriers tie `lse`, and what is computed from it, to each hop.
    """
    keys, hop_lse = _barrier((keys, lse))
    d_q, *d_keys = later_hop(1, unbundle_keys(keys), hop_lse)
    if ring.size == 2:
        return d_q, tuple(d_keys)

    def middle_hop(hop, sent, unbundle, d_q):
        """Returns what the next hop sends, (keys, sums of their gradients), and dq."""
        sent, d_q, hop_lse = _barrier((sent, d_q, lse))
        # The sums so far arrive while this hop's gradients are computed, which are then added to them.
        received = ring.rotate(sent)
        keys, _ = unbundle(sent)
        next_keys, d_keys = unbundle(received)
        d_q, *d_keys = _add(ring, later_hop(hop, unbundle_keys(keys), hop_lse), d_q, d_keys)
        return (next_keys, tuple(d_keys)), d_q

    to_send = ring.rotate(keys), tuple(d_keys)  # the keys travel while the second hop is computed
    if ring.size <= _UNROLLED:  # gradients of a single hop travel in the dtype of the keys
        for hop in range(2, ring.size - 1):
            to_send, d_q = middle_hop(hop, *bundle(to_send), d_q)
    else:
        sent, unbundle = bundle((to_send[0], _to_acc_dtype(ring, d_keys)))

        def loop_body(hop, carry):
            to_send, d_q = middle_hop(hop, carry[0], unbundle, carry[1])
            return bundle(to_send)[0], d_q

        sent, d_q = lax.fori_loop(2, ring.size - 1, loop_body, (sent, *_to_acc_dtype(ring, [d_q])))
        to_send = unbundle(sent)
    keys, d_keys = to_send
    sums, unbundle = bundle(d_keys)
    keys, sums, d_q, hop_lse = _barrier((keys, sums, d_q, lse))
    gradients = later_hop(ring.size - 1, unbundle_keys(keys), hop_lse)
    d_q, *d_keys = _add(ring, gradients, d_q, unbundle(ring.rotate(sums)))
    return d_q, tuple(d_keys)


def _add(ring, gradients, d_q, d_keys):
    """Returns the sums d_q and d_keys plus the gradients (dq, dk, dv) of one hop."""
    sums = _to_acc_dtype(ring, (d_q, *d_keys))
    return tuple(a + b for a, b in zip(_to_acc_dtype(ring, gradients), sums, strict=True))


def _to_acc_dtype(ring, gradients):
    return tuple(x.astype(ring.problem.acc_dtype) for x in gradients)


def _barrier(carry):
    # Without it, XLA schedules all exchanges of unrolled hops before it computes anything.
    return lax.optimization_barrier(carry)


def _later_operands(ring: Ring, operands: Operands, hop: Any, keys: tuple[Any, Any]) -> Operands:
    """Returns the operands of a hop after the first, whose keys and values are `keys`."""
    k, v = keys
    mask = None
    if operands.mask is not None:
        from_later = jnp.int32(lax.axis_index(ring.axis_name) < hop).reshape(1, 1, 1, 1)
        mask = _WholeBlocks(from_later, ring.problem.dims.T // 2)
    return operands._replace(k=k, v=v, mask=mask, sinks=None)  # the first hop has counted the sinks


@dataclasses.dataclass(frozen=True)
class _WholeBlocks(Mask):
    """The causal mask of two query blocks against two key blocks from another device, in zigzag placement.

    Attributes:
      from_later: int32 [1, 1, 1, 1]; 1 if the keys come from a later device, else 0.
      block: the length of a block.
    """

    from_later: Any
    block: int

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        return (t >= self.block) & (self.from_later > 0) | (s < self.block) & (self.from_later == 0)

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return 0, self._select(intervals.where(t_hi > self.block, 2 * self.block, 0), self.block)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return 0, self._select(intervals.where(t_lo >= self.block, 2 * self.block, 0), self.block)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._select(self.block, 0), self._select(
            2 * self.block, intervals.where(s_lo < self.block, 2 * self.block, 0)
        )

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._select(self.block, 0), self._select(
            2 * self.block, intervals.where(s_hi <= self.block, 2 * self.block, 0)
        )

    def _select(self, if_later, if_earlier):
        return jnp.where(self.from_later[..., 0] > 0, if_later, if_earlier)
