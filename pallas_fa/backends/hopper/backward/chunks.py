"""Streamed operands in chunks of 64 columns, for head dims whose whole tiles don't fit shared memory.

A pass reads one of its two streamed operands for logits and for the gradient; it is there as a whole tile. The other is
only a factor of products that sum over its columns: it passes through a ring of a few chunks. All compute warpgroups
compute the same products, and each its part of the gradient's columns (evidence: backward/wide-heads).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.backward.plan import BackwardPlan


def order(plan: BackwardPlan) -> list[tuple[str, int]]:
    """Returns (operand, chunk) of all chunks of a step, as they are loaded: "qk" or "pv".

    What fits the ring comes first, since it can be loaded while the gradient of the step before is computed. Then the
    operands alternate.
    """
    ring, whole = plan.in_ring, "qk" if plan.in_ring == "pv" else "pv"
    count = {name: getattr(plan.tiles, f"streamed_{name}").chunks for name in (ring, whole)}
    ahead = min(plan.config.chunk_slots, count[ring])
    found = [(ring, chunk) for chunk in range(ahead)]
    for chunk in range(max(count[whole], count[ring] - ahead)):
        found += [(whole, chunk)] if chunk < count[whole] else []
        found += [(ring, ahead + chunk)] if ahead + chunk < count[ring] else []
    return found


def place_in_ring(plan: BackwardPlan, done: Any, chunk: int) -> tuple[Any, Any]:
    """Returns (uses of the ring before, slot) of a chunk of step `done`."""
    count = getattr(plan.tiles, f"streamed_{plan.in_ring}").chunks
    use = done * count + chunk
    return use, lax.rem(use, jnp.int32(plan.config.chunk_slots))


def products(w: Any, done: Any, rows: Any, slot: Any, accs: dict[str, Any]) -> None:
    """Adds the products of step `done` to `accs`, which have "qk", the logits, and "pv" where dP is needed.

    `w`: the warpgroup; `rows`: its stationary rows; `slot`: that of the whole tile.
    """
    plan, wgmma, used = w.plan, w.wgmma, None
    for name, chunk in order(plan):
        if name not in accs:
            continue
        smem = getattr(w, f"streamed_{name}")
        if name == plan.in_ring:
            _, at = place_in_ring(plan, done, chunk)
            plgpu.barrier_wait(w.scratch[f"streamed_{name}_ready"].at[at])
            piece = smem.at[at, 0]
        else:
            at = None
            plgpu.barrier_wait(_ready(w, name, slot, chunk))
            piece = smem.at[slot, chunk]
        wgmma.matmul(accs[name], getattr(w, f"stationary_{name}").at[chunk, rows], piece, transpose_b=True)
        if used is not None:
            wgmma.wait(1)
            w.barriers[f"streamed_{plan.in_ring}_free"].arrive(used)
        used = at
    wgmma.wait(0)
    if used is not None:
        w.barriers[f"streamed_{plan.in_ring}_free"].arrive(used)


def wait_for_whole_tile(w: Any, slot: Any) -> None:
    """Waits for the whole tile where the products did not."""
    name = "pv" if w.plan.in_ring == "qk" else "qk"
    if name == "pv":
        for chunk in range(w.plan.tiles.streamed_pv.chunks):
            plgpu.barrier_wait(_ready(w, name, slot, chunk))


def _ready(w, name, slot, chunk):
    count = getattr(w.plan.tiles, f"streamed_{name}").chunks
    return w.scratch[f"streamed_{name}_ready"].at[slot * count + chunk]
