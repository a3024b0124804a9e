"""Which problems any kernel can do. Importing this imports no part of Pallas."""

import jax
import jax.numpy as jnp

from pallas_fa.masks.block_bits import BlockBits
from pallas_fa.operands import diagonals
from pallas_fa.problem import Problem
from pallas_fa.scores.base import evaluate

LARGEST_HEAD_DIM, LARGEST_WIDE_HEAD_DIM = 256, 512


def why_not(problem: Problem, max_head_dim: int = LARGEST_HEAD_DIM) -> str | None:
    """Returns None if kernels can do `problem` on some GPU, with some tiles, else the reason; says nothing of functions."""
    return why_not_sizes(problem, max_head_dim) or why_not_16_bits(problem)


def why_not_sizes(problem: Problem, max_head_dim: int, of: str = "") -> str | None:
    """Returns None if kernels can do a problem of these sizes, else the reason. `of`: what limits head dims, in words."""
    for name, size in (("H", problem.H), ("Hv", problem.Hv)):
        if size > max_head_dim:
            return f"head dim {name}={size}{of}; it takes at most {max_head_dim}"
    if problem.dims.is_symbolic:
        return "a symbolic size; its kernels are made for sizes that are known"
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N):
        return "a dim of size 0"
    return None


def why_not_16_bits(problem: Problem) -> str | None:
    """Returns None if one product of 16-bit numbers is each matmul of `problem`, else the reason."""
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{problem.dtype} inputs; its matmuls are in bfloat16 or float16, and nothing is downcast silently"
    if isinstance(problem.precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return f"precision={problem.precision}; its matmuls multiply exactly and add in float32"
    return None


def why_not_functions(problem: Problem) -> str | None:
    """Returns None if the problem's mask and score lower in a kernel, else the reason."""
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
