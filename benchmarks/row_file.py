"""Where the rows of a run go: beside the file that they are for, and in its place once nothing is lost by it.

A file of rows is one run, since ratios are taken inside a run. So a run never adds to a file: it replaces the whole file,
if it came to its end, has a row for each of the file's rows, and a result where that one has a result. All other runs
(interrupted ones, those of some of the workloads or implementations, those that ran out of time) leave the file as it is:
their rows stay in a file of their own beside it, `NAME.partial-TIME.jsonl`.
"""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.rows import Row, has_time, read

RESULTS = Path(__file__).parent / "results"
_LAST = ("cpu", "elsewhere")  # folders of results
PARTIAL = ".partial-"  # in the names of files that no run has finished, which reports and plots leave out
# What tells the rows of a run apart: those fields of these that a row has.
_IDENTITY = (
    *("suite", "kind", "workload", "implementation", "direction", "devices", "way", "collective", "bytes"),
    *("shape", "dtype", "mask", "config", "size", "batch", "context", "steps"),
    *("kernel", "H", "causal", "tiles", "architecture"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run: its rows, the file that has them, and a sentence on both."""

    rows: list[Row]
    path: Path | None
    message: str
    interrupted: bool


def record(produced: Iterable[Row], path: Path) -> Outcome:
    """Writes the rows as they are produced, and puts them in the place of `path` where no row is lost by it.

    An interrupt (Ctrl-C) ends the run and keeps its rows. Raises SystemExit, before anything is produced, where `path`
    cannot be written or holds something else than rows.
    """
    before, beside = _opened(path)
    made: list[Row] = []
    interrupted = False
    try:
        with beside.open("a", encoding="utf-8") as file:
            for row in produced:
                file.write(json.dumps(row) + "\n")
                file.flush()
                made.append(row)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if not made:
            beside.unlink()
    if not made:
        return Outcome(made, None, f"No rows; {path.name} is as it was.", interrupted)
    reason = "the run was interrupted" if interrupted else _lost(before, made)
    if reason is None:
        os.replace(beside, path)
        return Outcome(made, path, f"{len(made)} rows: {_short(path)}", False)
    message = f"{len(made)} rows: {_short(beside)}. {path.name} {'stays' if before else 'is not made'}: {reason}."
    return Outcome(made, beside, message, interrupted)


def kept() -> list[Path]:
    """All files of rows in benchmarks/results/ that are whole runs: of GPUs, of the CPU, of what is only compiled."""
    found = (path for path in RESULTS.glob("*/*.jsonl") if PARTIAL not in path.name)
    return sorted(found, key=lambda path: (path.parent.name in _LAST, path.parent.name, path.stem))


def _opened(path: Path) -> tuple[list[Row], Path]:
    """(the rows that `path` has, a new empty file beside it)."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
    beside = path.with_name(f"{path.stem}{PARTIAL}{stamp}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = read([path]) if path.exists() else []
        beside.open("x").close()
    except ValueError:
        raise SystemExit(f"--out {path}: it exists and is no file of rows. Name another file with --out.") from None
    except OSError as error:
        raise unwritable("--out", path, error) from None
    return before, beside


def unwritable(option: str, path: Path, error: OSError) -> SystemExit:
    """Returns what ends a program whose `option` names a file that cannot be written."""
    told = f"it cannot be written ({error.strerror}). Name a file in a folder that can with {option}."
    return SystemExit(f"{option} {path}: {told}")


def _lost(before: list[Row], made: list[Row]) -> str | None:
    """Why `made` must not take the place of `before`; None where nothing is lost."""
    rows = {_identity(row) for row in made}
    results = {_identity(row) for row in made if _result(row)}
    missing = [row for row in before if _identity(row) not in (results if _result(row) else rows)]
    if not missing:
        return None
    first = " ".join(
        str(missing[0][name]) for name in _IDENTITY if name != "shape" and missing[0].get(name) is not None
    )
    return f"this run lacks {len(missing)} of its {len(before)} rows, or their results (the first: {first})"


def _identity(row: Row) -> str:
    return json.dumps([row.get(name) for name in _IDENTITY], sort_keys=True)


def _result(row: Row) -> bool:
    return has_time(row) or (bool(row.get("losses")) and not row["error"])


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
