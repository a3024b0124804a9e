"""Accumulators of matmuls that are under way, for the GPU and for JAX's interpreter: the seam of the backward kernel.

On the GPU an accumulator is a set of registers, its matmuls are asynchronous wgmma instructions, it may start at any
value, and its left operand may lie in registers. The interpreter has none of this. There an accumulator is a `_Box` (or
shared memory, where it lives across loops), a matmul reads its operands and multiplies them with jnp at once, and a
reduction into device memory is a plain store to a place of its own. Nothing else in the kernel depends on `interpret`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Shape = tuple[int, int]


@dataclasses.dataclass
class _Box:
    """Stands for a register accumulator inside a straight run of code."""

    value: Any

    def __getitem__(self, _):
        return self.value

    def __setitem__(self, _, value):
        self.value = value


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """Accumulators and their matmuls. `in_flight`: how many matmuls issued later may still be under way."""

    interpret: bool

    def scoped(self, body: Callable[..., Any], *shapes: Shape) -> Any:
        """body(*accumulators), which start at 0 and live until it returns; no loop may lie between."""
        if self.interpret:
            return body(*(_Box(jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def across_loops(self, body: Callable[..., Any], stand_ins: Any, *shapes: Shape) -> Any:
        """As `scoped`, with loops allowed; the interpreter keeps the sums in `stand_ins`, refs of the same shapes."""
        if not self.interpret:
            return self.scoped(body, *shapes)
        for ref in stand_ins:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        return body(*stand_ins)

    def matmul(self, acc: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> None:
        """Issues acc += a b, with `a` in registers or shared memory and `b` in shared memory."""
        if self.interpret:
            a, b = (x if isinstance(x, jnp.ndarray) else x[...] for x in (a, b))
            a, b = (x.T if flag else x for x, flag in ((a, transpose_a), (b, transpose_b)))
            acc[...] = acc[...] + jnp.dot(a, b, preferred_element_type=jnp.float32)
            return
        transposed = lambda x, flag: x.transpose((1, 0)) if flag else x
        plgpu.wgmma(acc, transposed(a, transpose_a), transposed(b, transpose_b))

    def result(self, acc: Any, in_flight: int) -> Any:
        """The accumulator's value, once its matmuls are done."""
        if self.interpret:
            self.wait(in_flight)
            return acc[...]
        return plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)

    def wait(self, in_flight: int) -> None:
        """Waits for all matmuls but the last `in_flight`."""
        if self.interpret:
            plgpu.commit_smem()  # operands were read by ordinary loads: order them before the next TMA write
        else:
            plgpu.wgmma_wait(in_flight)

    def store_add(self, smem: Any, gmem: Any) -> None:
        """Starts adding shared memory to `gmem`; the interpreter only stores: nothing else may store there."""
        plgpu.copy_smem_to_gmem(smem, gmem, reduction_op=None if self.interpret else "add")
