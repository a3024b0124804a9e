"""What the program prints, on any terminal and into any pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from models.errors import OutputError


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Raises OutputError where printing fails, so that it is told apart from files that can't be written."""
    try:
        yield
    except OSError as error:
        raise OutputError from error


def prepare_output() -> None:
    """Prints what the terminal has no character for as \\x.., and keeps what Orbax logs off the screen.

    Of a failed read or write Orbax logs pages of traceback, and then each of tensorstore's threads finds the event loop
    closed that it was to report to. `models.endings` says it in one line.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # None where the shell closed it, with >&-
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def filtered(unraisable: sys.UnraisableHookArgs) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = filtered


def print_error(message: str) -> None:
    """Prints `message` to the standard error, if there is one and somebody may read it."""
    with contextlib.suppress(OSError):
        if message:
            print(message, file=sys.stderr, flush=True)


def finish_output() -> None:
    """Lets vanish what can't be printed: Python would fail at it once more as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
