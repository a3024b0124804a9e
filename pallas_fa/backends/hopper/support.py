"""Which problems the kernels can do. Importing this imports no part of Pallas."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.record import Support
from pallas_fa.problem import Problem
from pallas_fa.scores.base import evaluate

_MAX_HEAD_DIM = 256


@functools.lru_cache(maxsize=256)
def supports(problem: Problem, gpu: Gpu) -> Support:
    """Returns what the kernels can do of `problem` on `gpu`."""
    reason = _why_no_forward(problem, gpu)
    if reason:
        return Support.neither(reason)
    from pallas_fa.backends.hopper.backward.backward import why_no_backward

    return Support(None, why_no_backward(problem, gpu))


def _why_no_forward(problem, gpu):
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{problem.dtype} inputs; its matmuls are in bfloat16 or float16, and nothing is downcast silently"
    for name, size in (("H", problem.H), ("Hv", problem.Hv)):
        if size % 8 or size > _MAX_HEAD_DIM:
            return f"head dim {name}={size}; it takes multiples of 8 up to {_MAX_HEAD_DIM}"
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N):
        return "a dim of size 0"
    if isinstance(problem.precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return f"precision={problem.precision}; its matmuls multiply exactly and add in float32"
    if gpu.compute_capability != "9.0":
        return f"a GPU of compute capability {gpu.compute_capability}; its kernels are for 9.0"
    return _config_reason(problem) or _functions_reason(problem) or _arrays_reason(problem, gpu)


def _config_reason(problem):
    if problem.config is None:
        return None
    from pallas_fa.backends.hopper.config import Config

    if isinstance(problem.config, Config):
        return None
    return f"config={problem.config!r}; it takes a pallas_fa.backends.hopper.config.Config or None"


def _functions_reason(problem):
    from pallas_fa.backends.gpu import elementwise
    from pallas_fa.operands import closure

    index = jax.ShapeDtypeStruct((), jnp.int32)
    tile = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def slices(tree):
        shape = lambda a: (64, 64) if a.shape[2] > 1 or a.shape[3] > 1 else ()
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), a.dtype), tree)

    for name, tree in (("mask", problem.mask), ("score", problem.score)):
        if reason := closure.why_not_in_kernels(jax.tree.leaves(tree)):
            return f"the {name}: {reason}"
    if problem.mask is not None:
        mask = lambda b, n, t, s, mask: mask.allowed(b, n, t, s)
        reason = elementwise.why_not(mask, index, index, tile, tile, slices(problem.mask))
        if reason:
            return f"the mask: {reason}"
    if problem.score is not None:
        score = lambda x, b, n, t, s, score: evaluate(score, x, b, n, t, s)
        reason = elementwise.why_not(score, x, index, index, tile, tile, slices(problem.score))
        if reason:
            return f"the score: {reason}"
    return None


def _arrays_reason(problem, gpu):
    """Of arrays, and of named tiles: without either, everything is in the tables."""
    leaves: Any = jax.tree.leaves((problem.score, problem.mask))
    if not leaves and problem.config is None:
        return None
    from pallas_fa.backends.gpu.arrays import KernelArray
    from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
    from pallas_fa.backends.hopper.forward.choose import choose
    from pallas_fa.backends.hopper.forward.scratch import on_gpu

    reasons = (KernelArray.of(x).why_not() for x in leaves)
    if reason := next((reason for reason in reasons if reason), None):
        return reason
    needed = on_gpu(choose(problem, gpu))
    if fits(needed, gpu):
        return None
    return (
        f"{scratch_bytes(needed)} bytes of shared memory with the arrays of its mask and score; there are"
        f" {gpu.shared_memory}"
    )
