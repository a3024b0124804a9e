"""Which problems the kernels can do. Importing this imports no part of Pallas."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper import head_dims, products
from pallas_fa.backends.record import NEVER_RUN, NO_GRADIENTS_OF_PAGES, Support
from pallas_fa.masks.block_bits import BlockBits
from pallas_fa.operands import diagonals
from pallas_fa.problem import Problem
from pallas_fa.scores.base import evaluate


@functools.lru_cache(maxsize=256)
def supports(problem: Problem, gpu: Gpu) -> Support:
    """Returns what the kernels can do of `problem` on `gpu`."""
    kernels = head_dims.padded(problem)
    if problem.pages and kernels is not problem:
        return Support.neither(f"head dims H={problem.H} and Hv={problem.Hv}; it takes multiples of 8 of keys in pages")
    reason = products.why_not(problem) or _why_no_head_dim(problem) or _why_no_forward(kernels, gpu)
    if reason:
        return Support.neither(reason)
    from pallas_fa.backends.hopper.backward.backward import why_no_backward

    if problem.pages:
        return Support(None, NO_GRADIENTS_OF_PAGES, _remark(problem, kernels, gpu), NEVER_RUN)
    only_named = NEVER_RUN if products.parts_of(problem) > 1 else None
    return Support(None, why_no_backward(kernels, gpu), _remark(problem, kernels, gpu), only_named)


def _remark(problem, kernels, gpu):
    from pallas_fa.backends.hopper.decode import choose as decode

    remarks = [
        head_dims.remark(problem),
        products.remark(problem),
        decode.remark(kernels, gpu) if decode.applies(kernels) else None,
    ]
    return "; ".join(filter(None, remarks)) or None


def _why_no_head_dim(problem):
    parts = products.parts_of(problem)
    most, in_parts = products.LARGEST_HEAD_DIM[parts], f" in {parts} bfloat16 parts" if parts > 1 else ""
    for name, size in (("H", problem.H), ("Hv", problem.Hv)):
        if size > most:
            return f"head dim {name}={size}{in_parts}; it takes at most {most}"
    return None


def _why_no_forward(problem, gpu):
    if problem.dims.is_symbolic:
        return "a symbolic size; its kernels are made for sizes that are known"
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N):
        return "a dim of size 0"
    if gpu.compute_capability != "9.0":
        return f"a GPU of compute capability {gpu.compute_capability}; its kernels are for 9.0"
    return (
        _pages_reason(problem, gpu)
        or _config_reason(problem)
        or _functions_reason(problem)
        or _rows_reason(problem)
        or _arrays_reason(problem, gpu)
    )


def _pages_reason(problem, gpu):
    if problem.pages is None:
        return None
    from pallas_fa.backends.hopper import pages
    from pallas_fa.backends.hopper.decode import choose as decode

    if products.parts_of(problem) > 1:
        return f"{problem.dtype} keys in pages, which would be split into parts"
    if not decode.applies(problem):
        return f"T={problem.dims.T} queries and keys in pages; it takes at most {decode.MOST_QUERIES} then"
    if problem.mask is not None and problem.mask.has_blocks:
        return "a block mask and keys in pages"
    return pages.why_not(problem.pages, decode.choose(problem, gpu).config.block_kv)


def _config_reason(problem):
    if problem.config is None:
        return None
    from pallas_fa.backends.hopper.config import Config

    if isinstance(problem.config, Config):
        split = problem.config.forward is not None and problem.config.forward.kv_splits > 1
        if split and problem.mask is not None and problem.mask.has_blocks:
            return f"config={problem.config!r} with a block mask, whose visits are not split"
        return None
    return f"config={problem.config!r}; it takes a pallas_fa.backends.hopper.config.Config or None"


def _functions_reason(problem):
    from pallas_fa.backends.gpu import elementwise
    from pallas_fa.operands import closure

    index = jax.ShapeDtypeStruct((), jnp.int32)
    tile = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def slices(tree):
        shape = lambda a: (64, 64) if diagonals.spans(a) or a.shape[2] > 1 or a.shape[3] > 1 else ()
        dtype = lambda a: jnp.float32 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), dtype(a)), tree)

    tested = problem.mask
    if tested is not None and tested.has_blocks:
        # At least the largest tiles that shared memory takes.
        tested = jax.eval_shape(lambda mask: mask.in_tiles((problem.dims.T, problem.dims.S), (192, 256)), tested)
        for bits in (x for x in jax.tree.leaves(tested, is_leaf=_is_bits) if _is_bits(x) and not x.fits):
            return f"the mask: a BlockMask of block={bits.block}; in its tiles it tests blocks of 64 or more"
    for name, tree in (("mask", tested), ("score", problem.score)):
        arrays = (x for x in jax.tree.leaves(tree, is_leaf=_is_bits) if not _is_bits(x))
        if reason := closure.why_not_in_kernels(arrays):
            return f"the {name}: {reason}"
    if tested is not None:
        mask = lambda b, n, t, s, mask: mask.allowed(b, n, t, s)
        reason = elementwise.why_not(mask, index, index, tile, tile, slices(tested))
        if reason:
            return f"the mask: {reason}"
    if problem.score is not None:
        score = lambda x, b, n, t, s, score: evaluate(score, x, b, n, t, s)
        reason = elementwise.why_not(score, x, index, index, tile, tile, slices(problem.score))
        if reason:
            return f"the score: {reason}"
    return None


def _is_bits(x):
    return isinstance(x, BlockBits)


def _rows_reason(problem):
    """Of few queries, whose functions are evaluated by rows."""
    from pallas_fa.backends.hopper.decode import choose as decode

    rows = decode.as_kernel_sees(problem) if decode.applies(problem) else problem
    return None if rows is problem else _functions_reason(rows)


def _arrays_reason(problem, gpu):
    """Of arrays, and of named tiles: without either, everything is in the tables."""
    leaves: Any = jax.tree.leaves((problem.score, problem.mask))
    if not leaves and problem.config is None:
        return None
    from pallas_fa.backends.gpu.arrays import KernelArrays
    from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
    from pallas_fa.backends.hopper.decode import choose as decode
    from pallas_fa.backends.hopper.forward import choose as forward
    from pallas_fa.backends.hopper.forward.scratch import on_gpu

    reasons = (array.why_not() for array in KernelArrays.of(problem.score, problem.mask, problem.dims))
    if reason := next((reason for reason in reasons if reason), None):
        return reason
    needed = on_gpu((decode if decode.applies(problem) else forward).choose(problem, gpu))
    if fits(needed, gpu):
        return None
    return (
        f"{scratch_bytes(needed)} bytes of shared memory with the arrays of its mask and score; there are"
        f" {gpu.shared_memory}"
    )
