"""Checkpoints of a TrainState, written by Orbax, with checksums.

A checkpoint is written beside the old ones and renamed once it is complete, its checksums included; only then are old
ones deleted. So a write that fails, or is killed at any point, never costs a checkpoint that was good.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.checksums import find_damage, has_checksums, write_checksums
from models.errors import TrainingError, UsageError, is_disk_full, is_out_of_memory
from models.folder import CHECKPOINTS, list_steps, resume_command
from models.output import print_error
from models.step import Params, TrainState

METADATA_BYTES = 2**18  # Orbax's own files beside the arrays, amply
ARRAYS = "default"  # inside a checkpoint's folder; the name that Orbax's CheckpointManager gives
UNFINISHED = ".unfinished"


class Checkpoints:
    """The last `keep` checkpoints of the run in `out`, on which the caller holds the lock."""

    def __init__(self, out: Path, keep: int):
        self.out, self.keep = out, keep
        self.directory = out.absolute() / CHECKPOINTS  # Orbax takes no relative paths
        # Not asynchronous: a failed write must be reported before the next step is computed, not some steps later.
        self._checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in self.directory.iterdir():  # what a killed run left half written or half deleted
            if UNFINISHED in entry.name or ".orbax-checkpoint-tmp" in entry.name:
                shutil.rmtree(entry)

    def save(self, state: TrainState) -> None:
        """Writes `state` unless that step is there already. Raises OSError or TrainingError."""
        step = int(state.step)
        if step in list_steps(self.out):
            return
        # A write that runs out of space does no harm here either, but tensorstore's threads print a traceback for every
        # array of it. So the plain case is found before; what shows only while writing, such as a quota, is left.
        needed = sum(array.nbytes for array in jax.tree.leaves(state)) + METADATA_BYTES
        if shutil.disk_usage(self.directory).free < needed:
            raise OSError(
                errno.ENOSPC, f"No space left on device for a checkpoint of {needed} bytes", str(self.directory)
            )
        unfinished = self.directory / f"{step}{UNFINISHED}"
        try:
            self._checkpointer.save(unfinished / ARRAYS, args=ocp.args.StandardSave(state))
        except Exception as error:  # Orbax documents no exception type
            if is_disk_full(error) or is_out_of_memory(error):
                raise
            raise TrainingError(f"The checkpoint of step {step} can't be written ({_brief(error)})") from error
        write_checksums(unfinished)
        os.replace(unfinished, self.directory / str(step))
        for old in list_steps(self.out)[: -self.keep]:
            # Renamed first: half a checkpoint must not look like a whole one.
            shutil.rmtree((self.directory / str(old)).rename(self.directory / f"{old}{UNFINISHED}"))

    def restore(self, like: TrainState) -> TrainState:
        """The latest checkpoint, bit for bit, with the shapes, dtypes and placement of `like`. Raises UsageError."""
        target = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        return _restore(self._checkpointer, target, self.out, list_steps(self.out)[-1], self._way_back)

    def _way_back(self) -> str:
        """How to continue from the latest checkpoint but one, or from one before it if that is damaged too."""
        *earlier, _ = steps = list_steps(self.out)
        for step in reversed(earlier):
            checked = has_checksums(self.directory / str(step))
            if not checked or find_damage(self.directory / str(step)) is None:
                newer = [str(self.out / CHECKPOINTS / str(other)) for other in steps if other > step]
                return (
                    f"That of step {step} {'is intact' if checked else 'has no checksums'}; continue from it with: "
                    f"{shlex.join(['rm', '-r', *newer])} && {resume_command(self.out)}"
                )
        return "No intact checkpoint is left: start a new run with another --out."

    def close(self) -> None:
        self._checkpointer.close()


def restore_params(out: Path, step: int, like: Params) -> Params:
    """The parameters of a checkpoint of the run in `out`, on one device; changes nothing there. Raises UsageError.

    `like`: their shapes and dtypes.
    """
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)}
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    target = ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
    others = [str(other) for other in list_steps(out) if other != step]
    remedy = (
        f"Name another one with --step ({', '.join(others)})." if others else "There is no other: name another run."
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return _restore(checkpointer, target, out, step, lambda: remedy)["params"]


def _restore(checkpointer: ocp.Checkpointer, target: Any, out: Path, step: int, way_back: Callable[[], str]) -> Any:
    """What `target` asks for of the checkpoint of a step, if it is not damaged. Raises UsageError."""
    folder = out.absolute() / CHECKPOINTS / str(step)
    checked = has_checksums(folder)
    if not checked:
        print_error(f"The checkpoint of step {step} has no checksums (it is an old one): it is used unchecked.")
    elif damage := find_damage(folder):
        raise UsageError(f"The checkpoint of step {step} is damaged: {damage}. {way_back()}")
    try:
        return checkpointer.restore(folder / ARRAYS, args=target)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        remedy = "It is intact: is run.json that of this run?" if checked else way_back()
        raise UsageError(f"The checkpoint of step {step} can't be restored ({_brief(error)}). {remedy}") from error


def _brief(error: Exception) -> str:
    """The first line of its message, without the pages that tensorstore adds to some."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].partition(" [tensorstore_spec=")[0]
