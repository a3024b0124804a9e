"""The lock on a run's folder, so that two processes never write into one."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from models.errors import UsageError
from models.folder import LOCK


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the lock on the folder `out`. Raises UsageError, saying who has it, if another process does.

    The lock is flock(2)'s: the system releases it when the process ends, however it ends. The file stays, and what it
    says of its holder means nothing once it is released.
    """
    with (out / LOCK).open("a+", errors="replace") as file:  # not "w": until the lock is ours, the text is its holder's
        _take(file, fcntl.LOCK_EX, out)
        file.truncate(0)
        started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
        file.flush()
        yield


def check_unlocked(out: Path) -> None:
    """Raises UsageError if another process holds the lock on the folder `out`; changes nothing there."""
    with contextlib.suppress(FileNotFoundError), (out / LOCK).open(errors="replace") as file:
        _take(file, fcntl.LOCK_SH, out)


def _take(file: IO[str], kind: int, out: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise UsageError(
            f"--out={str(out)!r} is in use by {holder}; two runs must not write into one folder: wait for it to end, "
            "or choose another --out."
        ) from None
    except OSError as error:
        raise UsageError(
            f"--out={str(out)!r} lies on a file system without locks ({error.strerror}), where another run can't be "
            "kept out: choose an --out on another."
        ) from error
