"""Loss curves of one model with several attentions: the same parameters at step 0, the same batches, side by side."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import optax

from benchmarks import measure, progress, rows
from benchmarks.training_program import Training
from models.step import schedule
from models.text import TextTask

KIND = "loss_curve"
BLOCK = 10  # steps of one program before the next one takes its turn: where the time ends, all have got as far
_PEAK_RATE = 3e-4


def learning_rate(steps: int) -> optax.Schedule:
    """Rises over a tenth of the steps, and falls to 0 after the last."""
    return schedule(_PEAK_RATE, _warmup(steps), max(steps, 1))


def _warmup(steps):
    return steps // 10


@dataclasses.dataclass
class Curve:
    """The losses of a compiled program so far, in TextTask's unit; `error` says why there are no more."""

    program: Training
    error: str | None
    losses: list[float] = dataclasses.field(default_factory=list)

    def advance(self, steps: range) -> None:
        """Takes these steps, unless something failed before. What fails ends this curve alone."""
        if self.error is not None:
            return
        try:
            if steps.start == 0:
                self.program.begin()
            losses = self.program.losses(steps)
            if not np.isfinite(losses).all():
                raise FloatingPointError("wrong: a loss is not finite")
            self.losses += [round(loss, 6) for loss in losses]
        except Exception as error:  # out of memory, or what a library raises at run time: the row's result
            self.error = measure.error_text(error)
            self.program.end()

    def row(self, steps: int, base: Sequence[float]) -> rows.Row:
        """The losses, and how far they are from the baseline's at the steps that both have."""
        self.program.end()
        if self.error is None and len(self.losses) < steps:
            self.error = f"the budget was spent after {len(self.losses)} of {steps} steps"
        row = {"kind": KIND, **self.program.what(), "steps": steps, "losses": self.losses, "error": self.error}
        apart = np.abs(difference(self.losses, base))
        if len(apart):
            row |= {"max_difference": float(apart.max()), "mean_difference": float(apart.mean())}
        return rows.rounded(row | {"unit": TextTask.unit, "learning_rate": _PEAK_RATE, "warmup": _warmup(steps)})


def train(programs: Sequence[Training], baseline: str, steps: int, end: float, bar: progress.Bar) -> list[rows.Row]:
    """A row for each program; fewer steps where the time ends at `end`."""
    curves = [Curve(program, program.error) for program in programs]
    for start in range(0, steps, BLOCK):
        if time.monotonic() > end:
            break
        block = range(start, min(start + BLOCK, steps))
        for curve in curves:
            curve.advance(block)
        bar.update(len(block))
    base = next((curve.losses for curve in curves if curve.program.implementation.name == baseline), [])
    return [{**curve.row(steps, base), "baseline": baseline} for curve in curves]


def difference(losses: Sequence[float], base: Sequence[float]) -> np.ndarray:
    """`losses` less `base`, at the steps that both have."""
    both = min(len(losses), len(base))
    return np.array(losses[:both]) - np.array(base[:both])
