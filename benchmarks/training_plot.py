"""Draws the rows of benchmarks/training.py: tokens/s and memory by context, loss curves and their differences."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks import labels, plot_style, rows
from benchmarks.loss_curves import difference
from benchmarks.plot_style import Bar


def draw(found: list[rows.Row], path: Path) -> None:
    """Writes a PNG of `found`, rows of one run."""
    timed = [row for row in found if "losses" not in row]
    curves = [row for row in found if row.get("losses")]
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), height_ratios=(3, 2), layout="constrained")
    ((speed, loss), (memory, apart)) = axes
    _bars(speed, timed, "tokens_per_s", 1e3, lambda row: f"{row['ratio']:.2f}x" if row.get("ratio") else "")
    speed.set(ylabel="1000 tokens/s", title=f"speed of a step; above the bars, times as fast as {_baseline(timed)}")
    _bars(memory, timed, "peak_bytes", 2**30, lambda row: f"{row['peak_bytes'] / 2**30:.4g}")
    memory.set(ylabel="GiB", title="peak memory of a step, by the compiler's analysis")
    _losses(loss, apart, curves)
    first = found[0]
    figure.suptitle(f"{path.stem}: {first['size']}, {first['dtype']}, {labels.source(found)}", fontsize=11)
    plot_style.legend(figure, dict.fromkeys(row["implementation"] for row in found))
    plot_style.save(figure, path, found)


def _bars(axes: Any, found: Sequence[rows.Row], field: str, unit: float, label: Callable[[rows.Row], str]) -> None:
    groups: dict[str, list[Bar]] = {}
    for row in found:
        value = None if row["error"] else row.get(field)
        bar = Bar(row["implementation"], value and value / unit, label(row) if value else labels.reason(row["error"]))
        groups.setdefault(f"{row['batch']} x {row['context']} tokens", []).append(bar)
    plot_style.draw_bars(axes, groups, fontsize=8)


def _losses(loss: Any, apart: Any, curves: Sequence[rows.Row]) -> None:
    base = next((row["losses"] for row in curves if row["implementation"] == row["baseline"]), [])
    for row in curves:
        name = row["implementation"]
        colour = plot_style.look(name)["facecolor"]
        base_width = 3 if name == row["baseline"] else 1  # so that lines that agree are both seen
        loss.plot(row["losses"], color=colour, linewidth=base_width)
        if name == row["baseline"] or not base:
            continue
        apart.plot(difference(row["losses"], base), color=colour, linewidth=0.8)
    loss.set(title="the first steps: the same parameters, the same batches", ylabel="loss")
    apart.axhline(0, color="black", linewidth=0.8)
    apart.set(xlabel="step", ylabel="difference", title=f"loss less that with {_baseline(curves)}")
    if curves:
        loss.set_ylabel(f"loss, {curves[0]['unit']}")
        loss.set_title(
            f"the first steps of {curves[0]['batch']} x {curves[0]['context']} tokens, same parameters and batches"
        )
    for axes in (loss, apart):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def _baseline(found: Sequence[rows.Row]) -> str:
    return next((row["baseline"] for row in found if row.get("baseline")), "the baseline")
