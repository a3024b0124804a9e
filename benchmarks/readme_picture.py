"""Draws the README's picture from the rows of one GPU: attention in TFLOP/s, forward and backward, against the peers."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks import labels, plot_style
from benchmarks.plot_style import Bar
from benchmarks.row_file import RESULTS
from benchmarks.rows import Row, has_time, read

PATH = Path(__file__).parent.parent / "docs" / "images" / "speed.png"
ROWS = [RESULTS / "nvidia-h200" / f"hopper-{direction}.jsonl" for direction in ("forward", "backward")]
_NAMES = {
    "pallas_fa:mosaic_gpu": "pallas_fa",
    "jax.nn:cudnn": "cuDNN, through jax.nn",
    "dew_flash_attn:fa3": "FlashAttention-3, dew-flash-attn",
}


def draw(path: Path = PATH, files: Sequence[Path] = ROWS) -> None:
    """A line of panels for each file, a panel for each head dim: the causal workloads, all implementations but XLA's."""
    lines = [[row for row in read([file]) if _shown(row)] for file in files]
    names = list(dict.fromkeys(row["implementation"] for line in lines for row in line))
    sizes = sorted({row["shape"]["H"] for row in lines[0]})
    figure, grid = plt.subplots(
        len(lines), len(sizes), figsize=(11, 2.9 * len(lines) + 0.9), layout="constrained", sharey="row"
    )
    for line, of in zip(grid, lines, strict=True):
        for axes, H in zip(line, sizes, strict=True):
            groups: dict[str, list[Bar]] = {}
            for row in of:
                if row["shape"]["H"] == H:
                    groups.setdefault(f"S = {row['shape']['S']}", []).append(_bar(row))
            plot_style.draw_bars(axes, groups, fontsize=9)
            axes.set_title(f"{of[0]['direction']}, head dim {H}", fontsize=11)
        line[0].set_ylabel("TFLOP/s")
        line[0].set_ylim(0, 1.15 * max(row.get("tflops") or 0 for row in of))  # of the whole line
    first = lines[0][0]
    tokens, width = (first["shape"][a] * first["shape"][b] for a, b in ("BS", "NH"))
    figure.suptitle(
        f"Causal attention on one {first['device']}, {first['dtype']}, B*S = {tokens}, N*H = {width}", fontsize=13
    )
    plot_style.legend(figure, names, _NAMES)
    plot_style.save(figure, path, sum(lines, []), dpi=120)


def _shown(row: Row) -> bool:
    return bool(row["series"]) and row["mask"] == "causal" and not row["implementation"].endswith(":xla")


def _bar(row: Row) -> Bar:
    if not has_time(row):
        return Bar(row["implementation"], None, labels.reason(row["error"]))
    return Bar(row["implementation"], row["tflops"], labels.number(row["tflops"]))
