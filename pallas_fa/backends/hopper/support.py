"""Which problems the kernels can do. Importing this imports no part of Pallas."""

import functools
from typing import Any

import jax

from pallas_fa.backends.gpu import head_dims, narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.support import LARGEST_HEAD_DIM, why_not_functions
from pallas_fa.backends.hopper import narrow, products
from pallas_fa.backends.hopper.mla import support as mla
from pallas_fa.backends.record import Support, no_gradients
from pallas_fa.masks import Causal, Window
from pallas_fa.masks.base import parts_of
from pallas_fa.problem import Problem


@functools.lru_cache(maxsize=256)
def supports(problem: Problem, gpu: Gpu) -> Support:
    """Returns what the kernels can do of `problem` on `gpu`."""
    if problem.values_in_keys:
        return mla.supports(problem, gpu)
    own = problem if reads_narrow(problem, gpu) else narrow_keys.widened(problem)
    kernels = head_dims.padded(own)
    if problem.pages and kernels is not own:
        return Support.neither(f"head dims H={problem.H} and Hv={problem.Hv}; it takes multiples of 8 of keys in pages")
    reason = products.why_not(problem) or _why_no_forward(kernels, gpu)
    if reason:
        return Support.neither(reason)
    from pallas_fa.backends.hopper.backward.backward import why_no_backward

    no_backward = no_gradients(problem) or why_no_backward(kernels, gpu)
    remark = _remark(problem, kernels, gpu, has_backward=no_backward is None)
    return Support(None, no_backward, remark, _only_named(problem), _gradients_only_named(problem))


def _gradients_only_named(problem):
    """Of head dims past 256, where a mask saves the kernels no work (evidence: backward/wide-heads)."""
    if max(problem.H, problem.Hv) > LARGEST_HEAD_DIM and not _is_narrow(problem.mask):
        return f"xla is faster at H={problem.H} and Hv={problem.Hv} unless the mask is causal or a window"
    return None


def _is_narrow(mask):
    return bool(parts_of(mask, Causal) or parts_of(mask, Window))


def _only_named(problem):
    from pallas_fa.backends.gpu.few_queries import applies

    if products.parts_of(problem) > 1 and applies(problem):
        return f"to split the keys for T={problem.dims.T} queries reads and writes more than to attend to them"
    return None


def _remark(problem, kernels, gpu, has_backward):
    from pallas_fa.backends.gpu import few_queries, head_parts
    from pallas_fa.backends.hopper.backward import choose as backward
    from pallas_fa.backends.hopper.decode import choose as decode
    from pallas_fa.backends.hopper.forward import choose as forward
    from pallas_fa.backends.hopper.forward import split_heads

    remarks = [narrow_keys.remark(problem, kernels), head_dims.remark(problem), products.remark(problem)]
    if decode.applies(kernels):
        remarks.append(few_queries.remark(kernels, decode.choose(kernels, gpu).config.kv_splits))
    else:
        remarks.append(split_heads.remark(forward.choose(kernels, gpu)))
    if has_backward:
        plans = (backward.choose(kernels, kind, gpu) for kind in backward.choose_passes(kernels, gpu))
        remarks.append(head_parts.remark(plans))
    return "; ".join(filter(None, remarks)) or None


@functools.lru_cache(maxsize=256)
def reads_narrow(problem: Problem, gpu: Gpu) -> bool:
    """Returns whether the forward kernel reads keys and values of 8 bits as they are."""
    return narrow.may_read(problem) and _why_no_forward(problem, gpu) is None


def _why_no_forward(problem, gpu):
    if gpu.compute_capability != "9.0":
        return f"a GPU of compute capability {gpu.compute_capability}; its kernels are for 9.0"
    return (
        _config_reason(problem)
        or why_not_functions(problem)
        or _rows_reason(problem)
        or _arrays_reason(problem, gpu)
        or _pages_reason(problem, gpu)
    )


def _pages_reason(problem, gpu):
    if problem.pages is None:
        return None
    from pallas_fa.backends.hopper import pages

    if products.parts_of(problem) > 1:
        return f"{problem.dtype} keys in pages, which would be split into parts"
    if problem.mask is not None and problem.mask.has_blocks:
        return "a block mask and keys in pages"
    return pages.why_not(problem.pages, _plan(problem, gpu).config.block_kv)


def _plan(problem, gpu):
    from pallas_fa.backends.hopper.decode import choose as decode
    from pallas_fa.backends.hopper.forward import choose as forward

    return (decode if decode.applies(problem) else forward).choose(problem, gpu)


def _config_reason(problem):
    if problem.config is None:
        return None
    from pallas_fa.backends.gpu.few_queries import MOST_QUERIES, applies
    from pallas_fa.backends.hopper.config import Config
    from pallas_fa.backends.hopper.forward import split_heads, windows

    if isinstance(problem.config, Config):
        forward = problem.config.forward
        if forward is not None and forward.grouped_rows and (reason := windows.why_not(problem)):
            return f"config={problem.config!r} groups rows, and {reason}"
        if forward is None or forward.kv_splits == 1:
            return None
        if problem.mask is not None and problem.mask.has_blocks:
            return f"config={problem.config!r} with a block mask, whose visits are not split"
        is_few = applies(problem)
        if bool(forward.split_heads) == is_few:
            few = f"with few queries (at most {MOST_QUERIES}, without dropout) split_heads must be 0, with more at least 1"
            return f"config={problem.config!r} splits the keys for T={problem.dims.T} queries; {few}"
        return None if is_few else split_heads.why_not(problem, forward)
    return f"config={problem.config!r}; it takes a pallas_fa.mosaic_gpu.config.Config or None"


def _rows_reason(problem):
    """Of few queries, whose functions are evaluated by rows."""
    from pallas_fa.backends.gpu.few_queries import applies, as_kernel_sees

    rows = as_kernel_sees(problem) if applies(problem) else problem
    return None if rows is problem else why_not_functions(rows)


def _arrays_reason(problem, gpu):
    """Of arrays, and of named tiles: without either, everything is in the tables."""
    leaves: Any = jax.tree.leaves((problem.score, problem.mask))
    if not leaves and problem.config is None and not problem.has_narrow_keys:
        return None
    from pallas_fa.backends.gpu.arrays import KernelArrays
    from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
    from pallas_fa.backends.hopper.forward.scratch import on_gpu

    reasons = (array.why_not() for array in KernelArrays.of(problem.score, problem.mask, problem.dims))
    if reason := next((reason for reason in reasons if reason), None):
        return reason
    needed = on_gpu(_plan(problem, gpu))
    if fits(needed, gpu):
        return None
    return (
        f"{scratch_bytes(needed)} bytes of shared memory with the arrays of its mask and score; there are"
        f" {gpu.shared_memory}"
    )
