"""The record of a run: one JSON object per line, in `metrics.jsonl`. Whatever shows a run reads this file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of `path`; none if it does not exist. A last line that was cut off by a kill is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


class MetricsLog:
    """Appends rows. A run that continues from `step` first drops the rows of later steps, which it is to repeat."""

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [row for row in read_rows(path) if row["step"] <= step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(replacement, path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: list[Row]) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
