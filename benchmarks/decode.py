"""Times one decoding step: few queries of each sequence against its cache of keys and values.

usage: python -m benchmarks.decode [--rows NAME ...] [--implementations NAME ...] [--tiles W,KV,STAGES,SPLITS ...]
                                   [--rounds N] [--commit HASH] [--out FILE] [--turn FILE]
                                   [--processes N]

Steps take less time than the host needs to start them, so they are chained in one program: the queries of a step are made
of the output of the step before. Caches that the GPU's own cache could hold are several in turn. Each row says how many of
the cache's bytes within the lengths and the window a second read, and what part of the memory's speed that is. Steps that
name page sizes are also timed with the same cache in pages, which lie in random order, and all but those of latent attention
with the same cache in float8, in one piece and in pages. Latent attention (MLA) computes more for each byte; its rows count
TFLOP/s.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import command, processes, progress, turns
from benchmarks.decode_steps import PAGES, STEPS, Attend, Step, attend, page_table
from benchmarks.implementations import Implementation, parse
from benchmarks.measure import error_text
from benchmarks.rows import Row, common

MEMORY_BYTES_PER_S = 4.8e12  # of an H200
_IMPLEMENTATIONS = "pallas_fa:None", "jax.nn:cudnn", "jax.nn:xla", "dew_flash_attn:fa3"
_STEPS_A_TURN = 16
_CACHE_BYTES = 256 * 2**20  # keys and values of all sets in turn: several times what a GPU's L2 cache holds


def first_sequence(step: Step, x: Any) -> Any:
    """Returns keys or values [1, S, K, H] of the first sequence."""
    if step.page is None:
        return x[:1]
    return x.reshape(-1, step.page, step.K, step.H)[page_table(step)[0]].reshape(1, step.S, step.K, step.H)


def chained(fn: Attend, repeats: int) -> Callable[[Any, Any], Any]:
    """Returns a program of `repeats` steps on each of the caches in turn; the queries of each are the output before."""

    step = jax.jit(fn)  # lowered once

    def program(q, caches):
        def body(_, q):
            for cache in caches:
                out = step(q, *cache)
                # No kernel for the chain, or in latent attention one that writes an element.
                q = out if out.shape == q.shape else q.at[0, 0, 0, 0].set(out[0, 0, 0, 0])
            return q

        return lax.fori_loop(0, repeats, body, q)

    return jax.jit(program)


def caches_of(step: Step) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Returns (queries, caches), random normal; a cache is (keys, values, lengths or None)."""
    whole = 2 * 2 * step.B * step.S * step.K * step.H
    count = max(1, min(16, -(-_CACHE_BYTES // whole)))
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(0), 2 * count + 1))
    shape = (step.B, step.S, step.K, step.H)
    of_values = shape if step.Hv is None else (step.B, step.S, 1, 1)  # in latent attention they are columns of the keys
    lengths = None if step.length is None else jnp.full((step.B,), step.length, jnp.int32)
    kept = lambda shape: draw(next(keys), shape).astype(step.kv_dtype)
    queries = draw(next(keys), (step.B, step.T, step.N, step.H))
    return queries, [(kept(shape), kept(of_values), lengths) for _ in range(count)]


def in_turn(caches: list[Any]) -> list[Any]:
    """Returns the caches of one turn of the loop, each maybe several times: XLA runs kernels of its own for each turn."""
    return caches * max(1, _STEPS_A_TURN // len(caches))


def error_of(fn: Attend, step: Step, q: Any, k: Any, v: Any, lengths: Any) -> float:
    """Returns the largest error of the first sequence over the largest element of the truth, the definition in float32."""
    out = fn(q, k, v, lengths)[:1].astype(jnp.float32)
    one = dataclasses.replace(step, B=1, page=None, kv_dtype="bfloat16")
    arrays = (x.astype(jnp.float32) for x in (q[:1], first_sequence(step, k), first_sequence(step, v)))
    truth = attend(parse("pallas_fa:reference"), one)(*arrays, None if lengths is None else lengths[:1])
    return float(jnp.abs(out - truth).max() / jnp.abs(truth).max())


def memory_rates() -> dict[str, float]:
    """Bytes a second that copying an array reads and writes, and that adding up its elements reads."""
    x = jnp.ones((2**29,), jnp.bfloat16)
    repeat = lambda body, start: jax.jit(lambda x: lax.fori_loop(0, 30, lambda _, y: body(x, y), start(x)))
    copy = repeat(lambda x, y: lax.optimization_barrier(-y), lambda x: x)
    read = repeat(lambda x, y: (x * y).sum(dtype=jnp.float32).astype(x.dtype), lambda x: x[0])

    def rate(fn, nbytes):
        jax.block_until_ready(fn(x))
        samples = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(fn(x))
            samples.append((time.perf_counter() - start) / 30)
        return nbytes / min(samples)

    return dict(copy_bytes_per_s=rate(copy, 2 * x.nbytes), read_bytes_per_s=rate(read, x.nbytes))


@dataclasses.dataclass
class Prepared:
    """The programs of a step, compiled, with what each computes, and the rows of all that were asked for, by label."""

    repeats: int
    rows: dict[str, Row]
    programs: dict[str, tuple[Any, Step]]


def prepare(name: str, candidates: dict[str, Implementation], about: dict[str, Any]) -> Prepared:
    """Compiles a step by each of the implementations, and compares it with the truth; `about` is what all rows say."""
    step = STEPS[name]
    made = {kv_dtype: caches_of(dataclasses.replace(step, kv_dtype=kv_dtype)) for kv_dtype in _dtypes(step)}
    estimate = max(step.bytes / 2.5e12, step.flops / 4e14, 5e-6) * len(in_turn(made[step.kv_dtype][1]))
    found = Prepared(max(2, int(0.02 / estimate)), {}, {})
    calls = {label: (implementation, step) for label, implementation in candidates.items()}
    for kv_dtype in _dtypes(step)[1:]:
        calls[kv_dtype] = parse("pallas_fa:mosaic_gpu"), dataclasses.replace(step, kv_dtype=kv_dtype)
    for page, kv_dtype in itertools.product(PAGES.get(name, ()), _dtypes(step)):
        in_pages = dataclasses.replace(step, page=page, kv_dtype=kv_dtype)
        dtype = "" if kv_dtype == step.kv_dtype else f"{kv_dtype}, "
        calls[f"{dtype}pages of {page}"] = parse("pallas_fa:mosaic_gpu"), in_pages
        if "pallas_fa:mma" in candidates:
            calls[f"mma, {dtype}pages of {page}"] = parse("pallas_fa:mma"), in_pages
    for label, (implementation, call) in calls.items():
        q, caches = made[call.kv_dtype]
        row = about | dict(workload=name, implementation=label, error=None) | dataclasses.asdict(call)
        found.rows[label] = row | dict(bytes=call.bytes, caches=len(caches))
        try:
            fn = attend(implementation, call)
            found.rows[label]["max_error"] = error_of(jax.jit(fn), call, q, *caches[0])
            found.programs[label] = chained(fn, found.repeats).lower(q, in_turn(caches)).compile(), call
        except Exception as error:  # what a library raises is this row's result
            found.rows[label]["error"] = error_text(error)
    return found


def _dtypes(step):
    """Of the caches of a step, the usual one first."""
    return (step.kv_dtype,) if step.Hv else (step.kv_dtype, "float8_e4m3fn")


def timed(prepared: Prepared, rounds: int) -> list[Row]:
    """Returns the rows, timed in turn."""
    made, samples, turn_of = {}, {}, {}
    for label, (program, step) in prepared.programs.items():
        if step.kv_dtype not in made:
            q, caches = caches_of(dataclasses.replace(step, page=None))
            made[step.kv_dtype] = q, in_turn(caches)
        turn_of[label] = made[step.kv_dtype]
        try:
            jax.block_until_ready(program(*turn_of[label]))
            samples[label] = []
        except Exception as error:  # as above
            prepared.rows[label]["error"] = error_text(error)
    for _ in range(rounds):
        for label in samples:
            start = time.perf_counter()
            jax.block_until_ready(prepared.programs[label][0](*turn_of[label]))
            samples[label].append((time.perf_counter() - start) / (prepared.repeats * len(turn_of[label][1])))
    for label, seconds in samples.items():
        step, median = prepared.programs[label][1], statistics.median(seconds)
        prepared.rows[label] |= dict(p50_ms=median * 1e3, of_memory=step.bytes / median / MEMORY_BYTES_PER_S)
        prepared.rows[label] |= dict(tflops_per_s=step.flops / median / 1e12)
    return list(prepared.rows.values())


def measured(args: argparse.Namespace, take_turn: Callable[[], float] | None = None) -> Iterator[Row]:
    """Compiles what the command line asks for, then times it, and makes the rows. `take_turn` waits for the turn to time."""
    about = common("decode", args.commit)
    candidates = {x.name: x for x in command.implementations(args, _IMPLEMENTATIONS)} | dict(args.tiles)
    prepared = []
    with progress.bar(len(args.rows), "compile") as bar:
        for name in args.rows:
            prepared.append(prepare(name, candidates, about))
            bar.update()
    (take_turn or functools.partial(turns.take, args.turn))()
    rates = memory_rates()
    yield from (row | rates for each in prepared for row in timed(each, args.rounds))


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    told = lambda row: (
        row["error"]
        or f"{row['p50_ms'] * 1e3:9.1f} us {row['of_memory']:6.1%} {row['tflops_per_s']:6.1f} TFLOP/s  error"
        f" {row['max_error']:.4f}"
    )
    return "\n".join(f"{row['workload']:22} {row['implementation']:22} {told(row)[:110]}" for row in rows)


def _tiles(text):
    from pallas_fa.backends.hopper.config import Config, ForwardConfig

    try:
        wgs, block_kv, stages, splits = map(int, text.split(","))
        forward = ForwardConfig(wgs, block_kv, stages, pin_softmax=False, kv_splits=splits)
    except ValueError as error:
        told = "ask for compute warpgroups, keys of a block, stages and splits, as in 1,64,4,1"
        raise argparse.ArgumentTypeError(f"{text!r}: {told} ({error})") from None
    return f"tiles {text}", Implementation("pallas_fa", "mosaic_gpu", "", Config(forward))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME")
    command.add_implementations(parser)
    parser.add_argument("--tiles", nargs="+", type=_tiles, default=[], metavar="W,KV,STAGES,SPLITS")
    command.add_rows(parser, rounds=7, out="decode")
    turns.add_turn(parser)
    processes.add_processes(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    produced = processes.shared_out(args, argv, measured, arguments, "rows")
    command.carry_out(produced, args.out, table, plot=False)


if __name__ == "__main__":
    command.start(main)
