"""Measures how attention and training scale over the devices of this host: `python -m benchmarks.distributed.scaling`.

docs/scaling.md says what the rows are for, and comms_model.py reads them.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, machine, measure, progress, row_file, rows
from benchmarks.distributed.scaling_programs import Attention, Kernel, Link
from benchmarks.measure import Measured
from benchmarks.training_program import InitialParameters, SideBySide, Training
from benchmarks.workloads import Workload, self_attention

_COMPILE_SHARE = 0.7  # of the budget, at most
DIRECTIONS = ("forward", "fwdbwd")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is. Attention is causal, with one batch entry."""

    link_bytes: tuple[int, ...]
    blocks: tuple[int, ...]
    lengths: tuple[int, ...]
    N: int
    H: int
    dtype: str
    model: str
    batches: tuple[int, ...]  # sequences on each device in training
    context: int
    training_s: float  # least length of a sample in training: at full power a GPU's clock takes a second to settle

    def workload(self, S: int, causal: bool) -> Workload:
        return self_attention(f"{S}", B=1, S=S, N=self.N, H=self.H, causal=causal, dtype=self.dtype)


SIZES = {
    "hopper": Sizes(
        link_bytes=tuple(2**n for n in (12, 16, 20, 22, 24, 26, 28)),
        blocks=(512, 2048, 8192, 32768),
        lengths=(2**16, 2**17),
        N=16,
        H=128,
        dtype="bfloat16",
        model="gpt2-medium",
        batches=(16, 32),
        context=1024,
        training_s=6.0,
    ),
    "tiny": Sizes(
        link_bytes=(2**10, 2**14),
        blocks=(8, 16),
        lengths=(64,),
        N=4,
        H=8,
        dtype="float32",
        model="nano",
        batches=(2,),
        context=32,
        training_s=0.0,
    ),
}


def programs(sizes: Sizes, devices: int, kinds: Sequence[str]) -> list[list[Measured]]:
    """Groups of programs; those of a group are timed in turns, the first of them on the fewest devices."""
    several = [n for n in (2, 4, 8) if n <= devices]
    groups: list[list[Measured]] = []
    for n in several:
        for collective in ("ppermute", "all_to_all"):
            groups.append([Link(n, collective, size) for size in sizes.link_bytes])
    for direction in DIRECTIONS:
        groups.append([Kernel(1, sizes.workload(block, causal=False), direction) for block in sizes.blocks])
    for S in sizes.lengths:
        workload = sizes.workload(S, causal=True)
        for direction in DIRECTIONS:
            spread = [(n, way) for n in several for way in ("ring", "all_to_all")]
            groups.append([Attention(n, way, workload, direction) for n, way in [(1, "plain"), *spread]])
    for batch in sizes.batches:
        at = (sizes.model, batch, sizes.context, sizes.dtype)
        counts = [n for n in dict.fromkeys((*several, devices)) if n > 1]
        groups.append([Training(1, *at), *(way(n, *at) for n in counts for way in (SideBySide, Training))])
    return [group for group in groups if group[0].kind in kinds]


def compile_all(groups: list[list[Measured]], threads: int, deadline: float) -> None:
    """Compiles everything: first training on one device, by itself, then the rest, the longest first.

    XLA tries out matmuls while it compiles. What it chose for the step on one device serves those on several; tried out
    side by side, the same matmul can come out differently in each.
    """
    everything = [program for group in groups for program in group]
    training = [program for program in everything if isinstance(program, Training)]
    for program in training:
        if program.devices == 1:
            measure.compile_all([program], 1, deadline)
    starts = [InitialParameters(size) for size in {program.size for program in training}]
    several = [program for program in training if program.devices > 1]
    others = [program for program in everything if not isinstance(program, Training)]
    measure.compile_all([*starts, *several, *others], threads, deadline)


class Runner:
    """Times groups of compiled programs, and makes their rows."""

    def __init__(self, rounds: int, target_s: float, sizes: Sizes, end: float):
        self.rounds, self.end = rounds, end
        self.target_s, self.training_s = target_s, max(target_s, sizes.training_s)
        self.checked = sizes.lengths[0]

    def group(self, programs: Sequence[Measured], after: Callable[[], object] = lambda: None) -> list[rows.Row]:
        """All programs run once, then in turns; `after` is called after each round."""
        found = {id(p): p.known() for p in programs}
        bounds, truth = [], None
        for program in programs:
            row = found[id(program)]

            def check(outputs, program=program, row=row):
                nonlocal truth
                if not isinstance(program, Attention) or program.workload.S != self.checked:
                    return
                results = program.results(outputs)
                if program.devices == 1:
                    truth = results
                elif truth is not None:
                    row["max_error"] = max_error(results, truth)

            target_s = self.training_s if program.kind == Training.kind else self.target_s
            if (bound := measure.start(program.bind, row, self.end, target_s, check)) is not None:
                bounds.append(bound)
        for _ in range(self.rounds):
            for bound in bounds:
                if time.monotonic() < self.end:
                    bound.sample()
            after()
        state = {"load": machine.load(), "gpu_state": machine.gpu_state()}
        for bound in bounds:
            found[id(bound.program)] |= _timed(bound, bounds) | state
            bound.program.release()
        return [rows.rounded(row) for row in found.values()]


def max_error(results: dict[str, Any], truth: dict[str, Any]) -> float:
    """Of all results: the largest difference over the largest value of the truth, which is that of one device.

    Raises FloatingPointError where a result is not finite.
    """

    @jax.jit
    def of_one(x, true):
        x, true = (a.astype(jnp.float32) for a in (x, true))
        return jnp.abs(x - true).max() / jnp.abs(true).max()

    errors = {name: float(of_one(results[name], truth[name])) for name in truth}
    if not np.isfinite(list(errors.values())).all():
        raise FloatingPointError(f"wrong: not finite, as the errors say: {errors}")
    return max(errors.values())


def _timed(bound: measure.Bound[Measured], group: list[measure.Bound[Measured]]) -> rows.Row:
    """Times in milliseconds, of one hop or call; against others of the group, where these do the same thing."""
    program, ours = bound.program, np.median(bound.wall)
    row = rows.times(bound, program.repeats) | program.figures(float(ours) / program.repeats)
    for other in group:
        ratio = float(np.median(other.wall) / ours)
        if isinstance(program, Attention) and other.program.devices == 1:
            row["speedup"] = ratio
        elif isinstance(program, Training) and other.program.devices == 1:  # each device has as much to do as the one
            row["speedup"] = ratio * program.devices
        elif isinstance(other.program, SideBySide) and other.program.devices == program.devices:
            row["of_linear"] = ratio
    return row


def table(found: list[rows.Row]) -> str:
    """The rows as text."""
    return "\n".join(_line(row) for row in found)


def _line(row: rows.Row) -> str:
    names = ("collective", "way", "direction", "size")
    what = " ".join(str(row[name]) for name in names if name in row)
    size = (
        f"{row['bytes']} B" if "bytes" in row else f"S={row['shape']['S']}" if "shape" in row else f"B={row['batch']}"
    )
    start = f"{row['kind']:9}  {row['devices']} devices  {what:20}  {size:12}"
    if row.get("p50_ms") is None:
        return f"{start}  {row['error'] or 'not timed'}"
    units = {
        "gb_per_s": "GB/s",
        "tflops": "TFLOP/s each",
        "tokens_per_s": "tokens/s",
        "speedup": "x one device",
        "of_linear": "of side by side",
    }
    figures = [f"{row[name]:.4g} {unit}" for name, unit in units.items() if name in row]
    figures += [f"{row['temp_bytes'] / 2**20:.1f} MiB temp"] if row["kind"] in ("attention", "training") else []
    figures += [f"error {row['max_error']:.1e}"] if row.get("max_error") is not None else []
    return f"{start}  {row['p50_ms']:9.4g} ms  " + "  ".join(figures)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.devices()[0].platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.scaling", description=__doc__)
    add = parser.add_argument
    add("--suite", choices=SIZES, default="tiny" if on_cpu else "hopper", help="default: %(default)s here")
    add(
        "--devices",
        type=command.positive,
        default=jax.device_count(),
        help="up to how many (default: all, %(default)s here)",
    )
    add("--only", nargs="+", choices=_KINDS, default=_KINDS, metavar="KIND", help=f"of {', '.join(_KINDS)}")
    command.add_sampling(parser, rounds=5, target_ms=300.0)  # calls on several devices start slowly
    threads = 1 if on_cpu else min(16, os.cpu_count() or 1)
    command.add_run(parser, budget_s=480.0, threads=threads, out="scaling-SUITE")
    args = parser.parse_args(argv)
    if args.devices > jax.device_count():
        parser.error(f"argument --devices: {args.devices}: there are {jax.device_count()} here")
    return args


_KINDS = tuple(kind.kind for kind in (Link, Kernel, Attention, Training))


def measured(args: argparse.Namespace) -> Iterator[rows.Row]:
    """Compiles what the command line asks for, then times it, and makes the rows."""
    start = time.monotonic()
    sizes = SIZES[args.suite]
    groups = programs(sizes, args.devices, args.only)
    common = rows.common("scaling", args.commit) | {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    compile_all(groups, args.compile_threads, start + _COMPILE_SHARE * args.budget_seconds)
    runner = Runner(args.rounds, args.target_ms / 1e3, sizes, start + args.budget_seconds)
    with progress.bar(len(groups), "time") as bar:
        for group in groups:
            for row in runner.group(group):
                yield common | row
            bar.update()


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Runs the command line; returns the rows."""
    args = arguments(argv)
    out = args.out or row_file.RESULTS / machine.folder() / f"scaling-{args.suite}.jsonl"
    return command.carry_out(measured(args), out, table, plot=False)


if __name__ == "__main__":
    command.start(main)
