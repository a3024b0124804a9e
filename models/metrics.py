"""The record of a run: one JSON object per line, in `metrics.jsonl`. Whatever shows a run reads this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.errors import UsageError
from models.folder import write_whole

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of `path`; none if it does not exist. A last line that was cut off by a kill is left out.

    Raises UsageError if any other line is not a row.
    """
    *lines, unended = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or not even UTF-8
            row = None
        if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
            raise UsageError(
                f"{str(path)!r} is damaged: line {number} is {line[:40]!r}, and must be a JSON object with a step; "
                "repair that line, or delete it to go on without it."
            )
        rows.append(row)
    return rows


class MetricsLog:
    """Appends rows. A run that continues from `step` first drops the rows of later steps, which it is to repeat."""

    def __init__(self, path: Path, step: int):
        self.path = path
        write_whole(path, "".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step))
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: list[Row]) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
