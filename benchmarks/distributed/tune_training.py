"""Times variants of the data-parallel training step in turns, on all GPUs of this host, beside the step of one GPU.

python -m benchmarks.distributed.tune_training xla_gpu_enable_nccl_user_buffers=True
python -m benchmarks.distributed.tune_training "xla_gpu_all_gather_combine_threshold_bytes=2**26" "xla_a=1, xla_b='x'"

Each argument is one variant: XLA's options (bool, int, float or str) beside those of models/mesh.py, or in their place.
The first line is one GPU; "side by side", each GPU takes that step for itself, with nothing sent. What NCCL reads from the
environment holds for all variants of a run.
"""

import argparse
import ast
import dataclasses
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import command, progress, rows
from benchmarks.distributed.scaling import SIZES, Runner, Sizes, compile_all
from benchmarks.training_program import SideBySide, Training
from benchmarks.tune import keywords, labels

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


def options(text: str) -> dict[str, Any]:
    """XLA's, as `text` spells them: keyword arguments whose values are literals or powers of integers."""
    try:
        return {name: _value(value) for name, value in keywords(text).items()}
    except (SyntaxError, TypeError, ValueError) as error:
        raise SystemExit(
            f"{text!r}: {str(error).rstrip('.')}. Write for example 'xla_gpu_enable_nccl_user_buffers=True'."
        ) from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.literal_eval(node.left) ** ast.literal_eval(node.right)
    return ast.literal_eval(node)


def compare(named: dict[str, Training], rounds: int, sizes: Sizes) -> list[list[str]]:
    """Lines of a table: the time of a step of each compiled program, its speed against the first two."""
    counts = {name: program.collectives(COLLECTIVES) for name, program in named.items() if program.error is None}
    with progress.bar(rounds, "time") as bar:
        found = Runner(rounds, 0.0, sizes, math.inf).group(list(named.values()), after=bar.update)
    lines = [["step", "ms", "of one", "of side by side", "least ms", "samples", *COLLECTIVES, "temp MiB"]]
    for name, row in zip(named, found, strict=True):
        if row["error"]:
            lines.append([name, "-", *[""] * (len(lines[0]) - 3), row["error"]])
            continue
        p50 = row["p50_ms"]
        against = [f"{reference['p50_ms'] / p50:.3f}" if "p50_ms" in reference else "" for reference in found[:2]]
        samples = f"{row['samples']} x {row['calls_per_sample']}"
        temp = f"{row['temp_bytes'] / 2**20:.0f}"
        lines.append([name, f"{p50:.2f}", *against, f"{row['min_ms']:.2f}", samples, *map(str, counts[name]), temp])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    on_gpu = jax.devices()[0].platform == "gpu"
    sizes = SIZES["hopper" if on_gpu else "tiny"]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed.tune_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("variants", nargs="*", help="what each changes: option=value, ...")
    add("--devices", type=command.positive, default=jax.device_count(), help="default: all, %(default)s here")
    add(
        "--batch",
        type=command.positive,
        default=sizes.batches[0],
        help="sequences on each device (default: %(default)s)",
    )
    add("--rounds", type=command.positive, default=5, help="samples of each (default: %(default)s)")
    seconds = "shortest length of a sample (default: %(default)s here)"
    add("--seconds", type=command.not_negative, default=sizes.training_s, help=seconds)
    args = parser.parse_args(argv)
    if not 2 <= args.devices <= jax.device_count():
        parser.error(f"--devices {args.devices}: data parallel needs 2 or more, and there are {jax.device_count()}.")
    shape = (sizes.model, args.batch, sizes.context, sizes.dtype)
    named: dict[str, Training] = {
        "one device": Training(1, *shape),
        "side by side": SideBySide(args.devices, *shape),
        "data parallel": Training(args.devices, *shape),
    }
    for label, text in zip(labels(args.variants), args.variants, strict=True):
        named[label] = Training(args.devices, *shape, options=options(text))
    compile_all([list(named.values())], 16 if on_gpu else 1, time.monotonic() + 600)
    nccl = sorted(name for name in os.environ if name.startswith("NCCL_"))
    set_for_nccl = " ".join(f"{name}={os.environ[name]}" for name in nccl)
    print(f"{args.devices} devices, {args.batch} x {sizes.context} tokens on each; {set_for_nccl}")
    print(rows.aligned(compare(named, args.rounds, dataclasses.replace(sizes, training_s=args.seconds))))


if __name__ == "__main__":
    command.start(main)
