"""Draws the model of comms_model.py, with what was measured, from the rows of scaling.py."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from benchmarks import labels, plot_style
from benchmarks.distributed.comms_model import DEVICES, LENGTHS, Network, Rates, both
from benchmarks.rows import Row, has_time

_PANELS = {"ring": "ring", "all_to_all": "all-to-all, on as many devices as heads at most"}


def draw(found: Sequence[Row], rates: Rates, network: Network | None, path: Path) -> None:
    """Efficiency against the number of devices: a panel for each way, a colour for each length, measured ones hollow."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained", sharex=True, sharey=True)
    shades = matplotlib.colormaps["viridis"].resampled(len(LENGTHS) + 1)
    colours = {S: shades(i) for i, S in enumerate(LENGTHS)}
    for axes, (way, title) in zip(panels, _PANELS.items(), strict=True):
        for S in LENGTHS:
            alone = sum(rates.whole[direction](S) for direction in rates.whole)
            times = [(R, both(rates, way, S, R, network)) for R in DEVICES]
            points = [(R, alone / R / seconds[0]) for R, seconds in times if seconds]
            if points:
                axes.plot(*zip(*points, strict=True), "-o", markersize=4, color=colours[S])
        for row in found:
            if row.get("way") == way and row["direction"] == "fwdbwd" and row.get("speedup"):
                at, colour = (row["devices"], row["speedup"] / row["devices"]), colours.get(row["shape"]["S"], "black")
                axes.plot(*at, marker="s", markersize=9, fillstyle="none", color=colour, markeredgewidth=1.5)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(DEVICES, [str(R) for R in DEVICES])
        axes.set(xlabel="devices R", title=title, ylim=(0, 1.08))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time on one device / (R x time on R devices)")
    figure.suptitle(_title(found, rates, network), fontsize=11)
    handles = [Line2D([], [], color=colours[S], marker="o", markersize=4, label=f"S = {S // 1024}k") for S in LENGTHS]
    measured = Line2D([], [], color="black", linestyle="", marker="s", markersize=9, fillstyle="none", label="measured")
    figure.legend(handles=[*handles, measured], loc="outside right center", frameon=False, fontsize=9)
    figure.supxlabel(_above_one(found), fontsize=9)
    plot_style.save(figure, path, found)


def _title(found: Sequence[Row], rates: Rates, network: Network | None) -> str:
    dtype = next(row["dtype"] for row in found if row.get("way") == "plain")
    links = "links of one host between all devices" if network is None else f"{network}"
    heads = f"{dtype}, B=1 N={rates.N} K={rates.K} H={rates.H}"
    what = "Model of causal attention to one sequence of S tokens over R devices, forward and backward"
    return f"{what}: {heads}\n{labels.source(found)}; {links}"


def _above_one(found: Sequence[Row]) -> str:
    """Why an efficiency can exceed 1, in figures of the longest calls."""
    forward = [row for row in found if row.get("tflops") and row["direction"] == "forward"]
    block = max((row for row in forward if row["kind"] == "kernel"), key=lambda row: row["shape"]["S"])
    whole = max((row for row in forward if row.get("way") == "plain"), key=lambda row: row["shape"]["S"])
    return (
        f"The ring's blocks have no mask: {block['tflops']:.0f} TFLOP/s forward at {block['shape']['S']} tokens, where one"
        f" device has {whole['tflops']:.0f} causal at {whole['shape']['S']}. So the model of the ring can exceed 1."
    )


def draw_rows(found: list[Row], path: Path) -> None:
    """As `draw`, with the measured links between all devices; only a remark where a model can't be made of the rows."""
    if {"link", "kernel", "attention"} <= {row["kind"] for row in found if has_time(row)}:
        draw(found, Rates.of(found), None, path.with_suffix(".model.png"))
    else:
        print(f"No picture of {path.stem}: the model needs times of links, kernels and attention.")
