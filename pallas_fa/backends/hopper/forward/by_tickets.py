"""The query blocks that a CTA takes by tickets: the warp of keys takes them, and passes their numbers on in a ring."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import tickets
from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.hopper.forward.plan import ForwardPlan

# Who processes blocks: a warpgroup that computes, the warp that loads keys, or the one that loads values.
Caller = Literal["compute", "keys", "values"]
_SLOTS = 2


def scratch(plan: ForwardPlan) -> dict[str, Any]:
    """Returns the shared memory and the barriers of the ring."""
    barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=_SLOTS)
    others = plan.config.compute_wgs + 1
    return dict(ticket_free=barrier(others), ticket_ready=barrier(1), ticket_smem=plgpu.SMEM((_SLOTS,), jnp.int32))


def with_counter(call: Callable[[Any], tuple[Any, ...]], out_type: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns call(the counter of `tickets`, a ref), arrays of `out_type`.

    The ref is known to nothing outside, which `jax.checkpoint` in `lax.scan` and `jax.jvp` ask for.
    """

    def in_place(refs):
        counter, *results = refs
        for ref, result in zip(results, call(counter), strict=True):
            ref[...] = result

    start = jnp.zeros((1,), jnp.int32)
    return tuple(pl.run_state(in_place)([start, *(jnp.zeros(x.shape, x.dtype) for x in out_type)])[1:])


def unless_mapped(call: Callable[[Any], Any], dealt_out: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `call`, in place of which `jax.vmap` maps `dealt_out`: `run_state` of `with_counter` can't be mapped."""
    run = custom_vmap(call)

    @run.def_vmap
    def _(axis_size, is_mapped, operands):
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, is_mapped[0])
        results = jax.vmap(dealt_out, (axes,), axis_size=axis_size)(operands)
        return results, jax.tree.map(lambda _: True, results)

    return run


def for_places(
    plan: ForwardPlan, gmem: Any, scratch: dict[str, Any], body: Callable[..., tuple[Any, Any]], caller: Caller
) -> tuple[Any, Any]:
    """Calls body(number of a place, *sums) -> the sums after it, for each place of this CTA; returns the last sums."""
    ring, zero = _Ring(plan, scratch), jnp.int32(0)
    if caller != "keys":
        in_warp = caller == "values"

        def follow(number, i, *sums):
            sums = body(number, *sums)
            return ring.next(i + 1), i + 1, *sums

        return tuple(tickets.while_blocks(plan.places, follow, ring.next(zero), *(zero,) * 3, in_warp=in_warp)[2:])

    def take(number, i, *sums):
        ring.pass_on(number, i)
        sums = body(number, *sums)
        return tickets.take(gmem.tickets, number, plan.ctas, plan.interpret), i + 1, *sums

    first = lax.axis_index(AXIS)
    number, i, *sums = tickets.while_blocks(plan.places, take, first, *(zero,) * 3, in_warp=True)
    ring.pass_on(number, i)  # by which the others see that there is no other block
    ring.drain()
    return tuple(sums)


class _Ring:
    """The numbers of the last places that were taken, `i` of them before."""

    def __init__(self, plan, scratch):
        self.plan, self.free, self.ready, self.smem = plan, *(scratch[f"ticket_{x}"] for x in ("free", "ready", "smem"))

    def pass_on(self, number, i):
        slot = lax.rem(i, jnp.int32(_SLOTS))
        pl.when(i >= _SLOTS)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        tickets.pass_on(self.smem.at[pl.ds(slot, 1)], number, self.plan.interpret)
        plgpu.barrier_arrive(self.ready.at[slot])

    def next(self, i):
        slot = lax.rem(i, jnp.int32(_SLOTS))
        plgpu.barrier_wait(self.ready.at[slot])
        number = tickets.passed_on(self.smem.at[pl.ds(slot, 1)], self.plan.interpret)
        plgpu.barrier_arrive(self.free.at[slot])
        return number

    def drain(self):
        for slot in range(_SLOTS):  # each CTA has passed on a place, and then that there is no other
            plgpu.barrier_wait(self.free.at[slot])
