"""The block that a persistent CTA takes next: the first that no CTA has begun (evidence: backward/persistent-ctas).

A counter in device memory, 0 before the kernel, says how many blocks were taken beside the first of each CTA. The load warp
takes a block while the one before is computed. It passes the number on through device memory, since kernels fill shared
memory; whoever waits for the block's first operand may read it then.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.gpu.words import number_by, run_on

_SECTOR = 8  # numbers of one; each CTA writes to its own


def shape(ctas: int) -> tuple[int, int]:
    """Returns that of the int32 array `memory`: the counter, and a row for each CTA."""
    return 1 + ctas, _SECTOR


def take(memory: Any, number: Any, ctas: int, interpret: bool) -> Any:
    """Returns the number of the next block for the CTA of the warp that calls, which has taken block `number`.

    JAX's interpreter has no atomic operations: there the blocks are dealt out in turn.
    """
    if interpret:
        return number + ctas

    text = """{
        .reg .pred p;
        .reg .b32 taken;
        mov.u32 taken, %laneid;
        setp.eq.u32 p, taken, 0;
        @p atom.relaxed.gpu.global.add.u32 taken, [$1], 1;
        shfl.sync.idx.b32 $0, taken, 0, 31, 0xffffffff;
    }"""
    return number_by(text, memory.at[0, pl.ds(0, 1)]) + ctas


def pass_on(memory: Any, slot: Any, number: Any, interpret: bool) -> None:
    """Writes `number` for this CTA. All lanes do, so whichever arrives at a barrier next has written it before."""
    place = _place(memory, slot)
    if interpret:
        place[0] = number
    else:
        run_on("st.global.b32 [$0], $1;", place, number)


def passed_on(memory: Any, slot: Any, interpret: bool) -> Any:
    """Returns the number that was passed on, as what ptxas knows to be the same in a whole warp."""
    place = _place(memory, slot)
    if interpret:
        return place[0]
    return number_by("{ .reg .b32 x; ld.global.b32 x, [$1]; redux.sync.or.b32 $0, x, 0xffffffff; }", place)


def _place(memory, slot):
    return memory.at[1 + lax.axis_index(AXIS), pl.ds(slot, 1)]
