"""Programs lowered for CUDA, which needs no GPU, and how long lowering takes."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def kernels(fn: Callable[..., Any], *args: Any) -> int:
    """How many GPU kernels are in the program that `fn` lowers to."""
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @mosaic_gpu")


def time_in_calls_of_jax_nn(lower: Callable[[], Any], rounds: int) -> float:
    """How often jax.nn's call is traced and lowered in the time of `lower()`: the median of `rounds`, after a warm-up.

    In turn and for the same time each, in CPU seconds of this thread, because how fast a shared machine is changes from
    moment to moment; without garbage collection, which would go through what other tests have left. jax.nn's takes 14 ms on
    two idle cores of 2.5 GHz.
    """
    x = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.float32)

    def peer():  # a new function each time, of which JAX has nothing cached
        jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)).lower(x, x, x)

    def seconds(fn):
        start = time.thread_time()
        fn()
        return time.thread_time() - start

    def quotient():
        ours, theirs = seconds(lower), []
        while sum(theirs) < ours:
            theirs.append(seconds(peer))
        return ours / statistics.mean(theirs)

    gc.disable()
    try:
        return statistics.median([quotient() for _ in range(rounds + 1)][1:])
    finally:
        gc.enable()
