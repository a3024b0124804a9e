"""Checkpoints of a TrainState with Orbax: written beside the old ones, renamed when complete, and only then are old
ones deleted. So a write that fails, or is killed, never costs a checkpoint that was good."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import cast

import jax
import orbax.checkpoint as ocp

from models.errors import UsageError, is_disk_full
from models.step import TrainState

METADATA_BYTES = 2**18  # Orbax's own files beside the arrays, amply


class Checkpoints:
    """The last `keep` checkpoints under `directory`, each named by the number of steps done."""

    def __init__(self, directory: Path, keep: int):
        self.directory = directory.absolute()  # Orbax takes no relative paths
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                # A failed write must be reported before the next step is computed, not some steps later.
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,  # what a killed run left half written
            ),
        )

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Writes `state` unless that step is there already. Raises OSError or, from tensorstore, ValueError."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # A write that runs out of space does no harm here either, but tensorstore's threads print a traceback for every
        # array of it. So the plain case is found before; what shows only while writing, such as a quota, is left.
        needed = sum(array.nbytes for array in jax.tree.leaves(state)) + METADATA_BYTES
        if shutil.disk_usage(self.directory).free < needed:
            raise OSError(
                errno.ENOSPC, f"No space left on device for a checkpoint of {needed} bytes", str(self.directory)
            )
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState:
        """The latest checkpoint, bit for bit, with the shapes, dtypes and placement of `like`."""
        step = self.latest()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        except Exception as error:  # Orbax documents no exception type; any of them means that it can't be read
            if is_disk_full(error):
                raise
            raise UsageError(
                f"The checkpoint {str(self.directory / str(step))!r} can't be read ({type(error).__name__}: {error}); "
                "delete that folder to continue from the one before it."
            ) from error
        return cast(TrainState, restored)

    def close(self) -> None:
        self._manager.close()


def list_steps(directory: Path) -> list[int]:
    """The complete checkpoints under `directory`, without touching anything there."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit() and entry.is_dir())
