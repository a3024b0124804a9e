"""What the command lines of all benchmarks share: options that are checked, how a run ends, and with which exit code."""

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import machine, measure, row_file
from benchmarks.implementations import Implementation, available, parse
from benchmarks.rows import Row, read

# The exit codes that shells give a program that Ctrl-C ended, and one whose output nobody reads, as with `| head`.
INTERRUPTED, NOBODY_READS = 130, 141


def whole(text: str, least: int = 0) -> int:
    """A whole number from `least` on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: ask for a whole number, {least} or more")
    return int(text)


positive = functools.partial(whole, least=1)


def not_negative(text: str) -> float:
    """A number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: ask for a number, 0 or more")
    return value


def above_zero(text: str) -> float:
    """A number above 0."""
    if not (value := not_negative(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: ask for a number above 0")
    return value


def add_implementations(parser: argparse.ArgumentParser) -> None:
    """Which implementations are measured."""

    def known(text):
        try:
            return available(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    metavar = "LIBRARY:BACKEND[+FORM]"
    parser.add_argument("--implementations", nargs="+", type=known, metavar=metavar, help="default: the suite's")


def implementations(args: argparse.Namespace, suite: Sequence[str]) -> list[Implementation]:
    """Those of the command line, each once; else those of a suite. A library that is not installed has rows that say so."""
    return list(dict.fromkeys(args.implementations or map(parse, suite)))


def add_sampling(parser: argparse.ArgumentParser, rounds: int, target_ms: float) -> None:
    """How often and for how long each program is timed."""
    add = parser.add_argument
    add("--rounds", type=positive, default=rounds, help="samples of each program (default: %(default)s)")
    add("--target-ms", type=not_negative, default=target_ms, help="shortest length of a sample (default: %(default)s)")


def add_rows(parser: argparse.ArgumentParser, rounds: int, out: str) -> None:
    """How often each program is timed, and where the rows go, of benchmarks with a table of their own."""
    add = parser.add_argument
    add("--rounds", type=positive, default=rounds)
    add("--commit", help="recorded where this is no git repository")
    add("--out", type=Path, default=row_file.RESULTS / machine.folder() / f"{out}.jsonl")


def add_run(parser: argparse.ArgumentParser, budget_s: float, threads: int, out: str) -> None:
    """The limits of a run, and where its rows go."""
    add = parser.add_argument
    add(
        "--budget-seconds",
        type=not_negative,
        default=budget_s,
        help="wall-clock limit, kept to within a call or a compilation (default: %(default)s)",
    )
    add("--compile-threads", type=positive, default=threads, help="default: %(default)s here")
    add("--commit", help="recorded where this is no git repository")
    add(
        "--out",
        type=Path,
        help=f"default: benchmarks/results/DEVICE/{out}.jsonl; a run that would lose rows of this file goes beside it",
    )


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Whether the rows are drawn."""
    parser.add_argument("--no-plot", action="store_true", help="do not draw the rows at the end")


def read_rows(paths: Sequence[Path], *fields: str) -> list[Row]:
    """All rows of files that the command line names, each with these fields."""
    try:
        found = read(paths)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}: the files must hold rows, one JSON object a line.") from None
    if not found:
        raise SystemExit(f"No rows in {', '.join(path.name for path in paths)}: nothing to read.")
    if lacking := [field for field in fields if not all(field in row for row in found)]:
        names = ", ".join(path.name for path in paths)
        raise SystemExit(f"{names}: not all rows have the fields {', '.join(lacking)}. Name rows of another benchmark.")
    return found


def carry_out(
    produced: Iterable[Row],
    out: Path,
    table: Callable[[list[Row]], str],
    plot: bool,
) -> list[Row]:
    """Runs what produces the rows, records them for `out`, prints `table`, and may draw them beside their file.

    After an interrupt it does the same with the rows so far, and raises SystemExit(130).
    """
    outcome = row_file.record(produced, out)
    if outcome.rows:
        print(table(outcome.rows))
    print(outcome.message)
    if plot and outcome.path is not None:
        _draw(outcome.rows, outcome.path)
    if outcome.interrupted:
        raise SystemExit(INTERRUPTED)
    return outcome.rows


def _draw(found: list[Row], path: Path) -> None:
    try:
        from benchmarks import plot
    except ModuleNotFoundError as error:
        print(f"No plot: there is no {error.name} here. Draw it elsewhere: python -m benchmarks.plot {path.name}")
    else:
        plot.draw(found, path.with_suffix(".png"))


def start(main: Callable[[], object]) -> None:
    """Runs a program to its exit code, at once where a compilation goes on that nobody waits for."""
    code: int | str | None = 0
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        code = NOBODY_READS
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print, too
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("\nInterrupted.", file=sys.stderr)
    except SystemExit as end:
        code = end.code
    if not measure.still_compiling():
        sys.exit(code)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else code or 0)  # the usual end waits for the compilation
