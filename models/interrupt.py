"""Signals: outside the steps Ctrl-C ends the process at once, inside them it lets the one under way end."""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill or a scheduler, a terminal that is closed


def exit_on_interrupt(comfort: str = "") -> None:
    """From now on Ctrl-C ends the process, with status 130 and words of comfort. It is safe at any time, as SIGKILL is.

    The exception KeyboardInterrupt would get lost where it is raised in a callback, and JAX has one in the garbage
    collector.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        _write(f"\nInterrupted. {comfort}".rstrip().encode() + b"\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)


class StopRequest:
    """While entered, the first of SIGNALS is kept in `signal`; a second one does what it would do otherwise."""

    def __init__(self):
        self.signal: int | None = None
        self._previous = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            _write(b"\nStopping after this step, with a checkpoint (once more to stop at once).\n")
        else:
            self.__exit__()
            signal.raise_signal(number)


def _write(message: bytes) -> None:
    try:
        os.write(2, message)  # not print: the signal may have come in the middle of one, which can't be entered twice
    except OSError:
        pass  # a closed terminal
