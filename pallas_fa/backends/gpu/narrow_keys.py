"""Keys and values of 8 bits, which one kernel reads as they are, and which others are given converted.

The kernel by `mma.sync` for few queries reads them (`mma.narrow`): there the time is that of reading. Where there are more
queries, XLA converts them once, which takes little beside the matmuls. Those in pages are never copied.

Importing this imports no part of Pallas.
"""

import dataclasses
import re

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.problem import Operands, Problem

PTX_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}  # of the dtypes that are read
UNIT = 16  # columns that are read together, and their bytes


def why_not_read(problem: Problem, gpu: Gpu) -> str | None:
    """Returns why the kernel for few queries does not read the keys and values of `problem` as they are, or None.

    None, too, where these have the queries' dtype.
    """
    if not problem.has_narrow_keys:
        return None
    what = f"{problem.kv_dtype} keys and values"
    if problem.dims.is_symbolic:
        return f"{what} of a symbolic size; its kernels are made for sizes that are known"
    if problem.kv_dtype.name not in PTX_NAMES:
        return f"{what}; of 8 bits it reads {' and '.join(PTX_NAMES)}"
    of_one_kind = re.fullmatch(r"(\d+)\.(\d+)", gpu.compute_capability)  # or those of GPUs that differ
    if not of_one_kind or tuple(map(int, of_one_kind.groups())) < (8, 9):
        return f"{what} on a GPU of compute capability {gpu.compute_capability}; it reads them from 8.9 on"
    from pallas_fa.backends.gpu import few_queries  # which imports Pallas

    has_blocks = problem.mask is not None and problem.mask.has_blocks
    if not few_queries.applies(problem) or has_blocks or getattr(problem.config, "forward", None):
        return f"{what}; only its kernel for at most {few_queries.MOST_QUERIES} queries reads them"
    if problem.H % UNIT or problem.Hv % UNIT:
        return f"{what} with head dims H={problem.H} and Hv={problem.Hv}; it reads multiples of {UNIT}"
    return None


def widened(problem: Problem) -> Problem:
    """Returns the problem of keys and values in the queries' dtype; itself where they have it."""
    return dataclasses.replace(problem, kv_dtype=problem.dtype) if problem.has_narrow_keys else problem


def widened_operands(problem: Problem, operands: Operands) -> Operands:
    """Returns the operands of `widened`: keys and values that are no `Paged`, converted."""
    return operands._replace(k=operands.k.astype(problem.dtype), v=operands.v.astype(problem.dtype))


def remark(problem: Problem) -> str | None:
    """Returns what is copied where keys of 8 bits are converted, in words; None of other keys."""
    return f"converts keys and values to {problem.dtype} once" if problem.has_narrow_keys else None
