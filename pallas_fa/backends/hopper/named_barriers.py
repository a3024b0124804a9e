"""Barriers between the warpgroups and warps of one block, for the GPU and for JAX's interpreter.

On the GPU they are the 16 numbered barriers of a block (PTX `bar`), which take neither registers nor shared memory. The
interpreter knows only mbarriers, with the same meaning: `wait` returns once all others have arrived.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

FIRST_FREE = 5  # barriers 0 to 4 belong to Mosaic


@dataclasses.dataclass(frozen=True)
class NamedBarrier:
    """`count` barriers, on each of which `arriving` threads arrive for `waiting` threads that wait.

    `meeting`: all wait for each other. `mbarrier`: what the interpreter uses, None on the GPU.
    """

    first: int
    arriving: int
    waiting: int
    mbarrier: Any = None
    meeting: bool = False

    def arrive(self, i: Any = 0) -> None:
        """Arrives on barrier i. What this thread did before is seen by those that wait."""
        if self.mbarrier is not None:
            plgpu.barrier_arrive(self.mbarrier.at[i])
        else:
            self._ptx("arrive", i)

    def wait(self, i: Any = 0) -> None:
        """Waits on barrier i; in a meeting, arrives too."""
        if self.mbarrier is None:
            self._ptx("sync", i)
            return
        if self.meeting:
            plgpu.barrier_arrive(self.mbarrier.at[i])
        plgpu.barrier_wait(self.mbarrier.at[i])

    def _ptx(self, operation, i):
        threads = self.arriving + (0 if self.meeting else self.waiting)

        def bar(_, number):
            operands, text = [number.registers[()]], f"bar.{operation} $0, {threads};"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r", has_side_effects=True)

        run: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(bar)
        run(jnp.int32(self.first) + i)
