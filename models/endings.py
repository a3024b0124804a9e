"""How a run that did not end well ends: the exit status, and one message with what to do."""

from __future__ import annotations

import logging
from pathlib import Path

from models.errors import Interrupted, OutputError, TrainingError, UsageError, is_disk_full, is_out_of_memory
from models.folder import list_steps, resume_command

FAILED, REFUSED, INTERRUPTED, NOBODY_READS = 1, 2, 130, 141  # the last two as a shell has them: 128 + the signal


def explain(
    error: BaseException, out: Path | None, memory: str = "Lower --batch, --context or --size (in a new run)"
) -> tuple[int, str] | None:
    """(exit status, message) of an end that a user can act on; None for a bug, which keeps its traceback.

    `out`: the folder of the run, where the settings were read before it ended. `memory`: what needs less of it.
    """
    saved = _what_is_saved(out)
    match error:
        case UsageError():
            return REFUSED, f"error: {error}"
        case Interrupted():
            return 128 + error.signal, f"Interrupted after step {error.step}. {saved}"
        case KeyboardInterrupt():
            return INTERRUPTED, f"\nInterrupted. {saved}"
        case OutputError(__cause__=BrokenPipeError()) | BrokenPipeError():  # `| head`: whoever read has seen enough
            return NOBODY_READS, ""
        case OutputError():
            return FAILED, f"error: what the run prints can't be written ({error.__cause__}). {saved}"
        case TrainingError():
            return FAILED, f"error: {error}. {saved}"
        case ModuleNotFoundError():
            remedy = "pip install 'pallas_fa[train]', or in the repository `make setup`"
            return FAILED, f"error: {error}; install what training needs: {remedy}."
    if is_disk_full(error):
        # asyncio would log, at any time from now on, Orbax's other writes that failed for the same reason.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        full = f"the disk that holds --out={str(out)!r} is full, or a limit is reached (a quota, ulimit -f)"
        return FAILED, f"error: {full}. Free some space. {saved}"
    if is_out_of_memory(error):
        return FAILED, f"error: out of memory. {memory}. {saved}"
    if isinstance(error, OSError) and error.filename is not None:
        return FAILED, f"error: {str(error.filename)!r}: {error.strerror}. {saved}"
    return None


def _what_is_saved(out: Path | None) -> str:
    if out is None:
        return "Nothing was written."
    steps = list_steps(out)
    if not steps:
        return "No checkpoint was written."
    return f"The last checkpoint is step {steps[-1]}; continue with: {resume_command(out)}"
