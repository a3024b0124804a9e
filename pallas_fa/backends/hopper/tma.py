"""What the kernels need of TMA beyond plain copies, for the GPU and for JAX's interpreter."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def add_to_gmem(smem: Any, gmem: Any, interpret: bool) -> None:
    """Starts adding shared memory to `gmem`. The interpreter only stores: nothing else may store there."""
    plgpu.copy_smem_to_gmem(smem, gmem, reduction_op=None if interpret else "add")


def fence_async_proxy(interpret: bool) -> None:
    """Makes what this thread wrote to shared memory visible to TMA and tensor cores after the next barrier.

    `plgpu.commit_smem` does so too, but it also waits for the whole warpgroup.
    """
    if interpret:
        plgpu.commit_smem()
        return

    def fence(_):
        text = "fence.proxy.async.shared::cta;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    run: Any = plgpu.inline_mgpu()(fence)
    run()
