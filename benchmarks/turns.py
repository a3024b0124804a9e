"""Several runs on one machine: they compile side by side, and time one after the other."""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.row_file import unwritable

_held: list[Any] = []  # open until the program ends


def add_turn(parser: argparse.ArgumentParser) -> None:
    """Whose turn it is."""
    told = "times nothing while another program holds a lock on this file: so runs compile side by side"
    parser.add_argument("--turn", type=Path, metavar="FILE", help=told)


def take(turn: Path | None) -> float:
    """Waits until no other program holds `turn`, then holds it until this one ends; returns how many seconds it waited."""
    if turn is None:
        return 0.0
    import fcntl  # which not every platform has

    start = time.monotonic()
    try:
        _held.append(turn.open("a"))
    except OSError as error:
        raise unwritable("--turn", turn, error) from None
    fcntl.flock(_held[-1], fcntl.LOCK_EX)
    return time.monotonic() - start
