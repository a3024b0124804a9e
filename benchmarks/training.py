"""Measures the jitted training step of a GPT with one attention or another: `python -m benchmarks.training`.

Model, parameters, batches and optimizer are the same for all attentions. First the time of a step at each context, in
turns; then the losses of the first steps at the first context, side by side.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence

import jax

from benchmarks import command, loss_curves, machine, measure, progress, row_file, rows
from benchmarks.implementations import Implementation
from benchmarks.training_program import InitialParameters, Training
from models.data import Corpus, load_corpus
from models.errors import UsageError

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
    "mma": TrainingSuite(  # what the kernels for other GPUs train to, beside Hopper's; a peer says how far bfloat16 differs
        size="small",
        dtype="bfloat16",
        shapes=((16, 512),),
        implementations=("pallas_fa:mosaic_gpu", "pallas_fa:mma", "jax.nn:cudnn"),
        baseline="pallas_fa:mosaic_gpu",
    ),
    "tiny": TrainingSuite(
        size="nano",
        dtype="float32",
        shapes=((4, 32), (2, 64)),
        implementations=("jax.nn:xla", "pallas_fa:xla"),
        baseline="jax.nn:xla",
    ),
}


def programs(
    suite: TrainingSuite, implementations: Sequence[Implementation], steps: int, corpus: Corpus
) -> list[list[Training]]:
    """One group for each (batch, context): the step with each attention."""
    rate = loss_curves.learning_rate(steps)
    return [
        [Training(1, suite.size, *shape, suite.dtype, i, rate, corpus) for i in implementations]
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
        bounds = []
        for program in group:
            if (bound := measure.start(program.bind, found[id(program)], self.end, self.target_s)) is not None:
                bounds.append(bound)
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
    command.add_implementations(parser)
    add("--steps", type=command.whole, default=200, help="of the loss curves; 0 for none (default: %(default)s)")
    add("--data", metavar="PATH", help="a file or folder of text (default: the Python standard library's sources)")
    command.add_sampling(parser, rounds=11, target_ms=400.0)
    threads = 1 if on_cpu else min(14, os.cpu_count() or 1)
    command.add_run(parser, budget_s=540.0, threads=threads, out="training-SUITE")
    command.add_plot(parser)
    args = parser.parse_args(argv)
    suite = SUITES[args.suite]
    args.implementations = command.implementations(args, suite.implementations)
    known = [context for _, context in suite.shapes]
    if unknown := [context for context in args.contexts or () if context not in known]:
        parser.error(f"argument --contexts: {unknown}: the suite {args.suite} has {', '.join(map(str, known))}")
    return args


def measured(args: argparse.Namespace, suite: TrainingSuite, corpus: Corpus) -> Iterator[rows.Row]:
    """Compiles the steps, then times them and trains with them, and makes the rows."""
    start = time.monotonic()
    groups = programs(suite, args.implementations, args.steps, corpus)
    common = rows.common(f"training-{args.suite}", args.commit)
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
    with progress.bar(len(groups) * args.rounds + args.steps, "run") as bar:
        runner = Runner(args.rounds, args.target_ms / 1e3, suite.baseline, start + args.budget_seconds, bar)
        for row in runner.all(groups, args.steps):
            yield common | row


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Runs the command line; returns the rows."""
    args = arguments(argv)
    suite = SUITES[args.suite]
    shapes = tuple(shape for shape in suite.shapes if args.contexts is None or shape[1] in args.contexts)
    suite = dataclasses.replace(suite, shapes=shapes)
    try:
        corpus = load_corpus(args.data, max(context for _, context in shapes))
    except UsageError as error:
        raise SystemExit(f"{error}") from None
    out = args.out or row_file.RESULTS / machine.folder() / f"training-{args.suite}.jsonl"
    return command.carry_out(measured(args, suite, corpus), out, table, plot=not args.no_plot)


if __name__ == "__main__":
    command.start(main)
