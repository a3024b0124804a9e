"""Ctrl-C that lets the step under way end, so that the state is whole when it is saved."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one raises KeyboardInterrupt at once."""

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Not print: the signal may have come in the middle of one, and a buffered stream can't be entered twice.
        os.write(2, b"\nStopping after this step, with a checkpoint (once more to stop at once).\n")
