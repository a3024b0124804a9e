"""Times variants of the data-parallel training step in turns, on all GPUs of this host, beside the step of one GPU.

python -m benchmarks.tune_training "together=4" "together=4, xla_gpu_all_gather_combine_threshold_bytes=2**27"

Each argument is one variant: XLA's options (bool, int, float or str) that it adds to those of models/step.py, and how many
blocks' parameters travel `together`. The first line is one GPU; "side by side", each GPU takes that step for itself, with
nothing sent. What NCCL reads from the environment holds for all variants of a run.
"""

import argparse
import ast
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import measure, progress, rows
from benchmarks.scaling import SIZES, compile_all
from benchmarks.training_program import SideBySide, Training
from models.step import EARLY_COLLECTIVES

PLAIN = "data parallel"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


def changes(text: str) -> dict[str, Any]:
    """Fields of a Training, as `text` spells them: keyword arguments whose values are literals or powers of integers."""
    try:
        call: Any = ast.parse(f"change({text})", mode="eval").body
        named = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if call.args or not named or None in named or len(named) < len(call.keywords):
            raise ValueError("it must be option=value, and others after commas")
        together = {"together": int(named.pop("together"))} if "together" in named else {}
    except (SyntaxError, TypeError, ValueError) as error:
        raise SystemExit(
            f"{text!r}: {str(error).rstrip('.')}. Write for example 'together=4, xla_gpu_enable_nccl_user_buffers=True'."
        ) from None
    return {**together, "options": EARLY_COLLECTIVES | named}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.literal_eval(node.left) ** ast.literal_eval(node.right)
    return ast.literal_eval(node)


def compare(named: list[tuple[str, Training]], rounds: int, target_s: float) -> list[list[str]]:
    """Lines of a table: the time of a step of each compiled program, and its speed against the first two."""
    lines = [["step", "ms", "of one", "of side by side", "least ms", "samples", *COLLECTIVES, "temp MiB"]]
    bounds: dict[str, measure.Bound[Training]] = {}
    counts: dict[str, list[str]] = {}
    for name, program in named:
        if program.error is not None:
            continue
        try:
            counts[name] = [str(count) for count in program.collectives(COLLECTIVES)]
            bound = measure.Bound(program, [program.arguments()])
            bound.first()
            bound.warm_up(target_s, dispatches=0)
            bounds[name] = bound
        except Exception as error:  # an option that fails when it runs: the line's result
            program.error = measure.error_text(error)
    with progress.bar(rounds, "time") as bar:
        for _ in range(rounds):
            for bound in bounds.values():
                bound.sample()
            bar.update()
    times = {name: np.array(bound.wall) * 1e3 for name, bound in bounds.items()}
    references = [np.median(times[name]) if name in times else None for name, _ in named[:2]]
    for name, program in named:
        if name not in times:
            lines.append([name, "-", *[""] * (len(lines[0]) - 3), program.error or ""])
            continue
        p50 = np.median(times[name])
        against = [f"{reference / p50:.3f}" if reference is not None else "" for reference in references]
        samples = f"{len(times[name])} x {bounds[name].calls}"
        temp = f"{program.memory['temp'] / 2**20:.0f}"
        lines.append([name, f"{p50:.2f}", *against, f"{times[name].min():.2f}", samples, *counts[name], temp])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    on_gpu = jax.devices()[0].platform == "gpu"
    sizes = SIZES["hopper" if on_gpu else "tiny"]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("variants", nargs="*", help="what each changes: option=value, ...")
    add("--devices", type=int, default=jax.device_count(), help="default: all, %(default)s here")
    add("--batch", type=int, default=sizes.batches[0], help="sequences on each device (default: %(default)s)")
    add("--rounds", type=int, default=5, help="samples of each (default: %(default)s)")
    add("--seconds", type=float, default=sizes.training_s, help="least length of a sample (default: %(default)s here)")
    args = parser.parse_args(argv)
    if not 2 <= args.devices <= jax.device_count():
        parser.error(f"--devices {args.devices}: data parallel needs 2 or more, and there are {jax.device_count()}.")
    shape = (sizes.model, args.batch, sizes.context, sizes.dtype)
    named: list[tuple[str, Training]] = [
        ("one device", Training(1, *shape)),
        ("side by side", SideBySide(args.devices, *shape)),
        (PLAIN, Training(args.devices, *shape)),
    ]
    for i, text in enumerate(args.variants):  # two alike get names of their own, so that their times stay apart
        label = text + " again" * args.variants[:i].count(text)
        named.append((label, Training(args.devices, *shape, **changes(text))))
    compile_all([[program for _, program in named]], 16 if on_gpu else 1, time.monotonic() + 600)
    set_for_nccl = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if re.match("NCCL_", name))
    print(f"{args.devices} devices, {args.batch} x {sizes.context} tokens on each; {set_for_nccl}")
    print(rows.aligned(compare(named, args.rounds, args.seconds)))


if __name__ == "__main__":
    main()
