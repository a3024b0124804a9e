"""Which problems the kernels can do. Importing this does not import Pallas, which takes longer than JAX's other parts."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.mosaic_gpu import elementwise
from pallas_fa.problem import Problem

_MAX_HEAD_DIM = 256


def supports(problem: Problem) -> str | None:
    """None if the kernels can do `problem`, else the reason why not."""
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{problem.dtype} inputs; its matmuls are in bfloat16 or float16, and nothing is downcast silently"
    for name, size in (("H", problem.H), ("Hv", problem.Hv)):
        if size % 8 or size > _MAX_HEAD_DIM:
            return f"head dim {name}={size}; it takes multiples of 8 up to {_MAX_HEAD_DIM}"
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N):
        return "a dim of size 0"
    if isinstance(problem.precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return f"precision={problem.precision}; its matmuls multiply exactly and add in float32"
    if problem.deterministic_gradients:
        return "deterministic_gradients=True"
    return _config_reason(problem) or _capability_reason() or _functions_reason(problem) or _arrays_reason(problem)


def cuda_devices() -> list[Any]:
    """The CUDA GPUs of this machine."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def _config_reason(problem):
    from pallas_fa.mosaic_gpu.config import ForwardConfig

    if problem.config is None or isinstance(problem.config, ForwardConfig):
        return None
    return f"config={problem.config!r}; it takes a pallas_fa.mosaic_gpu.config.ForwardConfig or None"


def _capability_reason():
    """GPUs that are there must be Hopper; where none is, a program may be lowered for one all the same."""
    found = sorted({str(getattr(device, "compute_capability", "?")) for device in cuda_devices()})
    return (
        None if found in ([], ["9.0"]) else f"a GPU of compute capability {', '.join(found)}; its kernels are for 9.0"
    )


def _functions_reason(problem):
    index = jax.ShapeDtypeStruct((), jnp.int32)
    tile = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def slices(tree):
        shape = lambda a: (64, 64) if a.shape[2] > 1 or a.shape[3] > 1 else ()
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), a.dtype), tree)

    if problem.mask is not None:
        mask = lambda b, n, t, s, mask: mask.allowed(b, n, t, s)
        reason = elementwise.why_not(mask, index, index, tile, tile, slices(problem.mask))
        if reason:
            return f"the mask: {reason}"
    if problem.score is not None:
        score = lambda x, b, n, t, s, score: score.apply(x, b, n, t, s)
        reason = elementwise.why_not(score, x, index, index, tile, tile, slices(problem.score))
        if reason:
            return f"the score: {reason}"
    return None


def _arrays_reason(problem: Problem) -> str | None:
    leaves: Any = jax.tree.leaves((problem.score, problem.mask))
    if not leaves:
        return None
    from pallas_fa.mosaic_gpu.arrays import KernelArray

    return next((reason for x in leaves if (reason := KernelArray.of(x).why_not())), None)
