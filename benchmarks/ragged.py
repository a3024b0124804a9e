"""Times one call of ragged_paged_attention: queries of many sequences, any number of each, against keys in pages.

usage: python -m benchmarks.ragged [--batches NAME ...] [--rounds N] [--commit HASH] [--out FILE] [--turn FILE]
                                   [--processes N]

Calls are repeated in one program, the queries of each are the output of the one before. Pages lie in random order. Beside
the default stand blocks of 16 queries alone, and XLA.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_fa
from benchmarks import command, processes, turns
from benchmarks.measure import error_text
from benchmarks.rows import Row, common

_LABELS: dict[str, dict[str, Any]] = {
    "pallas_fa:None": {},
    "blocks of 16": {"num_queries_per_block": 16},
    "pallas_fa:xla": {"implementation": "xla"},
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences, each (queries, keys), with room for `tokens`, of N heads on K in pages of `page` rows."""

    sequences: tuple[tuple[int, int], ...]
    tokens: int
    N: int = 32
    K: int = 8
    H: int = 128
    page: int = 16

    @property
    def flops(self) -> int:
        """Of both matmuls, of the keys that each query sees."""
        return sum(4 * self.N * self.H * (T * S - T * (T - 1) // 2) for T, S in self.sequences)

    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments, random normal."""
        queries, keys = zip(*self.sequences, strict=True)
        pages = [-(-S // self.page) for S in keys]
        table = np.full((len(pages), max(pages)), -1)
        table[np.arange(max(pages)) < np.array(pages)[:, None]] = np.random.default_rng(0).permutation(sum(pages))
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        arrays = draw(0, self.tokens, self.N, self.H), draw(1, sum(pages), self.page, 2 * self.K, self.H)
        ints = keys, table, np.cumsum([0, *queries]), [len(keys)]
        return *arrays, *(jnp.asarray(x, jnp.int32) for x in ints)


BATCHES = {
    "decode": Batch(((1, 4096),) * 64, 64),
    "decode, room for 256": Batch(((1, 4096),) * 64, 256),
    "short prompts": Batch(((70, 500),) * 17, 1190),
    "prompts": Batch(((2048, 2048),) * 4, 8192),
    "one prompt": Batch(((4096, 4096),), 4096),
    "a chunk and decode": Batch(((512, 32768), *((1, 4096),) * 63), 575),
}


def call(batch: Batch, **options: Any) -> Callable[..., Any]:
    """Returns the call, a function of its positional arguments."""
    return functools.partial(pallas_fa.ragged_paged_attention, sm_scale=batch.H**-0.5, **options)


def error_of(batch: Batch, out: Any, q: Any, pages: Any, table: Any) -> float:
    """Returns the largest error of the last sequence's last queries over the largest element of the definition's result."""
    T, S = batch.sequences[-1]
    end, few = sum(T for T, _ in batch.sequences), min(T, 64)
    rows = pages[table[-1, : -(-S // batch.page)]].reshape(-1, batch.K, 2, batch.H)[:S].astype(jnp.float32)
    mask = pallas_fa.masks.Causal(align="bottom_right")
    own = q[end - few : end].astype(jnp.float32)
    truth = pallas_fa.dot_product_attention(own, rows[:, :, 0], rows[:, :, 1], mask=mask, implementation="reference")
    return float(abs(out[end - few : end] - truth).max() / abs(truth).max())


def repeated(fn: Callable[..., Any], repeats: int) -> Callable[..., Any]:
    """Returns a program of `repeats` calls."""
    return jax.jit(lambda q, *rest: lax.fori_loop(0, repeats, lambda _, q: fn(q, *rest), q))


def measured(args: argparse.Namespace, take_turn: Callable[[], float] | None = None) -> Iterator[Row]:
    """Compiles what the command line asks for, then times it, and makes the rows. `take_turn` waits for the turn to time."""
    about = common("ragged", args.commit)
    rows, programs = {}, {}
    for name in args.batches:
        batch = BATCHES[name]
        given, repeats = batch.arguments(), max(3, int(0.02 / max(batch.flops / 3e14, 3e-4)))
        for label, options in _LABELS.items():
            row = about | dict(workload=name, implementation=label, error=None, flops=batch.flops)
            rows[name, label] = row | dataclasses.asdict(batch)
            try:
                out = jax.jit(call(batch, **options))(*given)
                rows[name, label]["max_error"] = error_of(batch, out, given[0], given[1], given[3])
                count = repeats if label != "pallas_fa:xla" else 1
                programs[name, label] = repeated(call(batch, **options), count).lower(*given).compile(), count
            except Exception as error:  # what a call raises is this row's result
                rows[name, label]["error"] = error_text(error)
    (take_turn or functools.partial(turns.take, args.turn))()
    for name in args.batches:
        given = BATCHES[name].arguments()
        samples = {label: [] for label in _LABELS if (name, label) in programs}
        for _ in range(args.rounds + 1):  # the first warms up
            for label in samples:
                program, count = programs[name, label]
                start = time.perf_counter()
                jax.block_until_ready(program(*given))
                samples[label].append((time.perf_counter() - start) / count)
        for label, (_, *seconds) in samples.items():
            median = statistics.median(seconds)
            rows[name, label] |= dict(p50_ms=median * 1e3, tflops_per_s=BATCHES[name].flops / median / 1e12)
    yield from rows.values()


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    told = lambda row: (
        row["error"]
        or f"{row['p50_ms'] * 1e3:9.1f} us {row['tflops_per_s']:6.1f} TFLOP/s  error {row['max_error']:.4f}"
    )
    return "\n".join(f"{row['workload']:22} {row['implementation']:16} {told(row)[:110]}" for row in rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ragged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(BATCHES), metavar="NAME")
    command.add_rows(parser, rounds=7, out="ragged")
    turns.add_turn(parser)
    processes.add_processes(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    produced = processes.shared_out(args, argv, measured, arguments, "batches")
    command.carry_out(produced, args.out, table, plot=False)


if __name__ == "__main__":
    command.start(main)
