"""Writes what the compiler says of every configuration of the tables of tiles, as rows of the results page.

python -m tests.elsewhere.rows              # 15 to 30 minutes; then `make results`

A row for each kernel and kind of GPU: registers, spilled bytes and shared memory of a CTA, and the seconds that lowering
and compiling took in a process that compiled nothing else.
"""

import datetime
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from benchmarks import command, machine, progress, row_file
from benchmarks.rows import Row
from tests.elsewhere.environment import environment
from tests.elsewhere.kernels import kernels
from tests.elsewhere.targets import TARGETS

DEVICE = "Compiled, not run"


def rows(variables: dict[str, str]) -> Iterator[Row]:
    """Compiles for one kind of GPU after the other."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    common = {"run": started, "suite": "compiled", "device": DEVICE, "commit": machine.commit()}
    common |= {"versions": machine.versions()}
    with progress.bar(len(TARGETS), "compile") as bar:
        for architecture in TARGETS:
            for kernel in kernels(architecture, variables):
                yield {**common, **kernel, "error": None}
            bar.update()


def main() -> None:
    """Runs the command line."""
    with tempfile.TemporaryDirectory() as name:
        variables = environment(pathlib.Path(name))
        if isinstance(variables, str):
            sys.exit(f"Nothing can be compiled for a GPU here: {variables}.")
        outcome = row_file.record(rows(variables), row_file.RESULTS / "elsewhere" / "compiled.jsonl")
    print(outcome.message)
    if outcome.interrupted:
        sys.exit(command.INTERRUPTED)


if __name__ == "__main__":
    command.start(main)
