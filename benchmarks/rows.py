"""Rows of results: one JSON object a line, one line for each (workload, implementation, direction); and their table."""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.measure import Bound, Program

Row = dict[str, Any]


def common(suite: str, commit: str | None) -> Row:
    """What all rows of a run that starts now share."""
    return {
        "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "suite": suite,
        "platform": jax.devices()[0].platform,
        "device": machine.device_kind(),
        "versions": machine.versions(),
        "commit": commit or machine.commit(),
    }


def compiled(program: Program) -> Row:
    """What is known of a program before it runs."""
    w = program.workload
    return {
        "workload": w.name,
        "implementation": program.implementation.name,
        "direction": program.direction,
        "shape": {letter: getattr(w, letter) for letter in ("B", "T", "S", "N", "K", "H", "Hv")},
        "dtype": w.dtype,
        "mask": w.mask,
        "series": w.series,
        "provenance": w.provenance,
        "config": None,  # tiles of a kernel: None is the library's own choice
        "flops": w.flops(program.direction),
        **({"repeats": program.repeats} if program.repeats > 1 else {}),
        "trace_s": _rounded(program.trace_s),
        "compile_s": _rounded(program.compile_s),
        **{f"{name}_bytes": size for name, size in program.memory.items()},
        "error": program.error,
    }


def timed(bound: Bound[Program], ratios: list[float], baseline: str | None) -> Row:
    """What the samples say: times in milliseconds, TFLOP/s of the median, the median of the paired ratios."""
    row = times(bound, bound.program.repeats)
    row["tflops"] = _rounded(bound.program.workload.flops(bound.program.direction) / row["p50_ms"] / 1e9)
    row |= against(bound.program.implementation.name, ratios, baseline)
    if bound.dispatch_s is not None:
        row["dispatch_us"] = _rounded(bound.dispatch_s * 1e6)
    if jax.devices()[0].platform == "cpu":
        row["cpu_p50_ms"] = _rounded(np.median(bound.cpu) * 1e3)
    return row


def times(bound: Bound[Any], repeats: int = 1) -> Row:
    """Milliseconds of one of the `repeats` things that a call does."""
    milliseconds = np.array(bound.wall) * 1e3 / repeats
    p50, p90 = np.percentile(milliseconds, [50, 90])
    row = {"p50_ms": _rounded(p50), "p90_ms": _rounded(p90), "min_ms": _rounded(milliseconds.min())}
    return row | {"samples": len(milliseconds), "calls_per_sample": bound.calls}


def against(name: str, ratios: list[float], baseline: str | None) -> Row:
    """The median of the paired ratios; 1 for the baseline itself."""
    return {"baseline": baseline, "ratio": 1.0 if name == baseline else _rounded(np.median(ratios)) if ratios else None}


@jax.jit
def distance(x: Any, y: Any) -> jax.Array:
    """The largest difference of two arrays over the largest value of `y`; NaN where one is not finite."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.max(jnp.abs(x - y), initial=0) / jnp.maximum(jnp.max(jnp.abs(y), initial=0), 1e-30)


def accuracy(errors: dict[str, dict[str, float]], checked_rows: int) -> Row:
    """The worst of all outputs, and each; None where it is not finite."""
    rounded = {name: {k: _finite(x) for k, x in each.items()} for name, each in errors.items()}
    worst: Row = {}
    for kind in ("max", "mean"):
        values = [each[kind] for each in errors.values()]
        worst[f"{kind}_error"] = _finite(max(values)) if np.all(np.isfinite(values)) else None
    return worst | {"errors": rounded, "checked_query_rows": checked_rows}


def rounded(row: Row) -> Row:
    """Its floats to four digits."""
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in row.items()}


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of JSONL files. Raises ValueError where a file holds something else."""
    found = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in found):
        raise ValueError("each line must be a JSON object")
    return found


def has_time(row: Row) -> bool:
    """Whether it was timed, with right results."""
    return row.get("p50_ms") is not None and not row["error"]


def table(rows: list[Row], baseline: str | None) -> str:
    """The rows as text, grouped by workload and direction; the last column is `baseline` time over own time."""
    head = ["workload", "direction", "implementation", "p50 ms", "p90", "TFLOP/s", "temp MiB", "max error"]
    lines = [[*head, f"x {baseline}" if baseline else "ratio"]]
    last = None
    for row in sorted(rows, key=lambda r: (_order(rows, r["workload"]), r["direction"])):
        group = (row["workload"], row["direction"])
        start = list(group) if group != last else ["", ""]
        last = group
        if row.get("p50_ms") is None:
            lines.append([*start, row["implementation"], "-", "", "", _mib(row), "", _short(row.get("error"))])
            continue
        error = f"{row['max_error']:.1e}" if row.get("max_error") is not None else ""
        ratio = row["error"] or (f"{row['ratio']:.2f}" if row.get("ratio") is not None else "")
        times = [f"{row['p50_ms']:.4g}", f"{row['p90_ms']:.4g}", f"{row['tflops']:.3g}"]
        lines.append([*start, row["implementation"], *times, _mib(row), error, ratio])
    return aligned(lines)


def aligned(lines: list[list[str]]) -> str:
    """Cells in columns; the last one may be of any width."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return "\n".join("  ".join(c.ljust(n) for c, n in zip(line, [*widths, 0], strict=True)).rstrip() for line in lines)


def _order(rows, workload):
    return next(i for i, row in enumerate(rows) if row["workload"] == workload)


def _mib(row):
    return f"{row['temp_bytes'] / 2**20:.1f}" if row.get("temp_bytes") is not None else ""


def _short(text):
    text = text or ""
    return text if len(text) <= 70 else text[:67] + "..."


def _finite(x):
    return float(f"{x:.3g}") if np.isfinite(x) else None


def _rounded(x):
    return None if x is None else float(f"{x:.4g}")
