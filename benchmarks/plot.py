"""Draws result rows: `python -m benchmarks.plot benchmarks/results/cpu/cpu.jsonl`. Reads rows, measures nothing.

Workloads of one series (they differ in S) become lines of TFLOP/s against S; the others become bars of the time of the
baseline over the own time. Rows of benchmarks/training.py are drawn by training_plot.py.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import rows, training_plot


def draw(found: list[rows.Row], path: Path) -> None:
    """Writes a PNG of `found`, rows of one device."""
    measured = [row for row in found if row.get("p50_ms") is not None]
    lines = [row for row in measured if row["series"]]
    bars = [row for row in measured if not row["series"] and row.get("ratio") is not None]
    panels = list(dict.fromkeys((row["series"], row["direction"]) for row in lines))
    bar_panels = list(dict.fromkeys(row["direction"] for row in bars))
    if not panels and not bar_panels:
        print("Nothing was measured: no plot.")
        return
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["implementation"] for row in measured))}
    columns = min(3, len(panels)) or 1
    line_rows = -(-len(panels) // columns)
    heights = [3.0] * line_rows + [3.6] * len(bar_panels)
    figure = plt.figure(figsize=(max(4.2 * columns, 10), sum(heights) + 0.8), layout="constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for i, (series, direction) in enumerate(panels):
        axes = figure.add_subplot(grid[i // columns, i % columns])
        _lines(axes, [r for r in lines if (r["series"], r["direction"]) == (series, direction)], colours)
        axes.set_title(f"{series}, {direction}")
    for i, direction in enumerate(bar_panels):
        axes = figure.add_subplot(grid[line_rows + i, :])
        _bars(axes, [row for row in bars if row["direction"] == direction], colours)
        axes.set_title(direction)
    figure.suptitle(f"{found[0]['device']}, jax {found[0]['versions']['jax']}, {found[0]['run'][:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(axes, found, colours):
    for name in dict.fromkeys(row["implementation"] for row in found):
        points = sorted((row["shape"]["S"], row["tflops"]) for row in found if row["implementation"] == name)
        axes.plot(*zip(*points, strict=True), marker="o", color=colours[name], label=name)
    sizes = sorted({row["shape"]["S"] for row in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("S")
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _bars(axes, found, colours):
    workloads = list(dict.fromkeys(row["workload"] for row in found))
    names = list(dict.fromkeys(row["implementation"] for row in found))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = {row["workload"]: row["ratio"] for row in found if row["implementation"] == name}
        at = [workloads.index(w) + (i - (len(names) - 1) / 2) * width for w in heights]
        shown = axes.bar(at, list(heights.values()), width, color=colours[name], label=name)
        axes.bar_label(shown, fmt="%.2f", fontsize="xx-small")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(workloads)), workloads, rotation=30, ha="right", fontsize="small")
    axes.set_ylabel(f"time of {found[0]['baseline']} / own time")
    axes.legend(fontsize="x-small")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path, help="JSONL files of one device")
    parser.add_argument("--out", type=Path, help="default: beside the first file, .png")
    args = parser.parse_args(argv)
    found, out = rows.read(args.rows), args.out or args.rows[0].with_suffix(".png")
    training = found and found[0]["suite"].startswith("training")
    (training_plot.draw if training else draw)(found, out)


if __name__ == "__main__":
    main()
