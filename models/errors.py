"""The ways in which a run ends early, told apart so that each can end with the right message."""

from __future__ import annotations

import errno


class UsageError(ValueError):
    """The caller asked for something that can't be done. The message names the argument, its value and the remedy."""


class TrainingError(RuntimeError):
    """The run itself went wrong (the loss is no longer finite); its checkpoints are intact."""


class Interrupted(Exception):
    """A signal asked the run to stop, and it stopped after `step` steps with a checkpoint written."""

    def __init__(self, step: int):
        super().__init__(f"interrupted after step {step}")
        self.step = step


def is_disk_full(error: BaseException | None) -> bool:
    """True if `error`, or what caused it, says that no space (or quota) is left.

    Orbax writes arrays through tensorstore, whose errors are ValueErrors with the system's message inside.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
