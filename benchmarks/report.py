"""Writes docs/results.md from the rows: `python -m benchmarks.report`. Nothing on that page is typed.

For each device and file of rows: where and when they were measured, a table with a column for each implementation, and
the picture. Each peer has its speed and the ratio of ours to it; where ours is slower, the cell is bold and marked.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, compiled_report, labels, row_file
from benchmarks.distributed import report as distributed
from benchmarks.markdown import heading, slower, table
from benchmarks.rows import Row, has_time

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
_MOST_OF_A_STEP = 16  # queries, past which matmuls and not the memory take the time
_DIRECTIONS = {
    "forward": "Forward",
    "backward": "Backward (the pullback alone, 2.5 times the forward's operations)",
    "fwdbwd": "Forward and backward",
}
_TOP = """# Results

<!-- Written by `python -m benchmarks.report` from benchmarks/results/. Do not edit: measure, then run it again. -->

A section for each device, a part for each file of rows. Each file is one run, whose implementations are sampled in
alternation. The first column of speeds is ours. In the others, `(1.10x)` says that ours is 1.10 times as fast;
**bold with ▼: ours is slower.** Words in place of a speed say why there is none. Speeds count the operations of allowed
(query, key) pairs only. Errors are the largest difference from float64 truth, relative to the largest true value.
Temporary memory is the compiler's own analysis. [How all of it is measured](benchmarks.md).
"""


def page(files: Iterable[Path]) -> str:
    """The whole page, from files of rows."""
    parts, device = [_TOP], None
    for path in files:
        found = command.read_rows([path])
        if found[0]["device"] != device:
            device = found[0]["device"]
            parts.append(f"## {device}\n")
        parts.append(_part(path, found))
    return "\n".join(parts)


def _part(path: Path, found: Sequence[Row]) -> str:
    suite = found[0]["suite"]
    bodies = {
        "scaling": distributed.tables,
        "decode": _decode,
        "generation": _generation,
        "ragged": _ragged,
        "compiled": compiled_report.tables,
    }
    body = _training if suite.startswith("training") else bodies.get(suite, _attention)
    return "\n".join([heading(path, found), *body(found)])


def _attention(found: Sequence[Row]) -> list[str]:
    """For each direction a table of speeds, and one of what they come to."""
    names, said = _names(found), labels.shared(found)
    unit, factor = labels.unit(found)
    parts = [f"All: {' '.join(said.values())}.\n"] if said else []
    for direction in dict.fromkeys(row["direction"] for row in found):
        of = [row for row in found if row["direction"] == direction]
        workloads = _by(of, "workload")
        lines = []
        for each in workloads:
            one = next(iter(each.values()))
            cells = [_speed(each.get(name), each.get(names[0]), factor) for name in names]
            lines.append([one["mask"], labels.shape(one, list(said)), *cells])
        head = ["mask", "shape", *names]
        if not any(line[1] for line in lines):  # all of them are said above
            head, *lines = ([line[0], *line[2:]] for line in (head, *lines))
        parts += [
            f"{_DIRECTIONS[direction]}, {unit}:\n",
            table(head, lines, words=1 + (head[1] == "shape")),
            _summary(workloads, names),
        ]
    return parts


def _decode(found: Sequence[Row]) -> list[str]:
    """Tables of the time of a step, and of the part of the memory's speed at which it reads keys and values.

    One table for the steps of a run that have the same columns.
    """
    alike: dict[Any, list[Row]] = {}
    for each in _by(found, "workload"):
        rows = list(each.values())
        alike.setdefault((rows[0]["run"], *each), []).extend(rows)
    said = (
        "One step of decoding, us, and its bytes of keys and values a second, of 4.8 TB/s (TFLOP/s, of latent"
        f" attention and of more than {_MOST_OF_A_STEP} queries)."
        " Columns without a library are ours, too: the same cache in pages, or in 8 bits."
    )
    return [said, *(part for rows in alike.values() for part in _decode_run(rows))]


def _decode_run(found):
    names = list(dict.fromkeys(row["implementation"] for row in found))
    lines = []
    for each in _by(found, "workload"):
        one = next(iter(each.values()))
        shape = " ".join(
            f"{name}={one[name]}" for name in (*"BTSNKH", "Hv", "length", "window", "sinks") if one.get(name)
        )
        lines.append([shape, *(_decode_step(each.get(name), each[names[0]]) for name in names)])
    rates = {"copying an array moves": "copy_bytes_per_s", "adding one up reads": "read_bytes_per_s"}
    said = " and ".join(f"{does} {found[0][name] / 1e12:.2f} TB/s" for does, name in rates.items() if name in found[0])
    return [f"\nCommit `{found[0]['commit']}`; in the same run, {said}:\n", table(["shape", *names], lines)]


def _decode_step(row: Row | None, ours: Row) -> str:
    if row is None or not has_time(row):
        return labels.reason(row["error"] if row else None)
    ratio = row["p50_ms"] / ours["p50_ms"]
    is_computing = row.get("Hv") or row["T"] > _MOST_OF_A_STEP
    part = f"{row['tflops_per_s']:.0f}" if is_computing else f"{row['of_memory']:.0%}"
    text = f"{row['p50_ms'] * 1e3:.1f} ({part})"
    text = text if row is ours else f"{text} ({ratio:.2f}x)"
    return slower(text, ratio) if ":" in row["implementation"] and row is not ours else text


def _generation(found: Sequence[Row]) -> list[str]:
    """A table of tokens a second, and of the time of a step."""
    names, one = _names(found), found[0]
    lines = []
    for each in _by(found, "batch"):
        first = next(iter(each.values()))
        label = f"{first['batch']} x ({first['prompt']} + {first['steps']})"
        read = f"{first['bytes'] / 2**30:.2f}"
        lines.append([label, read, *(_generated(each.get(name), each.get(names[0])) for name in names)])
    return [
        f"Text from {one['size']}, {one['dtype']}, random weights, greedy: tokens a second once the prompts are read.\n",
        table(["texts x (prompt + tokens)", "GiB a step reads", *names], lines),
    ]


def _generated(row: Row | None, ours: Row | None) -> str:
    if row is None or not has_time(row):
        return labels.reason(row["error"] if row else None)
    return _against(f"{row['tokens_per_s']:,.0f}, {row['p50_ms']:.2f} ms", ours, row)


def _ragged(found: Sequence[Row]) -> list[str]:
    """A table of times, and of TFLOP/s."""
    names, lines = _names(found), []
    for each in _by(found, "workload"):
        one = next(iter(each.values()))
        alike = [f"{len(list(same))} of {T}, {S}" for (T, S), same in itertools.groupby(one["sequences"])]
        lines.append(
            ["; ".join(alike), str(one["tokens"]), *(_batch(each.get(name), each.get(names[0])) for name in names)]
        )
    heads = " ".join(f"{name}={found[0][name]}" for name in ("N", "K", "H", "page"))
    said = (
        f"One call of `ragged_paged_attention`, us (TFLOP/s); {heads}. The second column is ours with shorter blocks.\n"
    )
    return [said, table(["sequences: how many of how many queries and keys", "room for tokens", *names], lines)]


def _batch(row: Row | None, ours: Row | None) -> str:
    if row is None or not has_time(row):
        return labels.reason(row["error"] if row else None)
    return _against(f"{row['p50_ms'] * 1e3:,.1f} ({row['tflops_per_s']:.0f})", ours, row)


def _names(found: Sequence[Row]) -> list[str]:
    """The implementations, ours first."""
    names = list(dict.fromkeys(row["implementation"] for row in found))
    return sorted(names, key=lambda name: name != labels.ours(names))


def _by(found: Sequence[Row], *fields: str) -> list[dict[str, Row]]:
    """Rows by implementation, for each value of these fields."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        groups.setdefault(tuple(row[field] for field in fields), {})[row["implementation"]] = row
    return list(groups.values())


def _speed(row: Row | None, ours: Row | None, factor: float) -> str:
    """Speed and ratio; the reason where there is no time."""
    if row is None:
        return ""
    if not has_time(row):
        return labels.reason(row["error"])
    return _against(labels.number(row["tflops"] * factor), ours, row)


def _against(text: str, ours: Row | None, row: Row) -> str:
    """A cell with the ratio of ours to this row, unless it is ours."""
    ratio = None if row is ours else _ratio(ours, row)
    return text if ratio is None else slower(f"{text} ({ratio:.2f}x)", ratio)


def _ratio(ours: Row | None, peer: Row) -> float | None:
    """How many times as fast ours is: by the ratios to the baseline that both were paired with, else by median times."""
    if ours is None or not has_time(ours) or not has_time(peer):
        return None
    if ours.get("ratio") and peer.get("ratio"):
        return ours["ratio"] / peer["ratio"]
    return peer["p50_ms"] / ours["p50_ms"]


def _summary(workloads: Sequence[dict[str, Row]], names: Sequence[str]) -> str:
    """For each implementation: how ours compares, the largest error, the most memory."""
    lines = []
    for name in names:
        own = [each[name] for each in workloads if name in each]
        compared = ["", "", ""]
        found = (_ratio(each.get(names[0]), each[name]) for each in workloads if name in each)
        if name != names[0] and (ratios := [ratio for ratio in found if ratio is not None]):
            behind = sum(ratio < 1 for ratio in ratios)
            compared = [
                f"{np.median(ratios):.2f}x",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{behind} of {len(ratios)}",
            ]
        timed = sum(map(has_time, own))
        error = _most(own, "max_error", lambda x: f"{x:.1e}")
        memory = _most(own, "temp_bytes", lambda x: f"{x / 2**20:.0f}")
        lines.append([name, f"{timed} of {len(own)}", *compared, error, memory])
    head = [
        "",
        "timed",
        "ours against it, median",
        "range",
        "ours is slower in",
        "largest error",
        "most temporary memory, MiB",
    ]
    return table(head, lines)


def _most(rows: Iterable[Row], field: str, text: Callable[[float], str]) -> str:
    values = [row[field] for row in rows if row.get(field) is not None]
    return text(max(values)) if values else ""


def _training(found: Sequence[Row]) -> list[str]:
    """Times and memory of a training step, and how far the losses are apart."""
    names, one = _names(found), found[0]
    steps = _by([row for row in found if "losses" not in row], "batch", "context")
    lines = []
    for each in steps:
        first = next(iter(each.values()))
        label = f"{first['batch']} x {first['context']}"
        lines.append([label, *(_step(each.get(name), each.get(names[0])) for name in names)])
    parts = [f"A step of {one['size']}, {one['dtype']}; peak memory by the compiler's analysis:\n"]
    parts.append(table(["batch x context", *names], lines))
    if curves := [row for row in found if row.get("losses")]:
        parts.append(f"Losses of the first {curves[0]['steps']} steps, {curves[0]['unit']}:\n")
        fields = "mean_difference", "max_difference"
        lines = [
            [row["implementation"], f"{row['losses'][-1]:.4f}", *(f"{row[f]:.3f}" if f in row else "" for f in fields)]
            for row in curves
        ]
        head = ["", "last loss", f"distance from {curves[0]['baseline']}, mean", "largest"]
        parts.append(table(head, lines))
    return parts


def _step(row: Row | None, ours: Row | None) -> str:
    if row is None:
        return ""
    if not has_time(row):
        return labels.reason(row["error"])
    speed = f"{row['p50_ms']:.1f} ms, {row['tokens_per_s'] / 1e3:.0f}k tokens/s, {row['peak_bytes'] / 2**30:.2f} GiB"
    return _against(speed, ours, row)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="default: docs/results.md")
    args = parser.parse_args(argv)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(row_file.kept()), "utf-8")
    except OSError as error:
        raise row_file.unwritable("--out", args.out, error) from None


if __name__ == "__main__":
    command.start(main)
