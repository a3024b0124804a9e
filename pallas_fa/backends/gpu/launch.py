"""How a kernel is launched: one block of threads for each piece of work, with several warpgroups each."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    body: Callable[..., None], *operands: Any, out_type: tuple[Any, ...], blocks: int, warpgroups: int, scratch: Any
) -> tuple[Any, ...]:
    """The results of `body(*refs of operands, *refs of results, **scratch)`, run by `blocks` blocks of threads."""
    # Kernels count in 32 bits, whatever an int is elsewhere.
    with jax.enable_x64(False):
        results = plgpu.kernel(
            body,
            out_type=out_type,
            grid=(blocks,),  # one axis: only the first of CUDA's three may pass 65535
            grid_names=("block",),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*operands)
    # In a loop that also stores a result in a larger array (`lax.scan` over layers, under grad), XLA would otherwise run the
    # kernel twice: once into the larger array, and once for the other users.
    return tuple(lax.optimization_barrier(tuple(results)))
