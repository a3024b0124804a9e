"""Times tiles of the kernels beside those of the tables, on one GPU.

python -m benchmarks.tune h64-causal-4096 --direction backward l2_head_group=8 "stages=(2, 1), ds_stages=1"

Each argument after the workload is one variant: what it changes in the configuration that the table chooses. All take
turns, each next to a sample of the table's; repeat a variant to see the noise.
"""

import argparse
import ast
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import command, measure, progress, rows
from benchmarks.implementations import Implementation
from benchmarks.suites import suites
from benchmarks.truth import truth
from benchmarks.workloads import Workload
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.backward import choose as choose_backward
from pallas_fa.backends.hopper.config import Config
from pallas_fa.backends.hopper.forward import choose as choose_forward
from pallas_fa.problem import Problem, normalise


@dataclasses.dataclass(frozen=True)
class Variant(Implementation):
    """Our kernels with the tiles of `config`; `label` says what it changes."""

    label: str = "table"

    @property
    def name(self) -> str:
        return self.label


TABLE = Variant("pallas_fa", "mosaic_gpu", "")


def variant(workload: Workload, direction: str, text: str, label: str) -> Variant:
    """The table's configuration with the changes that `text` spells: fields and values, as keyword arguments."""
    table = table_config(workload, direction)
    try:
        changes = {name: _literal(value) for name, value in keywords(text).items()}
        config = dataclasses.replace(table, **changes)
    except (SyntaxError, TypeError, ValueError) as error:
        raise SystemExit(
            f"{text!r}: {str(error).rstrip('.')}. The table's choice, whose fields may be changed: {table}"
        ) from None
    return dataclasses.replace(TABLE, config=Config(**{direction: config}), label=label)


def keywords(text: str) -> dict[str, ast.expr]:
    """What `text` spells as keyword arguments, by name. Raises ValueError or SyntaxError where it is anything else."""
    call: Any = ast.parse(f"change({text})", mode="eval").body
    found = {keyword.arg: keyword.value for keyword in call.keywords}
    if call.args or not found or None in found or len(found) < len(call.keywords):
        raise ValueError("it must be field=value, and more of these after commas")
    return found


def _literal(value):
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise ValueError(f"{ast.unparse(value)!r} must be a literal, such as 3, True or (2, 1)") from None


def labels(texts: Sequence[str]) -> list[str]:
    """A name for each; of two alike the second gets one of its own, so that their times stay apart."""
    return [text + " again" * texts[:i].count(text) for i, text in enumerate(texts)]


def table_config(workload: Workload, direction: str) -> Any:
    """What the tables choose; where the backward takes several passes, for the first of them."""
    problem = problem_of(workload)
    if direction == "forward":
        return choose_forward.choose(problem, Gpu.visible()).config
    gpu = Gpu.visible()
    return choose_backward.choose(problem, choose_backward.choose_passes(problem, gpu)[0], gpu).config


def problem_of(workload: Workload) -> Problem:
    problems = []
    masks = jax.eval_shape(functools.partial(TABLE.masks, workload))
    keep = lambda arrays, masks: problems.append(normalise(**TABLE.keywords(workload, arrays, masks))[0])
    jax.eval_shape(keep, workload.shapes(), masks)
    return problems[0]


def compare(programs: list[measure.Program], rounds: int, target_s: float) -> list[list[str]]:
    """Lines of a table: the time of each compiled program, its speed against the first, its largest error."""
    workload, direction = programs[0].workload, programs[0].direction
    inputs = measure.input_sets(workload)
    true = truth(workload, *inputs[0], affordable=2**29)
    bounds: dict[int, measure.Bound[measure.Program]] = {}
    found: dict[int, rows.Row] = {id(program): {"error": program.error} for program in programs}
    for program in programs:
        row = found[id(program)]

        def check(outputs, program=program, row=row):
            row["wrong"] = max(error["max"] for error in true.errors(program.results(outputs)).values())

        bind = functools.partial(program.bind, inputs)
        if (bound := measure.start(bind, row, np.inf, target_s, check)) is not None:
            bounds[id(program)] = bound
    table = bounds.get(id(programs[0]))
    others = [bound for bound in bounds.values() if bound is not table]
    with progress.bar(rounds, "time") as bar:
        ratios = measure.take_turns(others, table, rounds, (np.inf, np.inf), after=bar.update)
    lines = [["tiles", "p50 ms", "TFLOP/s", "x table", "quartiles", "max error"]]
    for program in programs:
        bound, row = bounds.get(id(program)), found[id(program)]
        if bound is None:
            lines.append([program.implementation.name, "-", "", "", "", row["error"]])
            continue
        seconds, pairs = float(np.median(bound.wall)), ratios.get(program.implementation.name, [])
        quartiles = " to ".join(f"{x:.3f}" for x in np.quantile(pairs, (0.25, 0.75))) if pairs else ""
        against = f"{np.median(pairs):.3f}" if pairs else ""
        speed = f"{workload.flops(direction) / seconds / 1e12:.0f}"
        error = f"{row['wrong']:.1e}"
        lines.append([program.implementation.name, f"{seconds * 1e3:.4g}", speed, against, quartiles, error])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    known = {
        w.name: w
        for suite in suites().values()
        for w in suite.workloads
        if "pallas_fa:mosaic_gpu" in suite.implementations
    }
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=known, metavar="workload", help=", ".join(known))
    parser.add_argument("variants", nargs="+", help="what each changes: field=value, ...")
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    command.add_sampling(parser, rounds=15, target_ms=20.0)
    args = parser.parse_args(argv)
    workload = known[args.workload]
    named = zip(args.variants, labels(args.variants), strict=True)
    found = [TABLE, *(variant(workload, args.direction, text, label) for text, label in named)]
    if jax.devices()[0].platform != "gpu":
        raise SystemExit(
            "There is no GPU here, and these are kernels for one. Run this on a machine with a Hopper GPU."
        )
    programs = [measure.Program(implementation, workload, args.direction) for implementation in found]
    measure.compile_all(programs, threads=8, deadline=time.monotonic() + 600)
    print(f"{workload.name}, {args.direction}; the table's choice: {table_config(workload, args.direction)}")
    print(rows.aligned(compare(programs, args.rounds, args.target_ms / 1e3)))


if __name__ == "__main__":
    command.start(main)
