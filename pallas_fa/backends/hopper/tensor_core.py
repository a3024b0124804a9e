"""The matmuls of the forward kernel, for the GPU and for JAX's interpreter.

On the GPU they are asynchronous wgmma instructions, with accumulators and left operands in registers. The interpreter
runs neither; there the same calls read their operands and multiply with jnp. Nothing else in a kernel depends on
`interpret`.

Operands in shared memory are [chunks, rows, columns]: a head dim comes in one chunk, or in several (`tiles.Tiles`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def in_registers(q_smem: Any, interpret: bool) -> Any:
    """The queries as a left operand in registers, which the interpreter does not take."""
    if interpret:
        return q_smem
    return [plgpu.load(q_smem.at[i], layout=plgpu.Layout.WGMMA) for i in range(q_smem.shape[0])]


def logits(q: Any, k_smem: Any, issued: Callable[[], None]) -> Any:
    """q k^T, float32, finished; q in shared memory or `in_registers`. Calls `issued()` once the matmul is under way."""

    def matmul(x_ref):
        _issue_logits(x_ref, q, k_smem)
        issued()
        return plgpu.wgmma_accumulator_load(x_ref, wait_n=0)

    return pl.run_scoped(matmul, plgpu.ACC((64, k_smem.shape[1]), jnp.float32))


def accumulate(acc: tuple[Any, ...], p: Any, v_smem: Any, interpret: bool) -> tuple[Any, ...]:
    """acc + p v, finished; p in registers, v in shared memory, one accumulator for each chunk of v."""
    if interpret:
        acc = tuple(a + jnp.dot(p, v_smem[i], preferred_element_type=jnp.float32) for i, a in enumerate(acc))
        plgpu.commit_smem()  # v was read by ordinary loads: order them before the next TMA write
        return acc
    return tuple(pl.run_state(lambda refs: _issue_accumulate(refs, p, v_smem))(tuple(map(plgpu.ACC.init, acc))))


def logits_over_accumulate(
    q: Any,
    k_smem: Any,
    acc: tuple[Any, ...],
    p: Any,
    v_smem: Any,
    v_wait: Callable[[], None],
    issued: Callable[[], None],
    under: Callable[[Any], tuple[Any, ...]],
    like: tuple[Any, ...],
    interpret: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Issues x = q k^T, then acc + p v, and runs `under(x)` while the latter is still under way.

    Returns (acc + p v, under(x)). `v_wait` waits until v is there; `issued` is called once both matmuls are under way;
    `like`: values of the types that `under` returns.
    """
    if interpret:
        x = logits(q, k_smem, lambda: None)
        v_wait()
        issued()
        acc = accumulate(acc, p, v_smem, interpret)
        return acc, under(x)

    def both(refs):
        acc_refs, result_refs = refs

        def body(x_ref):
            _issue_logits(x_ref, q, k_smem)
            v_wait()
            _issue_accumulate(acc_refs, p, v_smem)
            issued()
            results = under(plgpu.wgmma_accumulator_load(x_ref, wait_n=len(acc_refs)))
            for ref, result in zip(result_refs, results, strict=True):
                ref[...] = result

        pl.run_scoped(body, plgpu.ACC((64, k_smem.shape[1]), jnp.float32))

    acc, results = pl.run_state(both)((tuple(map(plgpu.ACC.init, acc)), like))  # waits for p v on the way out
    return tuple(acc), tuple(results)


def _issue_logits(x_ref, q, k_smem):
    for i in range(k_smem.shape[0]):
        plgpu.wgmma(x_ref, q[i] if isinstance(q, list) else q.at[i], k_smem.at[i].transpose((1, 0)))


def _issue_accumulate(acc_refs, p, v_smem):
    for i, acc_ref in enumerate(acc_refs):
        plgpu.wgmma(acc_ref, p, v_smem.at[i])
