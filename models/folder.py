"""What lies in a run's folder, and when a run may start there."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from models.errors import UsageError, is_disk_full

RECORD, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"
PICTURE, SAMPLE, LOCK = "loss.png", "sample.txt", "lock"


def list_steps(out: Path) -> list[int]:
    """The complete checkpoints of the run in `out`, each named by the number of steps done."""
    directory = out / CHECKPOINTS
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal() and entry.is_dir())


def resume_command(out: Path) -> str:
    """What continues the run in `out`, in a shell."""
    return shlex.join(["python", "-m", "models.train", "--out", str(out), "--resume"])


def check_new(out: Path) -> None:
    """Raises UsageError if a new run in `out` would write over what another run left there."""
    if steps := list_steps(out):
        raise UsageError(
            f"--out={str(out)!r} holds a run already, with a checkpoint at step {steps[-1]}; nothing is ever "
            "written over: add --resume to continue it, or choose another --out."
        )
    if any((out / name).exists() and (out / name).stat().st_size for name in (RECORD, METRICS)):
        left = [str(out / name) for name in (RECORD, METRICS, CHECKPOINTS) if (out / name).exists()]
        raise UsageError(
            f"--out={str(out)!r} holds a run that ended before its first checkpoint, so that there is nothing to "
            f"resume; nothing is ever written over: choose another --out, or remove that run with: "
            f"{shlex.join(['rm', '-r', *left])}"
        )


def make_folder(out: Path) -> None:
    """Makes `out` where it does not exist. Raises UsageError if it can't be made or written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / LOCK).touch()
    except OSError as error:
        if is_disk_full(error):
            raise
        raise unusable(out, error) from error


def unusable(out: Path, error: OSError) -> UsageError:
    """What to raise where the system refuses `out`."""
    return UsageError(
        f"--out={str(out)!r} can't be used ({error.strerror}); it must be a folder that you may write to, or not exist: "
        "choose another."
    )


def write_whole(path: Path, text: str) -> None:
    """Replaces the file at `path`. Whenever the process is killed, or the power fails, it is the old one or the new."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
