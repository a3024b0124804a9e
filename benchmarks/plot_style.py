"""How all plots look: one colour for each implementation, bars in groups, and legends that cover nothing."""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.rows import Row

# Okabe and Ito's colours, which the colour-blind can tell apart; ours are the warm ones. Give a new peer one of its own.
_COLOURS = {
    "pallas_fa:mosaic_gpu": "#D55E00",
    "pallas_fa:None": "#D55E00",
    "pallas_fa:xla": "#E69F00",
    "pallas_fa:mma": "#8B1A1A",
    "pallas_fa:reference": "#F0D9A0",
    "jax.nn:cudnn": "#009E73",
    "cudnn:jax": "#5B8C5A",
    "jax.nn:xla": "#999999",
    "tokamax:mosaic": "#0072B2",
    "dew_flash_attn:fa3": "#CC79A7",
    "torch:flash": "#EE4C2C",
}
_OTHERS = ("#56B4E9", "#7F3C8D", "#8C564B")
_HATCHES = {"": "", "dense": "////", "bias": "....", "deterministic": "xxxx"}  # by form
_HEADROOM = 1.3  # for the labels of the highest bars
_LEAST_BARS = 9  # that a panel has room for: fewer are no wider
_GAP = 0.8  # between groups, in widths of a bar


def look(name: str) -> dict[str, Any]:
    """Colour and hatch of an implementation, the same on every picture."""
    base, _, form = name.partition("+")
    colour = _COLOURS.get(base) or _OTHERS[zlib.crc32(base.encode()) % len(_OTHERS)]
    return {"facecolor": colour, "hatch": _HATCHES.get(form, "||||"), "edgecolor": "white", "linewidth": 0.6}


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar; without a height, a gap of which `label` says why."""

    name: str
    height: float | None
    label: str


def draw_bars(axes: Any, groups: Mapping[str, Sequence[Bar]], fontsize: float = 7) -> None:
    """Groups of bars side by side, each as wide as it has bars, with the labels on top."""
    text = {"rotation": 90, "fontsize": fontsize, "ha": "center", "va": "bottom", "textcoords": "offset points"}
    at, middles = 0.0, []
    for bars in groups.values():
        middles.append(at + (len(bars) - 1) / 2)
        for bar in bars:
            if bar.height is None:
                axes.plot(at, 0, marker="x", color=look(bar.name)["facecolor"], markersize=5, clip_on=False, zorder=3)
                axes.annotate(bar.label, (at, 0), xytext=(0, 6), color="0.35", **text)
            else:
                axes.bar(at, bar.height, 0.92, **look(bar.name))
                axes.annotate(bar.label, (at, bar.height), xytext=(0, 2), **text)
            at += 1
        at += _GAP
    axes.set_xticks(middles, list(groups), fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    space = _GAP / 2 + max(0, _LEAST_BARS - at) / 2
    axes.set_xlim(-0.5 - space, at - 0.5 - _GAP + space)
    highest = max((bar.height or 0 for bars in groups.values() for bar in bars), default=0)
    axes.set_ylim(0, _HEADROOM * highest or 1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, names: Iterable[str], words: dict[str, str] | None = None) -> None:
    """A legend of implementations under the plots, outside of all axes."""
    names = list(names)
    patches = [Patch(label=(words or {}).get(name, name), **look(name)) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(names), 7), frameon=False, fontsize=9)


def save(figure: Any, path: Path, found: Sequence[Row], dpi: int = 110) -> None:
    """Writes the picture of these rows, which its description tells from others, and forgets the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, metadata={"Description": digest(found)})
    plt.close(figure)


def digest(found: Sequence[Row]) -> str:
    """Of the rows, so that a picture says which ones it shows."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
