"""The ways in which a run ends early, told apart so that each can end with the right message."""

from __future__ import annotations

import errno
from collections.abc import Iterator


class UsageError(ValueError):
    """The caller asked for something that can't be done. The message names the argument, its value and the remedy."""


class TrainingError(RuntimeError):
    """The run itself went wrong (as where the loss is no longer finite); its checkpoints are intact."""


class OutputError(Exception):
    """What the program prints can't be written, for the reason that is this exception's cause."""


class Interrupted(Exception):
    """A signal asked the run to stop, and it stopped after `step` steps with a checkpoint written."""

    def __init__(self, step: int, signal: int):
        super().__init__(f"interrupted by signal {signal} after step {step}")
        self.step, self.signal = step, signal


# Orbax writes arrays through tensorstore, whose errors are ValueErrors with the system's message inside.
FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File too large",
}


def is_disk_full(error: BaseException) -> bool:
    """True if `error`, or what caused it, says that no space (or quota) is left."""
    return any(
        (isinstance(cause, OSError) and cause.errno in FULL) or any(text in str(cause) for text in FULL.values())
        for cause in _causes(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error`, or what caused it, says that the host or the device has too little memory."""
    # JAX's is a RuntimeError. Tensorstore's RESOURCE_EXHAUSTED, a ValueError, is about files.
    return any(
        isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and "RESOURCE_EXHAUSTED" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
