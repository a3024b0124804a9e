"""Programs lowered for CUDA, which needs no GPU."""

from collections.abc import Callable
from typing import Any

import jax


def kernels(fn: Callable[..., Any], *args: Any) -> int:
    """How many GPU kernels are in the program that `fn` lowers to."""
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @mosaic_gpu")
