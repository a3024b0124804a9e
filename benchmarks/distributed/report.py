"""The part of the results page that the rows of scaling.py make."""

from collections.abc import Callable, Sequence

from benchmarks import labels
from benchmarks.markdown import table
from benchmarks.rows import Row, has_time


def tables(found: Sequence[Row]) -> list[str]:
    """A table for each kind of row."""
    parts = []
    for kind, make in _KINDS.items():
        if of := [row for row in found if row["kind"] == kind]:
            parts += make(of)
    return parts


def _attention(found: Sequence[Row]) -> list[str]:
    columns = {
        "S": lambda row: f"{row['shape']['S']}",
        "direction": _direction,
        "way": lambda row: "one device" if row["way"] == "plain" else row["way"].replace("_", "-"),
        "devices": lambda row: f"{row['devices']}",
        "ms": lambda row: f"{row['p50_ms']:.4g}",
        "TFLOP/s of a device": lambda row: f"{row['tflops']:.0f}",
        "times one device": lambda row: f"{row['speedup']:.2f}" if row.get("speedup") else "",
        "of linear": lambda row: f"{row['speedup'] / row['devices']:.2f}" if row.get("speedup") else "",
        "temporary MiB of a device": lambda row: f"{row['temp_bytes'] / 2**20:.0f}",
    }
    return [f"Causal attention to one sequence, {_shared(found)}:\n", _table(found, columns, 4)]


def _training(found: Sequence[Row]) -> list[str]:
    columns = {
        "batch x context of a device": lambda row: f"{row['batch']} x {row['context']}",
        "devices": lambda row: f"{row['devices']}",
        "way": lambda row: row.get("way", "one device"),
        "ms": lambda row: f"{row['p50_ms']:.1f}",
        "1000 tokens/s": lambda row: f"{row['tokens_per_s'] / 1e3:.0f}",
        "of one device": lambda row: f"{row['speedup'] / row['devices']:.3f}" if row.get("speedup") else "",
        "of side by side": lambda row: f"{row['of_linear']:.3f}" if row.get("of_linear") else "",
        "peak GiB of a device": lambda row: f"{row['peak_bytes'] / 2**30:.2f}",
    }
    one = found[0]
    text = (
        f"A training step of {one['size']}, {one['dtype']}; side by side: each device for itself, with nothing sent:\n"
    )
    return [text, _table(found, columns, 3)]


def _kernels(found: Sequence[Row]) -> list[str]:
    columns = {
        "tokens": lambda row: f"{row['shape']['S']}",
        "direction": _direction,
        "ms": lambda row: f"{row['p50_ms']:.4g}",
        "TFLOP/s": lambda row: labels.number(row["tflops"]),
    }
    return [f"Attention to one block, no mask, {_shared(found)}:\n", _table(found, columns, 2)]


def _links(found: Sequence[Row]) -> list[str]:
    columns = {
        "collective": lambda row: row["collective"],
        "devices": lambda row: f"{row['devices']}",
        "bytes on a device": lambda row: f"{row['bytes']}",
        "us": lambda row: f"{row['p50_ms'] * 1e3:.0f}",
        "GB/s of a device": lambda row: labels.number(row["gb_per_s"]),
    }
    return ["Links between the devices of one host:\n", _table(found, columns, 3)]


_KINDS = {"attention": _attention, "training": _training, "kernel": _kernels, "link": _links}


def _direction(row: Row) -> str:
    return "forward and backward" if row["direction"] == "fwdbwd" else row["direction"]


def _shared(found: Sequence[Row]) -> str:
    return " ".join(labels.shared(found).values())


def _table(found: Sequence[Row], columns: dict[str, Callable[[Row], str]], known: int) -> str:
    """The first `known` columns say what a row is; where it has no time, the next one says why."""
    lines = []
    for row in found:
        cells = list(columns.values())
        if not has_time(row):
            empty = [""] * (len(cells) - known - 1)
            lines.append([*(cell(row) for cell in cells[:known]), labels.reason(row["error"]), *empty])
        else:
            lines.append([cell(row) for cell in cells])
    return table(list(columns), lines, known)
