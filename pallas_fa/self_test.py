"""Checks the kernels on this machine's GPU, and times them: for GPUs on which no developer has run them yet.

usage: python -m pallas_fa.self_test [--implementation NAME] [--only errors|times]

It takes some minutes, and prints tables for an issue: relative errors of results and gradients against float64, computed on
the CPU, and TFLOP/s beside those of XLA and of cuDNN through `jax.nn`. The exit code is 1 if an error is too large.
"""

import argparse
import functools
import importlib.metadata
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa import masks, scores
from pallas_fa.api import dot_product_attention
from pallas_fa.backends.gpu.device import Gpu, cuda_devices

_FACTOR, _ROUNDING = 2, 2e-3  # how much larger than XLA's an error may be, and one rounding to bfloat16
_TOKENS, _FEATURES, _LENGTH = 16384, 2048, 4096  # of the timed calls: B * S, N * H, S
_SECONDS, _ROUNDS = 0.1, 5  # of a timing, and how many


class Case(NamedTuple):
    """A call whose errors are measured. `arrays`: keywords with gradients, by name, as functions of (rng, T, S, N)."""

    name: str
    T: int = 333
    S: int = 517
    N: int = 4
    K: int = 2
    H: int = 64
    Hv: int = 64
    keywords: Any = {}
    arrays: Any = {}


_SEGMENTS = {f"{name}_segment_ids": np.repeat(np.arange(3, dtype=np.int32), n)[None] for name, n in
             (("query", 111), ("key_value", 173))}  # fmt: skip
_BIAS = {"bias": lambda rng, T, S, N: rng.standard_normal((1, N, T, S))}
CASES = (
    Case("full"),
    Case("causal, lengths that fill tiles", 512, 512, keywords={"is_causal": True}),
    Case("causal, one query head per key head", K=4, keywords={"is_causal": True}),
    Case("window", keywords={"mask": masks.Causal(align="bottom_right") & masks.Window(100, 0)}),
    Case("segments, causal", S=519, keywords={**_SEGMENTS, "is_causal": True}),
    Case("lengths", keywords={"query_seq_lengths": np.array([200]), "key_value_seq_lengths": np.array([301])}),
    Case("dense mask", keywords={"mask": np.random.default_rng(1).random((1, 1, 333, 517)) < 0.7}),
    Case("bias", arrays=_BIAS),
    Case("soft cap, causal", keywords={"logits_soft_cap": 20.0, "is_causal": True}),
    Case("custom score", keywords={"score": scores.Custom(lambda x, b, n, t, s: x - 0.01 * abs(t - s))}),
    Case("sinks", arrays={"sinks": lambda rng, T, S, N: rng.standard_normal(N)}),
    Case(
        "dropout, causal", keywords={"dropout_rate": 0.2, "dropout_key": np.array([1, 2], np.uint32), "is_causal": True}
    ),
    Case("few queries", T=3, keywords={"mask": masks.Causal(align="bottom_right")}),
    Case("H=72, Hv=40, causal", H=72, Hv=40, keywords={"is_causal": True}),
    Case("H=128, causal", H=128, Hv=128, keywords={"is_causal": True}),
    Case("H=128, bias", H=128, Hv=128, arrays=_BIAS),
    Case("H=256, causal", H=256, Hv=256, keywords={"is_causal": True}),
)


def errors(case: Case, implementation: str) -> dict[str, float]:
    """Returns the relative Frobenius errors of the output and of each gradient, by name, in bfloat16 against float64."""
    rng = np.random.default_rng(0)
    shapes = (case.T, case.N, case.H), (case.S, case.K, case.H), (case.S, case.K, case.Hv)
    given = {name: rng.standard_normal((1, *x)) for name, x in zip(("query", "key", "value"), shapes, strict=True)}
    given |= {name: make(rng, case.T, case.S, case.N) for name, make in case.arrays.items()}
    rounded = {name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for name, x in given.items()}
    d_out = np.asarray(jnp.asarray(rng.standard_normal((1, case.T, case.N, case.Hv)), jnp.bfloat16), np.float64)

    def run(implementation, dtype):
        call = lambda arrays: dot_product_attention(**arrays, **case.keywords, implementation=implementation)

        @jax.jit
        def results(arrays, d_out):
            out, pullback = jax.vjp(call, arrays)
            return {"out": out} | {f"d_{name}": d for name, d in pullback(d_out)[0].items()}

        of_dtype = lambda x: jnp.asarray(x, dtype)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), results(*jax.tree.map(of_dtype, (rounded, d_out))))

    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        truth = run("reference", jnp.float64)
    found = run(implementation, jnp.bfloat16)
    return {name: float(np.linalg.norm(found[name] - x) / np.linalg.norm(x)) for name, x in truth.items()}


def error_table(implementation: str, cases: tuple[Case, ...] = CASES) -> Iterator[tuple[str, bool]]:
    """Yields lines of a Markdown table, and whether what the line says is well."""
    yield f"| case | {implementation}: largest error | xla: largest error | |", True
    yield "| --- | --- | --- | --- |", True
    for case in cases:
        try:
            ours, xla = errors(case, implementation), errors(case, "xla")
        except Exception as error:  # said in the table: the other cases still run
            yield f"| {case.name} | {type(error).__name__}: {str(error).splitlines()[0][:200]} | | FAILED |", False
            continue
        well = all(ours[name] <= _FACTOR * xla[name] + _ROUNDING for name in xla)
        worst = lambda found: max(found.items(), key=lambda x: math.inf if math.isnan(x[1]) else x[1])
        columns = (f"{value:.1e} ({name})" for name, value in map(worst, (ours, xla)))
        yield f"| {case.name} | {' | '.join(columns)} | {'' if well else 'FAILED'} |", well


def time_table(implementation: str) -> Iterator[str]:
    """Yields lines of a Markdown table of TFLOP/s, forward and backward; a causal mask counts as half of the logits."""
    peers = {
        implementation: functools.partial(dot_product_attention, implementation=implementation),
        "xla": functools.partial(dot_product_attention, implementation="xla"),
        "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    }
    yield f"| TFLOP/s | {' | '.join(f'{name}: forward, with backward' for name in peers)} |"
    yield "| --- " * (len(peers) + 1) + "|"
    for head_dim in (64, 128, 256):
        for is_causal in (False, True):
            shape = _TOKENS // _LENGTH, _LENGTH, _FEATURES // head_dim, head_dim
            flops = 4 * _TOKENS * _LENGTH * _FEATURES * (0.5 if is_causal else 1)
            arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]
            columns = [
                _column(functools.partial(attend, is_causal=is_causal), arrays, flops) for attend in peers.values()
            ]
            yield f"| H={head_dim}, {'causal' if is_causal else 'full'} | {' | '.join(columns)} |"


def _column(attend: Callable[..., Any], arrays: list[Any], flops: float) -> str:
    def gradients(q, k, v, d_out):
        return jax.vjp(attend, q, k, v)[1](d_out)

    try:
        forward = _seconds(jax.jit(attend), *arrays[:3])
        both = _seconds(jax.jit(gradients), *arrays)
    except Exception as error:  # cuDNN does not do every call on every GPU
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return f"{flops / forward / 1e12:.0f}, {3.5 * flops / both / 1e12:.0f}"


def _seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the median time of a call."""

    def of_calls(count):
        start = time.perf_counter()
        for _ in range(count):
            result = fn(*args)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    jax.block_until_ready(fn(*args))
    count = max(3, int(_SECONDS / of_calls(2)))
    return statistics.median(of_calls(count) for _ in range(_ROUNDS))


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser("python -m pallas_fa.self_test", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--implementation", default="mosaic_gpu", help="what to check (default: %(default)s)")
    parser.add_argument("--only", choices=("errors", "times"), help="one of the two tables")
    options = parser.parse_args(arguments)
    devices = cuda_devices()
    if not devices:
        print(
            "no CUDA GPU: install JAX with CUDA (pip install 'jax[cuda13]') on a machine that has one", file=sys.stderr
        )
        return 2
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("pallas_fa", "jax", "jaxlib"))
    print(f"{versions}, {devices[0].device_kind}, {Gpu.of(devices[0])}\n", flush=True)
    all_well = True
    if options.only != "times":
        for line, well in error_table(options.implementation):
            print(line, flush=True)
            all_well &= well
        print(
            "\nall errors are as small as they should be\n" if all_well else "\nSOME ERRORS ARE TOO LARGE\n", flush=True
        )
    if options.only != "errors":
        for line in time_table(options.implementation):
            print(line, flush=True)
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
