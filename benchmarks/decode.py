"""Times one decoding step: few queries of each sequence against its cache of keys and values.

usage: python -m benchmarks.decode [--rows NAME ...] [--implementations NAME ...] [--tiles W,KV,STAGES,SPLITS[,CTAS] ...]
                                   [--rounds N] [--commit HASH] [--out FILE]

Steps take less time than the host needs to start them, so they are chained in one program: the queries of a step are made
of the output of the step before. Caches that the GPU's own cache could hold are several in turn. Each row says how many of
the cache's bytes within the lengths and the window a second read, and what part of the memory's speed that is. Steps that
name page sizes are also timed with the same cache in pages, which lie in random order. Latent attention (MLA) computes more
for each byte; its rows count TFLOP/s.
"""

import argparse
import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_fa
from benchmarks import command, machine, row_file
from benchmarks.implementations import Implementation, parse
from benchmarks.measure import error_text
from benchmarks.rows import Row
from pallas_fa import masks

MEMORY_BYTES_PER_S = 4.8e12  # of an H200
_IMPLEMENTATIONS = "pallas_fa:None", "jax.nn:cudnn", "jax.nn:xla", "dew_flash_attn:fa3"
_LATENT_SCALE = 192**-0.5  # of DeepSeek-V3
_CACHE_BYTES = 256 * 2**20  # keys and values of all sets in turn: several times what a GPU's L2 cache holds


@dataclasses.dataclass(frozen=True)
class Step:
    """T queries of each of B sequences, N heads on K, with S keys; `length` of them real, `window` of these seen.

    `page`: rows of a page, for a cache in pages; None for one in one piece. `Hv`: columns of the keys that are values, in
    latent attention; None where values are an array of their own. `sinks`: heads have sinks.
    """

    B: int
    S: int
    N: int = 32
    K: int = 8
    H: int = 128
    T: int = 1
    length: int | None = None
    window: int | None = None
    page: int | None = None
    Hv: int | None = None
    sinks: bool = False

    @property
    def keys(self) -> int:
        """How many keys a query sees."""
        return min(self.length or self.S, self.window or self.S)

    @property
    def bytes(self) -> int:
        """Of the keys and values that must be read."""
        rows = self.B * min(self.keys + self.T - 1, self.length or self.S) * self.K
        return 2 * rows * (2 * self.H if self.Hv is None else self.H)

    @property
    def flops(self) -> int:
        """Of both matmuls."""
        return 2 * self.B * self.T * self.N * self.keys * (self.H + (self.Hv or self.H))


STEPS = {
    "b64-s8k": Step(64, 8192),
    "b32-s4k": Step(32, 4096),
    "b8-s32k": Step(8, 32768),
    "64-heads-b16-s4k": Step(16, 4096, N=64),
    "b1-s64k": Step(1, 65536),
    "4-key-heads-b1-s128k": Step(1, 131072, K=4),
    "b1-s4k": Step(1, 4096),
    "b64-lengths-4k-of-8k": Step(64, 8192, length=4096),
    "gpt-oss-window-s128": Step(64, 128, N=64, H=64, length=128, window=128, sinks=True),
    "gpt-oss-window-s32k": Step(64, 32768, N=64, H=64, length=32768, window=128, sinks=True),
    "t4-b8-s32k": Step(8, 32768, T=4),
    "t16-b8-s32k": Step(8, 32768, T=16),
    "mha-b8-s4k": Step(8, 4096, N=16, K=16),
    "mla-b64-s8k": Step(64, 8192, N=128, K=1, H=576, Hv=512),
    "mla-b4-s8k": Step(4, 8192, N=128, K=1, H=576, Hv=512),
    "cache-b32-s4k": Step(32, 4096, length=4096),
    "cache-b8-s32k": Step(8, 32768, length=32768),
}
NAMED = {"mla-b64-s8k": ("pallas_fa:mosaic_gpu",), "mla-b4-s8k": ("pallas_fa:mosaic_gpu",)}  # beside the default
PAGES = {"cache-b32-s4k": (16, 32, 64, 128, 256), "cache-b8-s32k": (16, 32, 64, 128, 256)}


Attend = Callable[..., Any]  # (q, k, v, lengths) -> out; lengths are None where all keys are real


def attend(implementation: Implementation, step: Step) -> Attend:
    """Returns the function of an implementation."""
    if step.Hv is not None:
        return _attend_latent(implementation, step)
    if implementation.library != "pallas_fa":
        return _attend_peer(implementation, step)
    bottom_right = masks.Causal(align="bottom_right") if step.T > 1 or step.window else None
    common: dict[str, Any] = dict(implementation=implementation.backend, config=implementation.config)
    common["sinks"] = jnp.linspace(-1, 1, step.N) if step.sinks else None

    def ours(q, k, v, lengths):
        mask = bottom_right
        if step.window:
            assert mask is not None
            mask = mask & masks.Window(step.window - 1, None, offset=lengths - step.T)
        if step.page is None:
            return pallas_fa.dot_product_attention(q, k, v, mask=mask, key_value_seq_lengths=lengths, **common)
        k, v = (x.reshape(-1, step.page, step.K, step.H) for x in (k, v))
        return pallas_fa.paged_attention(q, k, v, page_table(step), lengths, mask=mask, **common)

    return ours


def _attend_latent(implementation, step):
    backend = implementation.backend
    if implementation.library == "pallas_fa":
        common: dict[str, Any] = dict(scale=_LATENT_SCALE, value_dim=step.Hv, implementation=backend)
        return lambda q, k, v, lengths: pallas_fa.mla_decode_attention(q, k[:, :, 0], lengths=lengths, **common)
    peer = _peer(implementation)
    return lambda q, k, v, lengths: peer(q, k, k[..., : step.Hv], scale=_LATENT_SCALE, implementation=backend)


def _attend_peer(implementation, step):
    name, backend, peer = implementation.library, implementation.backend, _peer(implementation)
    if step.window or step.sinks:
        raise NotImplementedError(f"{name} counts a window from key 0, or has no sinks")
    if name == "dew_flash_attn":
        if step.length is not None:
            raise NotImplementedError("dew_flash_attn has no lengths of caches")
        return lambda q, k, v, lengths: peer(q, k, v, is_causal=step.T > 1)  # aligned bottom-right
    if step.T > 1:
        raise NotImplementedError("jax.nn has no bottom-right alignment")
    return lambda q, k, v, lengths: peer(q, k, v, key_value_seq_lengths=lengths, implementation=backend)


def _peer(implementation) -> Any:
    if implementation.library == "dew_flash_attn":
        from dew_flash_attn import flash_mha  # pyright: ignore[reportMissingImports]

        return flash_mha
    return jax.nn.dot_product_attention


def page_table(step: Step) -> Any:
    """Returns the table [B, S / page] of pages in random order, as caches whose sequences have grown together have them."""
    assert step.page is not None
    count = step.B * step.S // step.page
    return jax.random.permutation(jax.random.key(1), count).astype(jnp.int32).reshape(step.B, -1)


def first_sequence(step: Step, x: Any) -> Any:
    """Returns keys or values [1, S, K, H] of the first sequence."""
    if step.page is None:
        return x[:1]
    return x.reshape(-1, step.page, step.K, step.H)[page_table(step)[0]].reshape(1, step.S, step.K, step.H)


def chained(fn: Attend, repeats: int) -> Callable[[Any, Any], Any]:
    """Returns a program of `repeats` steps on each of the caches in turn, each with queries made of the output before."""

    def program(q, caches):
        def body(_, q):
            for cache in caches:
                out = fn(q, *cache)
                out = jnp.pad(out, [(0, 0)] * 3 + [(0, q.shape[-1] - out.shape[-1])])  # of latent attention
                q = (q + out) * jnp.asarray(0.7, q.dtype)
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
    return draw(next(keys), (step.B, step.T, step.N, step.H)), [
        (draw(next(keys), shape), draw(next(keys), of_values), lengths) for _ in range(count)
    ]


def error_of(fn: Attend, step: Step, q: Any, k: Any, v: Any, lengths: Any) -> float:
    """Returns the largest error of the first sequence over the largest element of the truth, the definition in float32."""
    out = fn(q, k, v, lengths)[:1].astype(jnp.float32)
    one = dataclasses.replace(step, B=1, page=None)
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


def measure(
    name: str, step: Step, candidates: dict[str, Implementation], rounds: int, about: dict[str, Any]
) -> list[Row]:
    """Returns a row for each of the implementations, timed in turn; `about` is what all rows say."""
    q, caches = caches_of(step)
    estimate = max(step.bytes / 2.5e12, 5e-6) * len(caches)
    repeats = max(2, int(0.02 / estimate))
    rows: dict[str, Row] = {}
    programs = {}
    candidates = candidates | {label: parse(label) for label in NAMED.get(name, ())}
    calls = {label: (implementation, step) for label, implementation in candidates.items()}
    for page in PAGES.get(name, ()):
        calls[f"pages of {page}"] = parse("pallas_fa:mosaic_gpu"), dataclasses.replace(step, page=page)
    for label, (implementation, call) in calls.items():
        row = about | dict(workload=name, implementation=label, error=None) | dataclasses.asdict(call)
        rows[label] = row | dict(bytes=step.bytes, caches=len(caches))
        try:
            fn = attend(implementation, call)
            rows[label]["max_error"] = error_of(jax.jit(fn), call, q, *caches[0])
            program = chained(fn, repeats).lower(q, caches).compile()
            jax.block_until_ready(program(q, caches))
            programs[label] = program
        except Exception as error:  # what a library raises is this row's result
            rows[label]["error"] = error_text(error)
    samples = {label: [] for label in programs}
    for _ in range(rounds):
        for label, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(q, caches))
            samples[label].append((time.perf_counter() - start) / (repeats * len(caches)))
    for label, seconds in samples.items():
        rate = step.bytes / statistics.median(seconds)
        rows[label] |= dict(p50_ms=statistics.median(seconds) * 1e3, of_memory=rate / MEMORY_BYTES_PER_S)
        rows[label] |= dict(tflops_per_s=step.flops / statistics.median(seconds) / 1e12)
    return list(rows.values())


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

    wgs, block_kv, stages, splits, *ctas = map(int, text.split(","))
    forward = ForwardConfig(wgs, block_kv, stages, pin_softmax=False, kv_splits=splits, stream_k=sum(ctas))
    return f"tiles {text}", Implementation("pallas_fa", "mosaic_gpu", "", Config(forward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME")
    command.add_implementations(parser)
    parser.add_argument("--tiles", nargs="+", type=_tiles, default=[], metavar="W,KV,STAGES,SPLITS[,CTAS]")
    parser.add_argument("--rounds", type=command.positive, default=7)
    parser.add_argument("--commit", default=machine.commit())
    parser.add_argument("--out", type=Path, default=row_file.RESULTS / machine.folder() / "decode.jsonl")
    args = parser.parse_args()
    candidates = {x.name: x for x in command.implementations(args, _IMPLEMENTATIONS)} | dict(args.tiles)
    about: dict[str, Any] = dict(
        suite="decode",
        run=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=machine.device_kind(),
        versions=machine.versions(),
        commit=args.commit,
        **memory_rates(),
    )
    produced = (row for name in args.rows for row in measure(name, STEPS[name], candidates, args.rounds, about))
    command.carry_out(produced, args.out, table, plot=False)


if __name__ == "__main__":
    command.start(main)
