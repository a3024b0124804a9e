"""Keys and values of 8 bits, which some kernels read as they are, and which others are given converted.

The kernel by `mma.sync` for few queries reads them (`mma.narrow`): there the time is that of reading. On Hopper the forward
kernel does, too (`hopper.narrow`). For more queries to keys in one piece XLA converts them once (evidence:
decode/narrow-keys). Those in pages are never copied.

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
    if not converts(gpu):
        return f"{what} on a GPU of compute capability {gpu.compute_capability}; it reads them from 8.9 on"
    from pallas_fa.backends.gpu import few_queries  # which imports Pallas

    if not few_queries.taken_by_mma(problem):
        return f"{what}; only its kernel for few queries reads them, and it does not take this call"
    if problem.H % UNIT or problem.Hv % UNIT:
        return f"{what} with head dims H={problem.H} and Hv={problem.Hv}; it reads multiples of {UNIT}"
    return None


def converts(gpu: Gpu) -> bool:
    """Whether a GPU has instructions that convert such numbers."""
    of_one_kind = re.fullmatch(r"(\d+)\.(\d+)", gpu.compute_capability)  # or those of GPUs that differ
    return of_one_kind is not None and tuple(map(int, of_one_kind.groups())) >= (8, 9)


def widened(problem: Problem) -> Problem:
    """Returns the problem of keys and values in the queries' dtype; itself where they have it."""
    return dataclasses.replace(problem, kv_dtype=problem.dtype) if problem.has_narrow_keys else problem


def converted(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Returns `widened` with its operands, of which XLA converts keys and values; no `Paged` of 8 bits."""
    if not problem.has_narrow_keys:
        return problem, operands
    k, v = (x.astype(problem.dtype) for x in (operands.k, operands.v))
    return widened(problem), operands._replace(k=k, v=v)


def remark(problem: Problem, kernels: Problem) -> str | None:
    """Returns what is copied where kernels solve `kernels` in the place of `problem`, in words; None where nothing is."""
    return f"converts keys and values to {kernels.kv_dtype} once" if kernels.kv_dtype != problem.kv_dtype else None
