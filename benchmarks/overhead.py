"""Times what the library costs on the host: import, tracing, lowering and dispatch of a call. Needs no GPU.

python -m benchmarks.overhead                      # this tree
python -m benchmarks.overhead ../before .          # two trees in turns, and the ratio of the others to the first

Import, tracing and lowering: the median over processes of CPU time, of causal calls in bfloat16 (B=2 T=S=1024 N=8 H=128),
lowered for CUDA where they are kernels; "first" ones import what the call needs. Dispatch: the least wall-clock time of a
call, over batches in all processes.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command, progress
from benchmarks.rows import aligned

ROOT = Path(__file__).parent.parent
CASES = ("import", "xla forward", "xla gradients", "mosaic_gpu forward", "mosaic_gpu gradients", "dispatch")
_CHILD = Path(__file__).with_name("overhead_child.py")
Figures = dict[tuple[str, str], list[float]]  # by case and name, one of each process


def measured(tree: Path, case: str) -> dict[str, float]:
    """One process's figures of `case`, with the library of `tree`."""
    start = f"import runpy; runpy.run_path({str(_CHILD)!r}, run_name='__main__')"  # leaves the tree first on the path
    ran = subprocess.run(
        [sys.executable, "-c", start, case],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise SystemExit(f"{tree}, {case}: {ran.stderr.strip().splitlines()[-1]}")
    found = json.loads(ran.stdout)
    if not Path(found.pop("file")).is_relative_to(tree):
        raise SystemExit(f"{tree}: there is no pallas_fa in it. Name the root of a checkout.")
    return found


def checkout(text: str) -> Path:
    """The root of a checkout, from the command line."""
    if not (Path(text) / "pallas_fa" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no pallas_fa in it. Name the root of a checkout")
    return Path(text)


def table(found: Sequence[Figures], trees: Sequence[str]) -> str:
    """A line for each figure in each tree, and its ratio to the first tree."""
    lines = [["case", "", *trees, *(f"{tree} : {trees[0]}" for tree in trees[1:])]]
    for case, name in found[0]:
        typical = min if case == "dispatch" else statistics.median
        values = [typical(figures[case, name]) for figures in found]
        lines.append([case, name, *(f"{x:.4g}" for x in values), *(f"{x / values[0]:.2f}" for x in values[1:])])
    return aligned(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=checkout, help="roots of checkouts (default: this one)")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--rounds", type=command.positive, default=5, help="processes of each (default: %(default)s)")
    args = parser.parse_args(argv)
    names = args.trees or [ROOT]
    trees = [tree.resolve() for tree in names]
    found: list[Figures] = [collections.defaultdict(list) for _ in trees]
    with progress.bar(args.rounds * len(args.cases) * len(trees), "overhead") as bar:
        for _ in range(args.rounds):
            for case in args.cases:
                for tree, figures in zip(trees, found, strict=True):
                    for name, figure in measured(tree, case).items():
                        figures[case, name].append(figure)
                    bar.update()
    print(table(found, list(map(str, names))))


if __name__ == "__main__":
    command.start(main)
