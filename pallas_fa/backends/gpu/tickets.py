"""The block that a persistent CTA takes next: the first that no CTA has begun (evidence: backward/persistent-ctas).

A counter in device memory, 0 before the kernel, says how many blocks were taken beside the first of each CTA. The warp that
loads takes a block once it has loaded all of the block before, and passes its number on to the others: by then that block
is computed to within a stage or two. Taken earlier, blocks would wait for CTAs that are busy with long ones
(evidence: forward/by-tickets).
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.words import number_by, run_on


def take(counter: Any, number: Any, ctas: int, interpret: bool) -> Any:
    """Returns the number of the next block for the CTA of the warp that calls, which has taken block `number`.

    `counter`: a ref [1] to device memory. JAX's interpreter has no atomic operations: there blocks are dealt out in turn.
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
    return number_by(text, counter) + ctas


def pass_on(place: Any, number: Any, interpret: bool) -> None:
    """Writes `number` to `place`, a ref [1]. All lanes do, so whichever arrives at a barrier next has written it before."""
    if interpret:
        place[0] = number
    else:
        run_on("st.space.b32 [$0], $1;", place, number)


def passed_on(place: Any, interpret: bool) -> Any:
    """Returns the number that was passed on, as what ptxas knows to be the same in a whole warp."""
    if interpret:
        return place[0]
    return number_by("{ .reg .b32 x; ld.space.b32 x, [$1]; redux.sync.or.b32 $0, x, 0xffffffff; }", place)


def while_blocks(
    count: int, one: Callable[..., tuple[Any, ...]], number: Any, *state: Any, in_warp: bool
) -> tuple[Any, ...]:
    """Calls one(number, *state) -> (the next number, *state) while there is a block of that number, of `count`.

    Returns (the first number that is none of a block, *state). `in_warp`: whether the caller is one warp of a warpgroup,
    where Pallas has no while loops. Of two nested loops, each as long as the square root of all blocks, both are soon over
    after the last block; they take more registers.
    """
    is_there = lambda state: state[0] < count
    if not in_warp:
        return lax.while_loop(is_there, lambda state: one(*state), (number, *state))
    turns = math.isqrt(count - 1) + 1

    def some(_, state):
        turn = lambda _, state: lax.cond(is_there(state), lambda state: one(*state), lambda state: state, state)
        return lax.fori_loop(0, jnp.where(is_there(state), turns, 0), turn, state)

    return lax.fori_loop(0, turns, some, (number, *state))
