"""Barriers between the warpgroups and warps of one CTA, for the GPU and for JAX's interpreter.

On the GPU they are the 16 numbered barriers of a CTA (PTX `bar`), which take neither registers nor shared memory. The
interpreter knows only mbarriers, with the same meaning: `wait` returns once all others have arrived.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

WARP, WARPGROUP = 32, 128  # threads
_FIRST_FREE, _COUNT = 5, 16  # barriers 0 to 4 belong to Mosaic


class Parties(NamedTuple):
    """Who meets at a barrier: `arrivals` warps or warpgroups of `arriving` threads each, for `waiting` threads.

    `count`: how many such barriers there are. `meeting`: all wait for each other, and `waiting` is 0. `others`: warps that
    arrive beside those.
    """

    count: int
    arrivals: int
    arriving: int
    waiting: int
    meeting: bool = False
    others: int = 0


@dataclasses.dataclass(frozen=True)
class NamedBarrier:
    """`parties.count` barriers, numbered from `first`. `mbarrier`: what the interpreter uses, None on the GPU."""

    first: int
    parties: Parties
    mbarrier: Any = None

    def arrive(self, i: Any = 0) -> None:
        """Arrives at barrier i. What this thread wrote before is seen by those that wait."""
        if self.mbarrier is not None:
            plgpu.barrier_arrive(self.mbarrier.at[i])
        else:
            self._ptx("arrive", i)

    def wait(self, i: Any = 0) -> None:
        """Waits at barrier i; in a meeting, arrives too."""
        if self.mbarrier is None:
            self._ptx("sync", i)
            return
        if self.parties.meeting:
            plgpu.barrier_arrive(self.mbarrier.at[i])
        plgpu.barrier_wait(self.mbarrier.at[i])

    def _ptx(self, operation, i):
        threads = self.parties.arrivals * self.parties.arriving + self.parties.others * WARP + self.parties.waiting

        def bar(_, number):
            operands, text = [number.registers[()]], f"bar.{operation} $0, {threads};"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r", has_side_effects=True)

        run: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(bar)
        run(jnp.int32(self.first) + i)


def numbered(parties: Mapping[str, Parties], scratch: Mapping[str, Any]) -> dict[str, NamedBarrier]:
    """Returns a barrier for each name, numbered in this order; in the interpreter with its mbarriers from `scratch`."""
    first, barriers = _FIRST_FREE, {}
    for name, who in parties.items():
        barriers[name] = NamedBarrier(first, who, scratch.get(f"{name}_mbarrier"))
        first += who.count
    assert first <= _COUNT
    return barriers


def interpreter_scratch(parties: Mapping[str, Parties]) -> dict[str, Any]:
    """Returns the mbarriers that stand for named barriers in the interpreter."""
    return {
        f"{name}_mbarrier": plgpu.Barrier(num_arrivals=who.arrivals + who.others, num_barriers=who.count)
        for name, who in parties.items()
    }
