"""Attention of few queries: the forward kernel on rows, with the keys in parts, and the merge of the partial results."""

import functools
from typing import Any

from pallas_fa.backends.gpu import few_queries
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.head_dims import padded_forward
from pallas_fa.backends.hopper.decode.choose import choose
from pallas_fa.backends.hopper.forward.forward import run
from pallas_fa.problem import Operands, Problem


@padded_forward
def decode(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the problem's layout, log-sum-exp [B, T, N] float32); arguments as of `forward`."""
    return few_queries.attend(problem, operands, functools.partial(choose, gpu=gpu, interpret=interpret), run)
