"""The loss curve of a run, drawn from its metrics alone: `python -m models.plot runs/text-tiny`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from models.errors import UsageError
from models.folder import METRICS, PICTURE
from models.metrics import read_rows


def plot_run(folder: Path, unit: str = "", baseline: tuple[str, float] | None = None) -> Path:
    """Draws training and validation loss over steps, and a (name, value) to compare with. Returns the PNG's path."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    rows = read_rows(folder / METRICS)
    train = np.array([(row["step"], row["loss"]) for row in rows if "loss" in row])
    validation = np.array([(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row])
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    if len(train):
        axes.plot(*train.T, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
        window = len(train) // 50
        if window > 1:
            step, loss = (np.convolve(column, np.ones(window) / window, "valid") for column in train.T)
            axes.plot(step, loss, color="tab:blue", label=f"training, mean of {window} steps")
        # The first steps would squeeze all the others to the floor.
        axes.set_ylim(0, 1.1 * max(np.quantile(train[:, 1], 0.98), baseline[1] if baseline else 0))
    if len(validation):
        axes.plot(*validation.T, "o-", color="tab:orange", label=f"validation, {validation[-1, 1]:.3f} at the end")
    if baseline:
        axes.axhline(baseline[1], color="gray", linestyle="--", label=f"{baseline[0]}, {baseline[1]:.3f}")
    axes.set(xlabel="step", ylabel=f"loss, {unit}" if unit else "loss")
    axes.set_title(folder.name, parse_math=False)  # a folder may have any name, such as a$b
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(folder / PICTURE, dpi=120)
    pyplot.close(figure)
    return folder / PICTURE


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m models.plot", description=__doc__)
    parser.add_argument("run", metavar="FOLDER", type=Path, help=f"holds a run's {METRICS}; {PICTURE} goes beside it")
    folder = parser.parse_args(argv).run
    if not (folder / METRICS).is_file():
        parser.error(f"argument FOLDER: {str(folder)!r} holds no {METRICS}: name one that models.train wrote")
    try:
        print(plot_run(folder))
    except (OSError, UsageError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
