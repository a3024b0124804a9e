"""The kernel for latent attention in decoding, and the merge of its partial results."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.hopper.mla.compute import Warpgroup
from pallas_fa.backends.hopper.mla.load import load
from pallas_fa.backends.hopper.mla.plan import HALVES, ROWS, MlaPlan
from pallas_fa.backends.hopper.mla.work import Work
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax.merging import PartialResult, merge_per_element

_REGISTERS = 240, 24  # of a thread of a compute warpgroup and of the load warpgroup


def attention(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], log-sum-exp [B, T, N] float32).

    Args:
      operands: keys [B, S, 1, H], or in pages; the values are their first Hv columns, and `operands.v` is not read.
      gpu, interpret: as of `hopper.forward`.
    """
    plan, dims = MlaPlan.of(problem, gpu, interpret), problem.dims
    keys = operands.k
    cache = [keys.pages[:, :, 0], keys.table] if isinstance(keys, Paged) else [keys[:, :, 0]]
    out, lse = run(plan, operands.q.reshape(-1, dims.N, problem.H), _limits(plan, operands.mask), *cache)
    lse = lse[:, : dims.N]
    if plan.kv_splits > 1:
        parts = (PartialResult(out[i :: plan.kv_splits], lse[i :: plan.kv_splits]) for i in range(plan.kv_splits))
        out, lse = merge_per_element(*parts)
    return out.astype(problem.dtype).reshape(dims.B, dims.T, dims.N, problem.Hv), lse.reshape(dims.B, dims.T, dims.N)


def run(plan: MlaPlan, queries: Any, limits: Any, *cache: Any) -> tuple[Any, Any]:
    """Returns (out [B * T * kv_splits, N, Hv], lse [B * T * kv_splits, heads of whole CTAs]).

    Args:
      queries: [B * T, N, H].
      limits: int32 [B * T], how many keys each query sees.
      cache: [B, S, H]; or pages [P, page, H], and their table.
    """
    entries = plan.queries * plan.kv_splits

    def latent_attention(*refs, **scratch):
        q, limits, cache, *page_table, out, lse = refs
        _kernel(plan, _Refs(q, limits, cache, page_table[0] if page_table else None, out, lse), scratch)

    return launch(
        latent_attention,
        queries,
        limits,
        *cache,
        out_type=(
            jax.ShapeDtypeStruct((entries, plan.problem.dims.N, plan.problem.Hv), plan.out_dtype),
            jax.ShapeDtypeStruct((entries, plan.row_blocks * ROWS), jnp.float32),
        ),
        ctas=plan.ctas,
        warpgroups=3,
        scratch=plan.scratch,
    )


def _limits(plan, mask):
    """How many keys each query sees, from the mask: none, of lengths, causal, or both."""
    dims = plan.problem.dims
    if mask is None:
        return jnp.full((plan.queries,), dims.S, jnp.int32)
    t = np.arange(dims.T, dtype=np.int32)
    _, end = mask.kv_range(t, t + 1)
    return jnp.clip(jnp.broadcast_to(jnp.asarray(end, jnp.int32), (dims.B, 1, dims.T)), 0, dims.S).reshape(-1)


class _Refs(NamedTuple):
    """Device memory. `page_table`: None where the cache is in one piece."""

    q: Any
    limits: Any
    cache: Any
    page_table: Any
    out: Any
    lse: Any


def _kernel(plan: MlaPlan, gmem: _Refs, scratch: dict[str, Any]):
    wg = lax.axis_index("wg")
    if not plan.interpret:
        for half in HALVES:
            scratch[f"{half}_smem"], scratch[f"out_{half}_smem"] = scratch[f"{half}_smem"]
    work = Work.of_cta(plan, gmem.limits)
    compute_registers, load_registers = _REGISTERS
    for number in (0, 1):

        @pl.when(wg == number)
        def _(number=number):
            plgpu.set_max_registers(compute_registers, action="increase")
            Warpgroup(plan, work, number, gmem, scratch).run()

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(load_registers, action="decrease")
        load(plan, work, gmem, scratch)
