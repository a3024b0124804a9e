"""Draws the rows of benchmarks/training.py: tokens/s and memory by context, loss curves and their differences."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import rows
from benchmarks.loss_curves import difference


def draw(found: list[rows.Row], path: Path) -> None:
    """Writes a PNG of `found`, rows of one run."""
    timed = [row for row in found if row.get("p50_ms") is not None]
    sized = [row for row in found if row.get("peak_bytes") is not None]
    curves = [row for row in found if row.get("losses")]
    if not sized and not curves:
        print("Nothing was measured: no plot.")
        return
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["implementation"] for row in found))}
    figure, ((speed, loss), (memory, apart)) = plt.subplots(
        2, 2, figsize=(13, 7.5), height_ratios=(3, 2), layout="constrained"
    )
    _bars(speed, timed, "tokens_per_s", 1e3, lambda row: f"{row['ratio']:.2f}x" if row["ratio"] else "", colours)
    speed.set(ylabel="1000 tokens/s", title=f"training step, times faster than {_baseline(timed)} above the bars")
    _bars(memory, sized, "peak_bytes", 2**30, lambda row: f"{row['peak_bytes'] / 2**30:.4g}", colours)
    memory.set(ylabel="peak memory, GiB", xlabel="context (one batch has as many tokens at each)")
    _losses(loss, apart, curves, colours)
    first = found[0]
    title = f"{first['size']}, {first['dtype']}: {first['device']}, jax {first['versions']['jax']}, {first['run'][:10]}"
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes, found: Sequence[rows.Row], field, unit, label, colours) -> None:
    contexts = sorted({row["context"] for row in found})
    width = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        own = [row for row in found if row["implementation"] == name]
        at = [contexts.index(row["context"]) + (i - (len(colours) - 1) / 2) * width for row in own]
        shown = axes.bar(at, [row[field] / unit for row in own], width, color=colour, label=name)
        axes.bar_label(shown, [label(row) for row in own], fontsize="x-small")
    axes.set_xticks(range(len(contexts)), [str(context) for context in contexts])
    axes.margins(y=0.12)
    axes.legend(fontsize="x-small")


def _losses(loss, apart, curves, colours) -> None:
    base = next((row["losses"] for row in curves if row["implementation"] == row["baseline"]), [])
    for row in curves:
        name = row["implementation"]
        loss.plot(row["losses"], color=colours[name], linewidth=1, label=name)
        if name == row["baseline"]:
            continue
        far = f"{name}: at most {row['max_difference']:.1e}, mean {row['mean_difference']:.1e}" if base else name
        apart.plot(difference(row["losses"], base), color=colours[name], linewidth=0.8, label=far)
    apart.axhline(0, color="black", linewidth=0.8)
    apart.set(xlabel="step", ylabel=f"loss - {_baseline(curves)}'s")
    loss.set(ylabel=f"loss, {curves[0]['unit']}" if curves else "loss")
    if curves:
        loss.set_title(f"the first steps, context {curves[0]['context']}: same parameters, same batches")
        loss.legend(fontsize="x-small")
        apart.legend(fontsize="x-small")
    for axes in (loss, apart):
        axes.grid(alpha=0.3)


def _baseline(found):
    return next((row["baseline"] for row in found if row.get("baseline")), "the baseline")
