"""The warpgroups of a CTA: all load, all compute, and they meet at one barrier."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.named_barriers import WARPGROUP, Parties, interpreter_scratch, numbered
from pallas_fa.backends.mma.copies import Copies


def _parties(wgs: int) -> dict[str, Parties]:
    return {"meet": Parties(1, arrivals=wgs, arriving=WARPGROUP, waiting=0, meeting=True)}


def stand_ins(wgs: int) -> dict[str, Any]:
    """Returns the barriers that JAX's interpreter needs beside the scratch of a GPU."""
    return interpreter_scratch(_parties(wgs)) | {"arrived": plgpu.Barrier(num_barriers=wgs)}


class Cta:
    """What a warpgroup knows of its CTA: its own number `wg`, and how to copy and to meet the others."""

    def __init__(self, wgs: int, scratch: dict[str, Any], interpret: bool):
        self.wgs, self.interpret = wgs, interpret
        self.wg: Any = lax.axis_index("wg")
        self.copies = Copies(scratch["arrived"].at[self.wg] if interpret else None)
        self._meeting = numbered(_parties(wgs), scratch)["meet"]

    def only(self, wg: int, body: Callable[[], None]) -> None:
        """Calls body() in one warpgroup."""
        if self.wgs == 1:
            body()
        else:
            pl.when(self.wg == wg % self.wgs)(body)

    def meet(self) -> None:
        """Waits for all warpgroups: what they wrote to shared memory is seen, what they read may be written."""
        if self.interpret:
            plgpu.commit_smem()  # orders ordinary reads before TMA's next writes
        self._meeting.wait()

    def wait_for_copies(self, under_way: int = 0) -> None:
        """Waits until the copies that any warpgroup has started are in shared memory, and all are done with what was.

        `under_way`: how many of the last groups of copies are not waited for.
        """
        self.copies.wait(under_way)
        self.meet()
