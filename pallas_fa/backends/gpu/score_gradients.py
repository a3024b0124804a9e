"""The gradients of a score's arrays in a backward kernel."""

import dataclasses
from typing import Any

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.gradient_pass import GradientPass
from pallas_fa.operands.dims import Dims
from pallas_fa.scores.base import float_leaves


@dataclasses.dataclass(frozen=True)
class ScoreGradients:
    """Which arrays get gradients, by their numbers among the kernel's arrays.

    `floats`: all that get one, of this pass or another. `summed`: those whose gradients this pass sums in registers, one
    value per stationary position. `added`: those whose gradients it adds up in device memory, tile by tile.
    """

    floats: tuple[int, ...]
    summed: tuple[int, ...]
    added: tuple[int, ...]

    @classmethod
    def of(cls, score: Any, arrays: KernelArrays, kind: GradientPass) -> "ScoreGradients":
        """Returns which gradients a pass of this kind gives."""
        floats = float_leaves(score)
        # A sum along stationary positions would take all CTAs, so arrays with one value per query are left to the pass that
        # holds queries, and it does no others.
        kinds = ("scalar", "column", "tile") if kind.keys_stationary else ("column",)
        given = [i for i in floats if kind.accumulates_qk and arrays[i].kind in kinds]
        summed = tuple(i for i in given if arrays[i].kind != "tile")
        return cls(floats, summed, tuple(i for i in given if arrays[i].kind == "tile"))

    def has_unordered_sums(self, arrays: KernelArrays, dims: Dims) -> bool:
        """Returns whether several CTAs add to one element, in no fixed order."""
        broadcast = lambda array: (dims.B > 1 and not array.batched) or (dims.N > 1 and not array.per_head)
        return any(broadcast(arrays[i]) or arrays[i].skewed for i in self.added)
