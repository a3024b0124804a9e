"""Draws result rows: `python -m benchmarks.plot [ROWS]`. Reads rows, measures nothing.

Without arguments it draws every file in benchmarks/results/, each picture beside its rows, and docs/images/speed.png for
the README. Rows of attention become bars of TFLOP/s: a panel for each series of workloads (they differ in S), and one for
all others. A row without a time is a gap that says why.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks import command, labels, plot_style, readme_picture, row_file
from benchmarks.plot_style import Bar
from benchmarks.rows import Row, has_time

_LINE = 32  # bars side by side, of several panels
_MOST = 60  # bars of a panel that has a line for itself
_WORDS = {False: 20, True: 12}  # characters in a line of a group's label, by whether the panel has a line for itself
# With which the names of files begin whose rows are tables alone.
_TABLES = ("decode", "generation", "compiled", "ragged")
_DIRECTIONS = {"fwdbwd": "forward and backward"}


def draw(found: list[Row], path: Path) -> None:
    """Writes a PNG of `found`, rows of one run."""
    suite = found[0]["suite"]
    if suite.startswith("training"):
        from benchmarks import training_plot

        training_plot.draw(found, path)
    elif suite == "scaling":
        from benchmarks.distributed import comms_plot

        comms_plot.draw_rows(found, path)
    else:
        _draw_attention(found, path)


def _draw_attention(found: list[Row], path: Path) -> None:
    said, lines = labels.shared(found), _lines(_panels(found))
    figure = plt.figure(figsize=(13, 3.2 * len(lines) + 1), layout="constrained")
    columns = max(map(len, lines))
    grid = figure.add_gridspec(len(lines), columns)
    for i, line in enumerate(lines):
        for j, of in enumerate(line):
            wide = len(of) > _LINE / 2
            _panel(figure.add_subplot(grid[i, :] if wide else grid[i, j]), of, said, _WORDS[wide])
    title = ", ".join([path.stem, *([" ".join(said.values())] if said else []), labels.source(found)])
    baseline = next((row["baseline"] for row in found if row.get("baseline")), None)
    remark = f"\n1.10x: 1.10 times as fast as {baseline}" if baseline else ""
    figure.suptitle(f"{title}{remark}", fontsize=10)
    plot_style.legend(figure, dict.fromkeys(row["implementation"] for row in found))
    plot_style.save(figure, path, found)


def _panels(found: list[Row]) -> list[list[Row]]:
    """One for each direction, where a line has room for all of it; else one for each series too."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        few = sum(other["direction"] == row["direction"] for other in found) <= _MOST
        panels.setdefault(("" if few else row["series"], row["direction"]), []).append(row)
    return list(panels.values())


def _lines(panels: list[list[Row]]) -> list[list[list[Row]]]:
    """Two side by side where a line has room for them."""
    lines: list[list[list[Row]]] = []
    for panel in panels:
        if lines and len(lines[-1]) < 2 and sum(map(len, lines[-1])) + len(panel) <= _LINE:
            lines[-1].append(panel)
        else:
            lines.append([panel])
    return lines


def _panel(axes, found: list[Row], said: dict[str, str], width: int) -> None:
    """Bars of TFLOP/s; `said` is what the figure's title says of all rows."""
    common, first = labels.shared(found), found[0]
    here = " ".join(text for name, text in common.items() if name not in said)
    series = first["series"] if all(row["series"] == first["series"] for row in found) else ""
    direction = _DIRECTIONS.get(first["direction"], first["direction"])
    axes.set_title(", ".join(filter(None, (series, direction, here))), fontsize=9)
    unit, factor = labels.unit(found)
    groups: dict[str, list[Bar]] = {}
    for row in found:
        apart = [text for name, text in labels.fields(row).items() if name not in common]
        words = " ".join([*([] if series else [row["mask"]]), *apart]) or row["workload"]
        label = "\n".join(textwrap.wrap(words, width, break_long_words=False))
        groups.setdefault(label, []).append(_bar(row, factor))
    plot_style.draw_bars(axes, groups)
    axes.set_ylabel(unit, fontsize=9)


def _bar(row: Row, factor: float) -> Bar:
    name = row["implementation"]
    if not has_time(row):
        return Bar(name, None, labels.reason(row["error"]))
    speed = row["tflops"] * factor
    label = labels.number(speed)
    if name.startswith("pallas_fa:") and row.get("ratio") is not None and row["baseline"] != name:
        label += f"  {row['ratio']:.2f}x"
    return Bar(name, speed, label)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("rows", nargs="*", type=Path, help="JSONL files; each becomes a picture beside it")
    args = parser.parse_args(argv)
    for path in args.rows or [path for path in row_file.kept() if not path.stem.startswith(_TABLES)]:
        found = command.read_rows([path], "suite", "error")
        if found[0]["suite"] in _TABLES:
            raise SystemExit(
                f"{path.name}: rows of {found[0]['suite']} have no picture. docs/results.md has their table."
            )
        draw(found, path.with_suffix(".png"))
    if not args.rows:
        readme_picture.draw()


if __name__ == "__main__":
    command.start(main)
