"""Measures one case of overhead.py in a process of its own, and prints it as JSON. The library is what is imported first.

Uses only the library's public functions, so that it runs in older and newer trees alike.
"""

import functools
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

_AGAIN = 5  # further traces
_BATCHES, _CALLS = 20, 100


def _seconds(run):
    """(CPU seconds, what `run` returns)."""
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


def _import():
    import pallas_fa

    return pallas_fa


def _attention(library, implementation, gradients):
    attend = functools.partial(library.dot_product_attention, is_causal=True, implementation=implementation)

    def run(q, k, v):
        if not gradients:
            return attend(q, k, v)
        return jax.vjp(attend, q, k, v)[1](q)

    return run


def _tracing(library, implementation, gradients):
    """CPU milliseconds to trace and to lower a call: the first in the process, and the median once caches are empty."""
    x = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16)
    platform = "cuda" if implementation == "mosaic_gpu" else "cpu"
    traces, lowerings = [], []
    for _ in range(1 + _AGAIN):
        jax.clear_caches()
        function = jax.jit(_attention(library, implementation, gradients))
        seconds, traced = _seconds(functools.partial(function.trace, x, x, x))
        traces.append(seconds)
        lowerings.append(_seconds(functools.partial(traced.lower, lowering_platforms=(platform,)))[0])
    found = {"first trace": traces[0], "trace": statistics.median(traces[1:])}
    found |= {"first lowering": lowerings[0], "lowering": statistics.median(lowerings[1:])}
    return {f"{name}, ms": 1e3 * seconds for name, seconds in found.items()}


def _dispatch(library):
    """Microseconds a call of a tiny problem, the best batch: jitted, without jit, and a jitted sum for comparison."""
    q = jnp.ones((1, 1, 1, 8), jnp.float32)
    attend = functools.partial(library.dot_product_attention, implementation="xla")
    found = {}
    for name, function, calls in (
        ("jitted sum, us", jax.jit(lambda q, k, v: q + k + v), _CALLS),
        ("jitted call, us", jax.jit(attend), _CALLS),
        ("call without jit, us", attend, 5),
    ):
        jax.block_until_ready(function(q, q, q))
        best = float("inf")
        for _ in range(_BATCHES):
            start = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(function(q, q, q))
            best = min(best, (time.perf_counter() - start) / calls)
        found[name] = best * 1e6
    return found


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("One case, which benchmarks.overhead names: run that.")
    case = sys.argv[1]
    seconds, library = _seconds(_import)
    found: dict[str, Any] = {"file": library.__file__}
    if case == "import":
        found["import after jax, ms"] = seconds * 1e3
    elif case == "dispatch":
        found |= _dispatch(library)
    else:
        implementation, _, direction = case.partition(" ")
        jax.jit(lambda x: x + 1).trace(jnp.ones(3)).lower()  # JAX's own start is not the library's
        found |= _tracing(library, implementation, direction == "gradients")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
