"""Times the generation of text, end to end: `python -m benchmarks.generation`.

The decoder of models/ with random weights, greedy, as `python -m models.generate` runs it: a step is one call from the host,
whose tokens the host reads while the next one runs. Prompts are read by ours in all cases; the attention of the steps is
that of each implementation. They take turns, in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import command, machine
from benchmarks.implementations import Implementation
from benchmarks.measure import error_text
from benchmarks.rows import Row, common
from models.decoder import Decoder
from models.gpt import GPT, SIZES, Cache, GPTConfig
from models.sample import Sampling
from models.step import Params
from pallas_fa.cache import KeyValueCache

_IMPLEMENTATIONS = "pallas_fa:None", "jax.nn:cudnn", "jax.nn:xla"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerCache(KeyValueCache):
    """A cache to which single queries attend by `jax.nn.dot_product_attention`."""

    backend: str = dataclasses.field(metadata=dict(static=True))

    def attend(self, query: Any, mask: Any = None, *, lengths: Any = None, **arguments: Any) -> Any:
        if query.shape[1] > 1:
            return super().attend(query, mask, lengths=lengths, **arguments)
        peer: Any = jax.nn.dot_product_attention  # takes any name, and says which it knows
        return peer(query, self.key, self.value, key_value_seq_lengths=self.lengths, implementation=self.backend)


class PeerDecoder(Decoder):
    """A decoder whose steps have the attention of `jax.nn`."""

    backend = "xla"

    def empty_caches(self, lengths: Sequence[int]) -> tuple[Cache, ...]:
        caches = super().empty_caches(lengths)
        names = [field.name for field in dataclasses.fields(KeyValueCache)]
        return tuple(PeerCache(**{name: getattr(x, name) for name in names}, backend=self.backend) for x in caches)


def make_decoder(config: GPTConfig, params: Params, implementation: Implementation) -> Decoder:
    """The decoder with an implementation."""
    if implementation.library == "pallas_fa":
        return Decoder(dataclasses.replace(config, implementation=implementation.backend), params, Sampling(0))
    decoder = PeerDecoder(config, params, Sampling(0))
    decoder.backend = implementation.backend or "xla"
    return decoder


def step_bytes(config: GPTConfig, params: Params, batch: int, keys: float) -> float:
    """What a step must read: all matrices, and keys and values of `keys` tokens of each sequence."""
    itemsize = np.dtype(config.dtype).itemsize
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)
    return itemsize * (matrices + 2 * config.layers * config.kv_heads * config.head_dim * batch * keys)


def seconds_a_step(decoder: Decoder, prompts: Sequence[list[int]], count: int) -> float:
    """Of all steps but the reading of the prompts."""
    tokens = decoder.tokens(prompts, count, seed=0)
    next(tokens)
    start = time.perf_counter()
    for _ in tokens:
        pass
    return (time.perf_counter() - start) / (count - 1)


def measure(
    config: GPTConfig, candidates: Sequence[Implementation], batch: int, length: int, count: int, rounds: int
) -> Iterator[Row]:
    """Yields a row for each implementation: `batch` prompts of `length` tokens, each with `count` tokens more."""
    params = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(key)))))(jax.random.key(0))
    prompts = np.random.default_rng(0).integers(0, config.vocab, (batch, length)).tolist()
    rows: dict[Implementation, Row] = {}
    for each in candidates:
        rows[each] = dict(workload=f"b{batch}", implementation=each.name, batch=batch, prompt=length, steps=count - 1)
        rows[each] |= dict(error=None, bytes=step_bytes(config, params, batch, length + count / 2))

    def compiled(implementation):
        try:
            decoder = make_decoder(config, params, implementation)
            for _ in itertools.islice(decoder.tokens(prompts, count, seed=0), 3):
                pass
            return decoder
        except Exception as error:  # what a library raises is this row's result
            rows[implementation]["error"] = error_text(error)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        decoders = {
            x: decoder for x, decoder in zip(candidates, threads.map(compiled, candidates), strict=True) if decoder
        }
    samples = {x: [] for x in decoders}
    for _ in range(rounds):
        for each, decoder in decoders.items():
            samples[each].append(seconds_a_step(decoder, prompts, count))
    for each, found in samples.items():
        seconds = statistics.median(found)
        rows[each] |= dict(p50_ms=seconds * 1e3, tokens_per_s=batch / seconds, load=machine.load())
    yield from rows.values()


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    told = lambda row: row["error"] or f"{row['tokens_per_s']:10,.0f} tokens/s {row['p50_ms']:8.3f} ms a step"
    return "\n".join(f"{row['workload']:6} {row['implementation']:22} {told(row)[:110]}" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="gpt2-medium")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batches", nargs="+", type=command.positive, default=[1, 64])
    parser.add_argument("--prompt", type=command.positive, help="tokens of each prompt (default: half the context)")
    parser.add_argument("--tokens", type=command.positive, help="drawn after each prompt (default: half the context)")
    command.add_implementations(parser)
    command.add_rows(parser, rounds=5, out="generation")
    args = parser.parse_args(argv)
    config = dataclasses.replace(SIZES[args.size], dtype=jax.numpy.dtype(args.dtype))
    half = config.context // 2
    length, count = args.prompt or half, (args.tokens or half) + 1  # the first comes with the reading of the prompt
    if length > config.context:
        parser.error(f"argument --prompt: {length}: the context of --size {args.size} is {config.context} tokens")
    about = common("generation", args.commit) | dict(size=args.size, dtype=args.dtype)
    candidates = command.implementations(args, _IMPLEMENTATIONS)
    produced = (
        about | row for batch in args.batches for row in measure(config, candidates, batch, length, count, args.rounds)
    )
    command.carry_out(produced, args.out, table, plot=False)


if __name__ == "__main__":
    command.start(main)
