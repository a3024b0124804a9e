"""Matmuls on the tensor cores, for the GPU and for JAX's interpreter: the one seam of all kernels here.

On the GPU a matmul is an asynchronous wgmma instruction. It adds to an accumulator in registers, which may start at any
value, and its left operand may lie in registers. The interpreter has none of this. There an accumulator is a `_Box` (or
shared memory, where it lives across loops), and a matmul reads its operands and multiplies them with jnp at once.

Operands in shared memory come in chunks of their head dim: [chunks, rows, columns] (see `tiles.Tiles`). They may be split
into parts, as those in registers are, each then a tuple: `products` says which of them are multiplied.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.registers import zeros
from pallas_fa.backends.hopper import products

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
class Wgmma:
    """Float32 accumulators and the matmuls that add to them.

    A matmul is only issued where it is called. `result` and `wait` wait for it; `in_flight` says how many matmuls that
    were issued later may still be under way.
    """

    interpret: bool
    parts: int = 1  # of each operand
    zeroes: bool = False  # accumulators get their zeros from `registers.zeros`

    def scoped(self, body: Callable[..., Any], *shapes: Shape) -> Any:
        """Returns body(*accumulators). They start at 0 and live until it returns; no loop may lie between."""
        if self.interpret:
            return body(*(_Box(jnp.zeros(shape, jnp.float32)) for shape in shapes))

        def zeroed(*accs):
            for acc, shape in zip(accs, shapes, strict=True):
                acc[...] = zeros(shape, plgpu.Layout.WGMMA)
            return body(*accs)

        return pl.run_scoped(zeroed if self.zeroes else body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def across_loops(self, body: Callable[..., Any], stand_ins: Sequence[Any], *shapes: Shape) -> Any:
        """As `scoped`, with loops allowed. The interpreter keeps the sums in `stand_ins`, refs of the same shapes."""
        if not self.interpret:
            return self.scoped(body, *shapes)
        for ref in stand_ins:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        return body(*stand_ins)

    def updated(
        self, body: Callable[..., Any], values: Sequence[Any], *shapes: Shape, like: tuple[Any, ...] = ()
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Calls body(accumulators that start at `values`, *accumulators of `shapes` that start at 0).

        Waits for the matmuls that `body` issues. Returns (the values of the first accumulators, what `body` returned, a
        tuple of arrays of the types of `like`).
        """
        if self.interpret:
            accs = [_Box(value) for value in values]
            results = self.scoped(lambda *scoped: body(accs, *scoped), *shapes)
            self.wait(0)
            return tuple(acc.value for acc in accs), tuple(results or ())

        def stateful(refs):
            accs, result_refs = refs

            def body_with_results(*scoped):  # Pallas can't return values from here, only store them
                for ref, result in zip(result_refs, body(accs, *scoped) or (), strict=True):
                    ref[...] = result

            self.scoped(body_with_results, *shapes) if shapes else body_with_results()

        values, results = pl.run_state(stateful)((tuple(map(plgpu.ACC.init, values)), like))
        return tuple(values), tuple(results)

    def left_operand(self, smem: Any) -> Any:
        """Returns the chunks of `smem` as left operands in registers, which the interpreter does not take."""
        if self.interpret:
            return smem
        return [plgpu.load(smem.at[i], layout=plgpu.Layout.WGMMA) for i in range(smem.shape[0])]

    def matmul(self, acc: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> None:
        """Issues acc += a b, with `a` in registers or shared memory and `b` in shared memory."""
        if self.interpret:
            a, b = (x if isinstance(x, jnp.ndarray) else x[...] for x in (a, b))
            a, b = (x.T if flag else x for x, flag in ((a, transpose_a), (b, transpose_b)))
            acc[...] = acc[...] + jnp.dot(a, b, preferred_element_type=jnp.float32)
            return
        transposed = lambda x, flag: x.transpose((1, 0)) if flag else x
        plgpu.wgmma(acc, transposed(a, transpose_a), transposed(b, transpose_b))

    def inner_products(self, acc: Any, a: Any, smem: Any) -> int:
        """Issues acc += a smem^T, summed over the chunks of the head dim; returns how many matmuls these are.

        `a` is an operand in shared memory or a list of its chunks.
        """
        chunks, pairs = smem.shape[0] // self.parts, products.pairs(self.parts)
        for of_a, of_b in pairs:
            for i in range(chunks):
                left = of_a * chunks + i
                left = a[left] if isinstance(a, list) else a.at[left]
                self.matmul(acc, left, smem.at[of_b * chunks + i], transpose_b=True)
        return len(pairs) * chunks

    def weighted_sums(self, accs: Sequence[Any], weights: tuple[Any, ...], smem: Any, first: Any = 0) -> int:
        """Issues acc += weights smem for each chunk of the head dim from `first` on, which has an accumulator of its own.

        `weights`: the parts of an operand in registers. Returns how many matmuls these are.
        """
        pairs = products.pairs(self.parts)
        for i, acc in enumerate(accs):
            for of_weights, of_b in pairs:
                self.matmul(acc, weights[of_weights], smem.at[first + of_b * len(accs) + i])
        return len(pairs) * len(accs)

    def sum_of_products(self, acc: Any, a: Sequence[Any], b: Sequence[Any]) -> int:
        """Issues acc += a^T b, of operands in shared memory, each in its parts; returns how many matmuls these are."""
        pairs = products.pairs(self.parts)
        for of_a, of_b in pairs:
            self.matmul(acc, a[of_a], b[of_b], transpose_a=True)
        return len(pairs)

    def result(self, acc: Any, in_flight: int) -> Any:
        """Returns the accumulator's value, once its matmuls are done."""
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
