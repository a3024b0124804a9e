"""How a kernel is launched: CTAs along one grid axis, with several warpgroups each."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.grid import AXIS


def launch(
    body: Callable[..., None],
    *operands: Any,
    out_type: tuple[Any, ...],
    ctas: int,
    warpgroups: int,
    scratch: dict[str, Any],
    semantics: Any = plgpu.LoweringSemantics.Warpgroup,
) -> tuple[Any, ...]:
    """Runs a kernel and returns its results.

    Args:
      body: called as body(*refs of operands, *refs of results, **scratch refs); its name is the kernel's in profiles.
      operands: arrays, and refs that the kernel adds to.
      out_type: a ShapeDtypeStruct for each result.
      ctas: the size of the grid; its axis is `grid.AXIS`.
      warpgroups: of each CTA; their axis is "wg".
      scratch: shared memory and barriers by name, in the order in which they lie in memory.
      semantics: whether the kernel is lowered for warpgroups or for lanes, which mma.sync asks for.
    """
    count = len(operands) + len(out_type)

    def with_names(*refs):
        # Here as well, since `vmap` traces the kernel once more, wherever the caller is.
        with jax.enable_x64(False):
            body(*refs[:count], **dict(zip(scratch, refs[count:], strict=True)))

    with_names.__name__ = body.__name__
    # Kernels count in 32 bits, whatever an int is elsewhere.
    with jax.enable_x64(False):
        results = plgpu.kernel(
            with_names,
            out_type=out_type,
            # One axis: only the first of CUDA's three may pass 65535 (evidence: forward/grid-and-scratch).
            grid=(ctas,),
            grid_names=(AXIS,),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=tuple(scratch.values()),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,
                lowering_semantics=semantics,
            ),
        )(*operands)
    # In a loop that also stores a result in a larger array (`lax.scan` over layers, under grad), XLA would otherwise run
    # the kernel twice: once into the larger array, and once for the other users.
    # Evidence: library/results-behind-a-barrier.
    return tuple(lax.optimization_barrier(tuple(results)))
