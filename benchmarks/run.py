"""Measures attention on this machine: `python -m benchmarks.run --suite cpu`. README.md explains method and rows."""

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, measure, progress, rows
from benchmarks.implementations import Implementation, installed, parse
from benchmarks.truth import Truth, truth
from benchmarks.workloads import FLOPS_FACTOR, Suite, Workload, suites

_RESULTS = Path(__file__).parent / "results"
_COMPILE_SHARE = 0.6  # of the budget, at most


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.devices()[0].platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add = parser.add_argument
    add("--suite", choices=suites(), default="cpu" if on_cpu else "hopper-forward", help="default: %(default)s here")
    add("--workloads", nargs="+", metavar="NAME", help="only these of the suite")
    add("--implementations", nargs="+", metavar="LIBRARY:BACKEND[+FORM]", help="default: the suite's")
    add("--directions", nargs="+", choices=FLOPS_FACTOR, help="default: the suite's")
    add("--baseline", metavar="NAME", help="what ratios are taken to; default: the suite's")
    add("--rounds", type=int, default=11, help="samples of each program (default: %(default)s)")
    add("--target-ms", type=float, default=20.0, help="least length of a sample (default: %(default)s)")
    add("--budget-seconds", type=float, default=540.0, help="wall-clock limit, kept to within a call or a compilation")
    add("--max-temp-gib", type=float, default=4.0 if on_cpu else 64.0, help="programs that need more are not run")
    add("--compile-threads", type=int, default=1 if on_cpu else min(8, os.cpu_count() or 1))
    add("--commit", help="recorded where this is no git repository")
    add("--out", type=Path, help="default: benchmarks/results/DEVICE/SUITE.jsonl")
    add("--no-plot", action="store_true", help="do not draw the rows at the end")
    return parser.parse_args(argv)


class Runner:
    """Times compiled programs, one workload after the other, and hands on each row as it is made."""

    def __init__(
        self, args: argparse.Namespace, baseline: str, common: rows.Row, end: float, emit: Callable[..., None]
    ):
        self.args, self.baseline, self.common, self.end, self.emit = args, baseline, common, end, emit

    def group(
        self, programs: list[measure.Program], inputs: Any, true: Truth | None, share: float, bar: progress.Bar
    ) -> None:
        """One workload in one direction: all programs run once and checked, then timed in turns for `share` seconds."""
        found: dict[int, rows.Row] = {id(p): self.common | rows.compiled(p) for p in programs}
        bounds = []
        for program in programs:
            if (bound := self._start(program, inputs, true, found[id(program)])) is not None:
                bounds.append(bound)
        base = next((b for b in bounds if b.program.implementation.name == self.baseline), None)
        others = [b for b in bounds if b is not base]
        deadlines = time.monotonic() + share, self.end
        ratios = measure.take_turns(others, base, self.args.rounds, deadlines, after=bar.update)
        state = {"load": machine.load(), "gpu_state": machine.gpu_state()}
        for bound in bounds:
            name = bound.program.implementation.name
            found[id(bound.program)] |= rows.timed(bound, ratios.get(name, []), self.baseline if base else None) | state
        for row in found.values():
            self.emit(row)

    def _start(self, program, inputs, true, row) -> measure.Bound[measure.Program] | None:
        """First run, check and warm-up; None, with the reason in the row, where it cannot be timed."""
        temp = program.memory.get("temp", 0)
        if program.error:
            return None
        if not program.workload.timed:
            row["error"] = "not run: this workload is compiled for its memory only"
        elif temp > self.args.max_temp_gib * 2**30:
            row["error"] = f"not run: needs {temp / 2**30:.1f} GiB of temporary memory"
        elif time.monotonic() > self.end:
            row["error"] = "not run: the budget was spent"
        if row["error"]:
            return None
        try:
            bound = program.bind(inputs)
            outputs, row["first_call_s"] = bound.first()
            if true is not None:
                row |= rows.accuracy(true.errors(program.results(outputs)), len(true.rows))
                row["error"] = None if row["max_error"] is not None else "wrong: not finite where the truth is"
            del outputs
            bound.warm_up(self.args.target_ms / 1e3)
            return bound
        except Exception as error:  # out of memory, or what the library raises at run time: the row's result
            row["error"] = measure.error_text(error)
            return None


def programs_of(
    workloads: Sequence[Workload], directions: Sequence[str], implementations: Sequence[Implementation]
) -> list[list[measure.Program]]:
    """Groups of programs: one group for each workload and direction."""
    return [
        [measure.Program(i, w, direction) for i in implementations if i.applies(w)]
        for w in workloads
        for direction in directions
    ]


def chosen(args: argparse.Namespace, suite: Suite) -> tuple[list[Workload], list[Implementation], str]:
    """(workloads, implementations, name of the baseline) that the command line asks for."""
    workloads = list(suite.workloads)
    if args.workloads:
        known = {w.name: w for w in workloads}
        if unknown := [name for name in args.workloads if name not in known]:
            raise SystemExit(f"--workloads {unknown}: the suite {args.suite} has {', '.join(known)}.")
        workloads = [known[name] for name in args.workloads]
    named = args.implementations or [name for name in suite.implementations if installed(parse(name).library)]
    try:
        implementations = [parse(name) for name in named]
    except ValueError as error:
        raise SystemExit(f"--implementations: {error}") from None
    return workloads, implementations, args.baseline or suite.baseline


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Runs the command line; returns the rows."""
    args = arguments(argv)
    start = time.monotonic()
    end = start + args.budget_seconds
    suite = suites()[args.suite]
    workloads, implementations, baseline = chosen(args, suite)
    groups = programs_of(workloads, args.directions or suite.directions, implementations)
    out = args.out or _RESULTS / machine.folder() / f"{args.suite}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    run = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    common = rows.common(args.suite, run, args.commit) | {"compile_threads": args.compile_threads}
    programs = [program for group in groups for program in group]
    measure.compile_all(programs, args.compile_threads, start + _COMPILE_SHARE * args.budget_seconds)

    made: list[rows.Row] = []
    with out.open("w") as file, progress.bar(len(groups) * args.rounds, "time") as bar:

        def emit(row):
            made.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        try:
            _time_all(Runner(args, baseline, common, end, emit), groups, bar)
        except KeyboardInterrupt:
            print(f"\nInterrupted: the rows so far are in {out.name}.", file=sys.stderr)
    print(rows.table(made, baseline))
    print(f"{len(made)} rows, {time.monotonic() - start:.0f} s, load {machine.load()}: {out.parent.name}/{out.name}")
    if not args.no_plot and made:
        from benchmarks import plot

        plot.draw(made, out.with_suffix(".png"))
    return made


def _time_all(runner: Runner, groups: list[list[measure.Program]], bar: progress.Bar) -> None:
    workload, inputs, true = None, [], None
    affordable = 2**27 if jax.devices()[0].platform == "cpu" else 2**29
    for i, group in enumerate(groups):
        if not group:
            continue
        left = runner.end - time.monotonic()
        runnable = group[0].workload.timed and any(p.error is None for p in group) and left > 0
        if group[0].workload is not workload and runnable:
            workload, inputs, true = group[0].workload, [], None  # frees the last workload's before making new ones
            inputs = measure.input_sets(workload)
            true = truth(workload, *inputs[0], affordable)
        bar.set_postfix_str(group[0].workload.name)
        runner.group(group, inputs, true, left / (len(groups) - i), bar)


if __name__ == "__main__":
    main()
