"""Measures the jitted training step of a GPT with one attention or another: `python -m benchmarks.training`.

Model, parameters, batches and optimizer are the same for all attentions. First the time of a step at each context, in
turns; then the losses of the first steps at the first context, side by side.
"""

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks import loss_curves, machine, measure, progress, rows
from benchmarks.implementations import parse
from benchmarks.training_program import InitialParameters, Training
from models.data import Corpus, load_corpus
from models.errors import UsageError

_RESULTS = Path(__file__).parent / "results"
_COMPILE_SHARE = 0.5  # of the budget, until which compilations start
_GIVE_UP_SHARE = 0.65  # of the budget, until which they are waited for
_CURVES_WEIGHT = 3  # of the time that is left, to 1 for each context


@dataclasses.dataclass(frozen=True)
class TrainingSuite:
    """One model with several attentions, at several (batch, context)."""

    size: str
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    implementations: tuple[str, ...]
    baseline: str


SUITES = {
    "hopper": TrainingSuite(
        size="gpt2-medium",
        dtype="bfloat16",
        shapes=((16, 1024), (4, 4096), (1, 16384)),
        implementations=("jax.nn:cudnn", "pallas_fa:mosaic_gpu", "jax.nn:xla"),
        baseline="jax.nn:cudnn",
    ),
    "tiny": TrainingSuite(
        size="nano",
        dtype="float32",
        shapes=((4, 32), (2, 64)),
        implementations=("jax.nn:xla", "pallas_fa:xla"),
        baseline="jax.nn:xla",
    ),
}


def programs(suite: TrainingSuite, steps: int, corpus: Corpus) -> list[list[Training]]:
    """One group for each (batch, context): the step with each attention."""
    implementations, rate = [parse(name) for name in suite.implementations], loss_curves.learning_rate(steps)
    return [
        [
            Training(1, suite.size, *shape, suite.dtype, implementation, rate, corpus)
            for implementation in implementations
        ]
        for shape in suite.shapes
    ]


class Runner:
    """Times groups of compiled programs and trains with them, and makes their rows."""

    def __init__(self, rounds: int, target_s: float, baseline: str, end: float, bar: progress.Bar):
        self.rounds, self.target_s, self.baseline, self.end, self.bar = rounds, target_s, baseline, end, bar

    def all(self, groups: list[list[Training]], steps: int) -> Iterator[rows.Row]:
        """The times of each group, then the losses of the first."""
        for i, group in enumerate(groups):
            self.bar.set_postfix_str(f"context {group[0].context}")
            weight = len(groups) - i + (_CURVES_WEIGHT if steps else 0)
            yield from self.times(group, (self.end - time.monotonic()) / weight)
        if steps:
            self.bar.set_postfix_str("losses")
            yield from loss_curves.train(groups[0], self.baseline, steps, self.end, self.bar)

    def times(self, group: list[Training], share: float) -> list[rows.Row]:
        """All programs of one context run once, then in turns for about `share` seconds."""
        deadlines = time.monotonic() + share, self.end
        found = {id(program): program.known() for program in group}
        bounds = [bound for program in group if (bound := self._start(program, found[id(program)])) is not None]
        base = next((b for b in bounds if b.program.implementation.name == self.baseline), None)
        others = [b for b in bounds if b is not base]
        try:
            ratios = measure.take_turns(others, base, self.rounds, deadlines, after=self.bar.update)
        except Exception as error:  # after it ran twice; the other contexts go on
            for bound in bounds:
                found[id(bound.program)]["error"] = f"in turns: {measure.error_text(error)}"
                bound.program.end()
            ratios, bounds = {}, []
        state = {
            "load": machine.load(),
            "gpu_state": machine.gpu_state(),
            "compiling_beside": measure.still_compiling(),
        }
        for bound in bounds:
            program, name, row = bound.program, bound.program.implementation.name, found[id(bound.program)]
            row |= rows.times(bound) | rows.against(name, ratios.get(name, []), self.baseline if base else None)
            row |= program.figures(row["p50_ms"] / 1e3) | state
            program.end()
        return [rows.rounded(row) for row in found.values()]

    def _start(self, program: Training, row: rows.Row) -> measure.Bound[Training] | None:
        """First step and warm-up; None, with the reason in the row, where it can't be timed."""
        if program.error is None and time.monotonic() > self.end:
            row["error"] = "not run: the budget was spent"
        if row["error"]:
            return None
        try:
            bound = measure.Bound(program, [program.arguments()])
            _, row["first_call_s"] = bound.first()
            bound.warm_up(self.target_s, dispatches=0)
            return bound
        except Exception as error:  # out of memory, or what a library raises at run time: the row's result
            row["error"] = measure.error_text(error)
            program.end()
            return None


def table(found: list[rows.Row]) -> str:
    """The rows as text: the times, then the losses."""
    times = [["context", "batch", "implementation", "p50 ms", "p90", "tokens/s", "peak GiB", "x baseline"]]
    losses = [["losses at", "implementation", "steps", "first", "last", "max |diff|", "mean |diff|", ""]]
    for row in found:
        if row["kind"] == loss_curves.KIND:
            losses.append([str(row["context"]), row["implementation"], *_loss_cells(row)])
        else:
            times.append([str(row["context"]), str(row["batch"]), row["implementation"], *_time_cells(row)])
    return "\n\n".join(rows.aligned(lines) for lines in (times, losses) if len(lines) > 1)


def _time_cells(row):
    peak = f"{row['peak_bytes'] / 2**30:.3f}" if "peak_bytes" in row else ""
    if row["error"]:
        return ["-", "", "", peak, row["error"]]
    ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else ""
    return [f"{row['p50_ms']:.4g}", f"{row['p90_ms']:.4g}", f"{row['tokens_per_s']:.4g}", peak, ratio]


def _loss_cells(row):
    ends = [f"{row['losses'][i]:.4f}" for i in (0, -1)] if row["losses"] else ["", ""]
    apart = [f"{row[name]:.1e}" if name in row else "" for name in ("max_difference", "mean_difference")]
    return [str(len(row["losses"])), *ends, *apart, row["error"] or ""]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.devices()[0].platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    add = parser.add_argument
    add("--suite", choices=SUITES, default="tiny" if on_cpu else "hopper", help="default: %(default)s here")
    add("--contexts", nargs="+", type=int, metavar="TOKENS", help="only these of the suite")
    add("--implementations", nargs="+", metavar="LIBRARY:BACKEND[+FORM]", help="default: the suite's")
    add("--steps", type=int, default=200, help="of the loss curves; 0 for none (default: %(default)s)")
    add("--data", metavar="PATH", help="a file or folder of text (default: the Python standard library's sources)")
    add("--rounds", type=int, default=11, help="samples of each program (default: %(default)s)")
    add("--target-ms", type=float, default=400.0, help="least length of a sample (default: %(default)s)")
    add("--budget-seconds", type=float, default=540.0, help="wall-clock limit, kept to within a few steps")
    add("--compile-threads", type=int, default=1 if on_cpu else min(14, os.cpu_count() or 1))
    add("--commit", help="recorded where this is no git repository")
    add("--out", type=Path, help="default: benchmarks/results/DEVICE/training-SUITE.jsonl")
    add("--no-plot", action="store_true", help="do not draw the rows at the end")
    args = parser.parse_args(argv)
    if args.steps < 0 or args.rounds < 1:
        parser.error(f"--steps {args.steps} --rounds {args.rounds}: ask for 0 or more steps and 1 or more rounds.")
    return args


def chosen(args: argparse.Namespace) -> TrainingSuite:
    """The suite, or the part of it, that the command line asks for."""
    suite = SUITES[args.suite]
    known = {context: (batch, context) for batch, context in suite.shapes}
    contexts = args.contexts or list(known)
    if unknown := [context for context in contexts if context not in known]:
        raise SystemExit(f"--contexts {unknown}: the suite {args.suite} has {', '.join(map(str, known))}.")
    names = tuple(args.implementations or suite.implementations)
    try:
        [parse(name) for name in names]
    except ValueError as error:
        raise SystemExit(f"--implementations: {error}") from None
    return dataclasses.replace(suite, shapes=tuple(known[context] for context in contexts), implementations=names)


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Runs the command line; returns the rows."""
    args = arguments(argv)
    start = time.monotonic()
    suite = chosen(args)
    try:
        corpus = load_corpus(args.data, max(context for _, context in suite.shapes))
    except UsageError as error:
        raise SystemExit(f"{error}") from None
    groups = programs(suite, args.steps, corpus)
    out = args.out or _RESULTS / machine.folder() / f"training-{args.suite}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    common = rows.common(f"training-{args.suite}", now, args.commit)
    common |= {"compile_threads": args.compile_threads, "data_digest": corpus.digest()}
    # The baseline at all contexts first, then the next implementation: where the time ends, contexts can be compared.
    # Not before the baseline is ready: XLA tries out its matmuls while it compiles, and what it chose serves the others.
    first, *others = zip(*groups, strict=True)
    deadlines = [start + share * args.budget_seconds for share in (_COMPILE_SHARE, _GIVE_UP_SHARE)]
    for programs_of_stage in (
        [InitialParameters(suite.size), *first],
        [program for same in others for program in same],
    ):
        measure.compile_all(programs_of_stage, args.compile_threads, *deadlines)
    compiled = time.monotonic() - start

    made: list[rows.Row] = []
    with out.open("w") as file, progress.bar(len(groups) * args.rounds + args.steps, "run") as bar:
        runner = Runner(args.rounds, args.target_ms / 1e3, suite.baseline, start + args.budget_seconds, bar)
        try:
            for row in runner.all(groups, args.steps):
                made.append(common | row)
                file.write(json.dumps(made[-1]) + "\n")
                file.flush()
        except KeyboardInterrupt:
            print(f"\nInterrupted: the rows so far are in {out.name}.", file=sys.stderr)
    print(table(made))
    print(f"{len(made)} rows, {time.monotonic() - start:.0f} s, {compiled:.0f} of them to compile: {out.name}")
    if made and not args.no_plot:
        _draw(made, out)
    return made


def _draw(made: list[rows.Row], out: Path) -> None:
    try:
        from benchmarks import training_plot
    except ModuleNotFoundError as error:
        print(f"No plot: there is no {error.name} here. Draw it elsewhere: python -m benchmarks.plot {out.name}")
    else:
        training_plot.draw(made, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
    if measure.still_compiling():
        sys.stdout.flush()
        os._exit(0)  # the usual end waits for the compilation
