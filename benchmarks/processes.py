"""One run in several processes: they compile side by side, since Python lowers one kernel at a time, then time in turn."""

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import command, progress
from benchmarks.rows import Row
from benchmarks.turns import take

# argv, the names of workloads, a function that waits for the turn and returns the end (of time.monotonic) -> rows
Part = Callable[[Sequence[str], Sequence[str], Callable[[], float]], list[Row]]
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


class _Turns:
    """Nobody times while anyone compiles, or while another times; each gets an equal share of the time that is left."""

    def __init__(self, processes: int, seconds: float):
        context = multiprocessing.get_context("spawn")
        self.compiled, self.turn, self.lock = context.Barrier(processes + 1), context.Event(), context.Lock()
        self.left, self.end = context.Value("i", processes, lock=False), context.Value("d", 0.0, lock=False)
        self.until, self.held = time.monotonic() + seconds, False

    def begin(self, take_turn: Callable[[], float]) -> None:
        """Waits until all have compiled and it is this run's turn; then they may time."""
        with contextlib.suppress(threading.BrokenBarrierError):  # one of them failed, and says why
            self.compiled.wait()
            self.end.value = self.until + take_turn()
            self.turn.set()

    def take(self) -> float:
        """Waits for the turn of this process; returns when it ends, of time.monotonic()."""
        self.compiled.wait()
        self.turn.wait()
        self.lock.acquire()
        self.held = True
        now = time.monotonic()
        share = max(0.0, self.end.value - now) / self.left.value
        self.left.value -= 1
        return now + share

    def give(self) -> None:
        """Ends it. Where there was none, because something failed, the others fail, too, in place of waiting for ever."""
        if self.held:
            self.lock.release()
            self.held = False
        else:
            self.compiled.abort()


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Among how many the workloads are divided."""
    told = "divides the workloads among so many processes, which compile side by side (default: %(default)s)"
    parser.add_argument("--processes", type=command.positive, default=1, metavar="N", help=told)


_turns: list[_Turns] = []  # of this process


def _join(turns):
    sys.stderr = open(os.devnull, "w")  # the bars of all processes would overwrite one another
    _turns.append(turns)


def _rows(part, argv, names):
    try:
        return part(argv, names, _turns[0].take)
    finally:
        _turns[0].give()


def shared_out(
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    measured: Callable[..., Iterator[Row]],
    arguments: Callable[[Sequence[str]], argparse.Namespace],
    names: str,
    seconds: float = math.inf,
) -> Iterator[Row]:
    """The rows of `measured(args)`, by as many processes as `args` says.

    Each calls measured(args, take_turn), with its own part of the workloads in the field `names` of `arguments(argv)`.
    """
    if args.processes == 1:
        return measured(args)
    part = functools.partial(_part, measured, arguments, names)
    take_turn = functools.partial(take, args.turn)
    return in_processes(part, argv or sys.argv[1:], getattr(args, names), args.processes, take_turn, seconds)


def _part(measured, arguments, field, argv, names, take_turn):
    args = arguments(argv)
    setattr(args, field, names)
    return list(measured(args, take_turn))


def divide(names: Sequence[str], processes: int) -> list[list[str]]:
    """Returns `names`, in their order, as at most `processes` lists of nearly equal lengths."""
    processes = min(processes, len(names))
    bounds = [i * len(names) // processes for i in range(processes + 1)]
    return [list(names[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def in_processes(
    part: Part,
    argv: Sequence[str],
    names: Sequence[str],
    processes: int,
    take_turn: Callable[[], float],
    seconds: float = math.inf,
) -> Iterator[Row]:
    """The rows of `part` over the workloads `names`, which are dealt to processes, as one run.

    It ends after `seconds`, not counted those that `take_turn` waits, and says.
    """
    if os.environ.get(_PREALLOCATE) != "false":
        raise SystemExit(f"argument --processes: {processes}: they share one GPU's memory: set {_PREALLOCATE}=false.")
    parts = divide(names, processes)
    turns = _Turns(len(parts), seconds)
    same: dict[str, Any] = {}
    pool = ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn"), initializer=_join, initargs=(turns,))
    with pool, progress.bar(len(parts), "processes") as bar:
        futures = [pool.submit(_rows, part, argv, part_names) for part_names in parts]
        threading.Thread(target=turns.begin, args=(take_turn,), daemon=True).start()
        for future in futures:
            for row in future.result():
                same = same or {"run": row["run"], "processes": len(parts)}
                yield row | same
            bar.update()
