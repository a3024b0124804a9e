"""Times one decoding step: few queries of each sequence against its cache of keys and values.

usage: python -m benchmarks.decode [--rows NAME ...] [--implementations NAME ...] [--tiles W,KV,STAGES,SPLITS ...]
                                   [--rounds N] [--commit HASH] [--out FILE]

Steps take less time than the host needs to start them, so they are chained in one program: the queries of a step are made
of the output of the step before. Caches that the GPU's own cache could hold are several in turn. Each row says how many of
the cache's bytes within the lengths and the window a second read, and what part of the memory's speed that is.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_fa
from benchmarks import machine
from benchmarks.measure import error_text
from pallas_fa import masks

MEMORY_BYTES_PER_S = 4.8e12  # of an H200
_CACHE_BYTES = 256 * 2**20  # keys and values of all sets in turn: several times what a GPU's L2 cache holds


@dataclasses.dataclass(frozen=True)
class Step:
    """T queries of each of B sequences, N heads on K, with S keys; `length` of them real, `window` of these seen."""

    B: int
    S: int
    N: int = 32
    K: int = 8
    H: int = 128
    T: int = 1
    length: int | None = None
    window: int | None = None

    @property
    def keys(self) -> int:
        """How many keys a query sees."""
        return min(self.length or self.S, self.window or self.S)

    @property
    def bytes(self) -> int:
        """Of the keys and values that must be read."""
        return 2 * 2 * self.B * min(self.keys + self.T - 1, self.length or self.S) * self.K * self.H


STEPS = {
    "b64-s8k": Step(64, 8192),
    "b32-s4k": Step(32, 4096),
    "b8-s32k": Step(8, 32768),
    "64-heads-b16-s4k": Step(16, 4096, N=64),
    "b1-s64k": Step(1, 65536),
    "4-key-heads-b1-s128k": Step(1, 131072, K=4),
    "b1-s4k": Step(1, 4096),
    "b64-lengths-4k-of-8k": Step(64, 8192, length=4096),
    "gpt-oss-window-s128": Step(64, 128, N=64, H=64),
    "gpt-oss-window-s32k": Step(64, 32768, N=64, H=64, length=32768, window=128),
    "t4-b8-s32k": Step(8, 32768, T=4),
    "t16-b8-s32k": Step(8, 32768, T=16),
    "mha-b8-s4k": Step(8, 4096, N=16, K=16),
}


def attend(name: str, step: Step, config: Any) -> Callable[[Any, Any, Any], Any]:
    """Returns a function (q, k, v) -> out of an implementation."""
    library, _, backend = name.partition(":")
    peer: Any = jax.nn.dot_product_attention  # takes any name, and says which it knows
    lengths = None if step.length is None else jnp.full((step.B,), step.length, jnp.int32)
    if library == "jax.nn":
        if step.T > 1:
            raise NotImplementedError("jax.nn has no bottom-right alignment")
        window = None if step.window is None else (step.window - 1, 0)
        if window:
            raise NotImplementedError("jax.nn counts a window from key 0")
        return lambda q, k, v: peer(q, k, v, key_value_seq_lengths=lengths, implementation=backend)
    mask = masks.Causal(align="bottom_right") if step.T > 1 or step.window else None
    if step.window:
        assert mask is not None and step.length is not None
        mask = mask & masks.Window(step.window - 1, None, offset=jnp.full((step.B,), step.length - step.T, jnp.int32))
    return lambda q, k, v: pallas_fa.dot_product_attention(
        q, k, v, mask=mask, key_value_seq_lengths=lengths, implementation=backend, config=config
    )


def chained(fn: Callable[[Any, Any, Any], Any], repeats: int) -> Callable[[Any, Any], Any]:
    """Returns a program of `repeats` steps on each of the caches in turn, each with queries made of the output before."""

    def program(q, caches):
        def body(_, q):
            for k, v in caches:
                q = (q + fn(q, k, v)) * jnp.asarray(0.7, q.dtype)
            return q

        return lax.fori_loop(0, repeats, body, q)

    return jax.jit(program)


def caches_of(step: Step) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns (queries, caches), random normal."""
    whole = 2 * 2 * step.B * step.S * step.K * step.H
    count = max(1, min(16, -(-_CACHE_BYTES // whole)))
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(0), 2 * count + 1))
    shape = (step.B, step.S, step.K, step.H)
    return draw(next(keys), (step.B, step.T, step.N, step.H)), [
        (draw(next(keys), shape), draw(next(keys), shape)) for _ in range(count)
    ]


def error_of(fn: Callable[[Any, Any, Any], Any], step: Step, q: Any, k: Any, v: Any) -> float:
    """Returns the largest error of the first sequence over the largest element of the truth, the definition in float32."""
    out = fn(q, k, v)[:1].astype(jnp.float32)
    one = dataclasses.replace(step, B=1)
    truth = attend("pallas_fa:reference", one, None)(*(x[:1].astype(jnp.float32) for x in (q, k, v)))
    return float(jnp.abs(out - truth).max() / jnp.abs(truth).max())


def copy_rate() -> float:
    """Bytes a second that copying an array reads and writes."""
    x = jnp.ones((2**29,), jnp.bfloat16)
    copy = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, x: lax.optimization_barrier(-x), x))
    jax.block_until_ready(copy(x))
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(copy(x))
        samples.append((time.perf_counter() - start) / 10)
    return 2 * x.nbytes / min(samples)


def measure(name: str, step: Step, candidates: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each of the implementations, timed in turn."""
    q, caches = caches_of(step)
    estimate = max(step.bytes / 2.5e12, 5e-6) * len(caches)
    repeats = max(2, int(0.02 / estimate))
    rows, programs = [], {}
    for label, (implementation, config) in candidates.items():
        row: dict[str, Any] = dict(
            suite="decode", workload=name, implementation=label, **dataclasses.asdict(step), bytes=step.bytes
        )
        row["caches"] = len(caches)
        rows.append(row)
        try:
            fn = attend(implementation, step, config)
            row["max_error"] = error_of(jax.jit(fn), step, q, *caches[0])
            program = chained(fn, repeats).lower(q, caches).compile()
            jax.block_until_ready(program(q, caches))
            programs[label] = program
        except Exception as error:  # what a library raises is this row's result
            row["error"] = error_text(error)
    samples = {label: [] for label in programs}
    for _ in range(rounds):
        for label, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(q, caches))
            samples[label].append((time.perf_counter() - start) / (repeats * len(caches)))
    for row in rows:
        if row["implementation"] in samples:
            seconds = statistics.median(samples[row["implementation"]])
            rate = step.bytes / seconds
            row |= dict(us=seconds * 1e6, bytes_per_s=rate, of_memory=rate / MEMORY_BYTES_PER_S)
    return rows


def _tiles(text):
    from pallas_fa.backends.hopper.config import Config, ForwardConfig

    wgs, block_kv, stages, splits = map(int, text.split(","))
    forward = ForwardConfig(wgs, block_kv, stages, pin_softmax=False, kv_splits=splits)
    return f"tiles {text}", ("pallas_fa:mosaic_gpu", Config(forward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME")
    default = ["pallas_fa:None", "jax.nn:cudnn", "jax.nn:xla"]
    parser.add_argument("--implementations", nargs="+", default=default, metavar="NAME")
    parser.add_argument("--tiles", nargs="+", type=_tiles, default=[], metavar="W,KV,STAGES,SPLITS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default=machine.commit())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about: dict[str, Any] = dict(run=run, device=machine.device_kind(), versions=machine.versions(), commit=args.commit)
    about["copy_bytes_per_s"] = copy_rate()
    print(f"copy: {about['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    candidates = {}
    for name in args.implementations:
        library, _, backend = name.partition(":")
        candidates[name] = (name, None) if backend != "None" else (f"{library}:mosaic_gpu", None)
    candidates |= dict(args.tiles)
    rows = []
    for name in args.rows:
        for row in measure(name, STEPS[name], candidates, args.rounds):
            rows.append(row | about)
            told = row.get("error") or f"{row['us']:9.1f} us {row['of_memory']:6.1%}  error {row['max_error']:.4f}"
            print(f"{name:22} {row['implementation']:22} {told[:110]}", flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
