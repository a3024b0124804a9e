"""Measures attention on this machine: `python -m benchmarks.run --suite cpu`. docs/benchmarks.md explains the method."""

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import command, gate, machine, measure, processes, progress, row_file, rows, turns
from benchmarks.implementations import Implementation
from benchmarks.pytorch_flash import PytorchProgram
from benchmarks.suites import suites
from benchmarks.truth import Truth, truth
from benchmarks.workloads import FLOPS_FACTOR, Workload

_COMPILE_SHARE = 0.6  # of the budget, at most
_CHAIN_SECONDS, _LONGEST_CHAIN = 1e-3, 64  # the programs of chained suites repeat calls that take less
_AGREEMENT = 0.05  # of the largest value: results of a gate that differ by more are wrong
_DISPATCHES = 20  # calls of which the shortest is the row's `dispatch_us`


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.devices()[0].platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add = parser.add_argument
    add("--suite", choices=suites(), default="cpu" if on_cpu else "hopper-forward", help="default: %(default)s here")
    add("--workloads", nargs="+", metavar="NAME", help="only these of the suite")
    command.add_implementations(parser)
    add("--directions", nargs="+", choices=FLOPS_FACTOR, help="default: the suite's")
    add("--baseline", metavar="NAME", help="what ratios are taken to; default: the suite's")
    command.add_sampling(parser, rounds=11, target_ms=20.0)
    command.add_run(parser, budget_s=540.0, threads=1 if on_cpu else min(8, os.cpu_count() or 1), out="SUITE")
    add(
        "--max-temp-gib",
        type=command.not_negative,
        default=4.0 if on_cpu else 64.0,
        help="programs that need more temporary memory are not run (default: %(default)s here)",
    )
    command.add_plot(parser)
    turns.add_turn(parser)
    processes.add_processes(parser)
    args = parser.parse_args(argv)
    known = [w.name for w in suites()[args.suite].workloads]
    args.workloads = list(dict.fromkeys(args.workloads or known))
    if unknown := [name for name in args.workloads if name not in known]:
        parser.error(f"argument --workloads: {unknown}: the suite {args.suite} has {', '.join(known)}")
    args.implementations = command.implementations(args, suites()[args.suite].implementations)
    names = [i.name for i in args.implementations]
    if args.baseline is not None and args.baseline not in names:
        parser.error(f"argument --baseline: {args.baseline!r}: name one that is measured beside: {', '.join(names)}")
    return args


class Runner:
    """Times compiled programs, one workload after the other, and makes their rows."""

    def __init__(self, args: argparse.Namespace, baseline: str, common: rows.Row, end: float, bar: progress.Bar):
        self.args, self.baseline, self.common, self.end, self.bar = args, baseline, common, end, bar

    def all(self, groups: Sequence[list[measure.Program]]) -> Iterator[rows.Row]:
        """The rows of all groups, of which each gets an equal share of the time that is left."""
        workload, inputs, true = None, [], None
        affordable = 2**27 if jax.devices()[0].platform == "cpu" else 2**29
        for i, group in enumerate(groups):
            left = self.end - time.monotonic()
            runnable = group[0].workload.timed and any(p.error is None for p in group) and left > 0
            if group[0].workload is not workload and runnable:
                workload, inputs, true = group[0].workload, [], None  # frees the last workload's before making new ones
                inputs = measure.input_sets(workload)
                true = None if suites()[self.args.suite].gate else truth(workload, *inputs[0], affordable)
            self.bar.set_postfix_str(group[0].workload.name)
            yield from self.group(group, inputs, true, left / (len(groups) - i))

    def group(
        self, programs: list[measure.Program], inputs: Any, true: Truth | None, share: float
    ) -> Iterator[rows.Row]:
        """One workload in one direction: all programs run once and checked, then timed in turns for `share` seconds."""
        found: dict[int, rows.Row] = {id(p): self.common | rows.compiled(p) for p in programs}
        if suites()[self.args.suite].gate:
            for p in programs:
                found[id(p)]["runs"] = gate.runs(p.implementation, p.workload)
        bounds = []
        self.agreed: dict[str, Any] | None = None  # the results of the first program that ran
        for program in programs:
            if (bound := self._start(program, inputs, true, found[id(program)])) is not None:
                bounds.append(bound)
        base = next((b for b in bounds if b.program.implementation.name == self.baseline), None)
        others = [b for b in bounds if b is not base]
        deadlines = time.monotonic() + share, self.end
        ratios = measure.take_turns(others, base, self.args.rounds, deadlines, after=self.bar.update)
        state = {"load": machine.load(), "gpu_state": machine.gpu_state()}
        for bound in bounds:
            name = bound.program.implementation.name
            found[id(bound.program)] |= rows.timed(bound, ratios.get(name, []), self.baseline if base else None) | state
        yield from found.values()

    def _start(self, program, inputs, true, row) -> measure.Bound[measure.Program] | None:
        """First run, check and warm-up; None, with the reason in the row, where it cannot be timed."""
        temp = program.memory.get("temp", 0)
        if program.error is None and not program.workload.timed:
            row["error"] = "not run: this workload is compiled for its memory only"
        elif program.error is None and temp > self.args.max_temp_gib * 2**30:
            row["error"] = f"not run: needs {temp / 2**30:.1f} GiB of temporary memory"

        def check(outputs):
            if suites()[self.args.suite].gate:
                row["error"] = self._difference(program.results(outputs))
            if true is not None and program.implementation.computes_the_workload:
                row.update(rows.accuracy(true.errors(program.results(outputs)), len(true.rows)))
                row["error"] = None if row["max_error"] is not None else "wrong: not finite where the truth is"

        bind = functools.partial(program.bind, inputs)
        return measure.start(bind, row, self.end, self.args.target_ms / 1e3, check, _DISPATCHES)

    def _difference(self, results) -> str | None:
        """Whether these are the results of the group's first program: else an error. The truth would take longer."""
        if self.agreed is None:
            self.agreed = results
            return None
        far = {name: float(rows.distance(x, self.agreed[name])) for name, x in results.items()}
        wrong = [f"{name} by {x:.2g}" for name, x in far.items() if not x < _AGREEMENT]
        return f"wrong: differs from the first: {', '.join(wrong)}" if wrong else None


def programs_of(
    workloads: Sequence[Workload],
    directions: Sequence[str],
    implementations: Sequence[Implementation],
    repeats: Callable[[Workload, str], int] = lambda workload, direction: 1,
) -> list[list[measure.Program]]:
    """Groups of programs: one group for each workload and direction that any of them applies to."""
    groups = [
        [_program(i)(i, w, direction, repeats(w, direction)) for i in implementations if i.applies(w)]
        for w in workloads
        for direction in directions
        if w.gradient or direction == "forward"
    ]
    return [group for group in groups if group]


def _program(implementation):
    return PytorchProgram if implementation.library == "torch" else measure.Program


def _repeats(workload: Workload, direction: str) -> int:
    """How many calls a program chains: so many that it lasts longer than its dispatch."""
    rate = 100e12 if workload.dtype == "float32" else 400e12
    seconds = max(workload.flops(direction) / rate, workload.bytes(direction) / 4e12, 5e-6)
    return max(1, min(_LONGEST_CHAIN, round(_CHAIN_SECONDS / seconds)))


def measured(args: argparse.Namespace, take_turn: Callable[[], float] | None = None) -> Iterator[rows.Row]:
    """Compiles what the command line asks for, then times it, and makes the rows.

    `take_turn` waits for the turn to time, and returns when it ends; the default waits for `--turn`.
    """
    start = time.monotonic()
    suite = suites()[args.suite]
    workloads = {w.name: w for w in suite.workloads}
    repeats = {"repeats": _repeats} if suite.chained else {}
    chosen = [workloads[name] for name in args.workloads]
    groups = programs_of(chosen, args.directions or suite.directions, args.implementations, **repeats)
    common = rows.common(args.suite, args.commit) | {"compile_threads": args.compile_threads}
    programs = [program for group in groups for program in group]
    measure.compile_all(programs, args.compile_threads, start + _COMPILE_SHARE * args.budget_seconds)
    end = take_turn() if take_turn else start + turns.take(args.turn) + args.budget_seconds
    with progress.bar(len(groups) * args.rounds, "time") as bar:
        runner = Runner(args, args.baseline or suite.baseline, common, end, bar)
        yield from runner.all(groups)


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Runs the command line; returns the rows."""
    args = arguments(argv)
    produced = processes.shared_out(args, argv, measured, arguments, "workloads", args.budget_seconds)
    out = args.out or row_file.RESULTS / machine.folder() / f"{args.suite}.jsonl"
    table = functools.partial(rows.table, baseline=args.baseline or suites()[args.suite].baseline)
    if not suites()[args.suite].gate:
        return command.carry_out(produced, out, table, plot=not args.no_plot)
    judged = lambda found: f"{table(found)}\n{gate.report(gate.verdicts(found))}"
    found = command.carry_out(produced, out, judged, plot=False)
    if any(verdict.below for verdict in gate.verdicts(found)):
        raise SystemExit(1)
    return found


if __name__ == "__main__":
    command.start(main)
