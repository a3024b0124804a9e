"""What is static in one kernel for latent attention: its sizes, its work, its shared memory."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.online_softmax import LAG
from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.hopper import pages
from pallas_fa.problem import Problem

ROWS, KEYS = 64, 64  # query heads of a CTA, keys of a key block
H, HV = 576, 512  # columns of keys, of which values are the first
HALF = HV // 2
# Columns of a key block that are loaded, and released, together: those that are no values, and the half of each warpgroup.
PIECES = {"rope": (HV, H - HV), "left": (0, HALF), "right": (HALF, HALF)}
HALVES = "left", "right"
_MOST_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class MlaPlan:
    """All that is static in one kernel."""

    problem: Problem
    kv_splits: int
    interpret: bool = False

    @classmethod
    def of(cls, problem: Problem, gpu: Gpu, interpret: bool = False) -> "MlaPlan":
        """Returns the plan whose CTAs fill the GPU best."""
        whole = cls(problem, 1, interpret)
        pairs = -(-problem.dims.S // (2 * KEYS))

        def time(splits):  # in pairs of key blocks; to start a CTA takes about one, and so does a merge
            rounds = -(-whole.ctas * splits // gpu.multiprocessors)
            return rounds * (-(-pairs // splits) + 1) + (splits > 1)

        return dataclasses.replace(whole, kv_splits=min(range(1, min(_MOST_SPLITS, pairs) + 1), key=time))

    @property
    def row_blocks(self) -> int:
        """CTAs that share the heads of one query."""
        return -(-self.problem.dims.N // ROWS)

    @property
    def queries(self) -> int:
        """Queries of all sequences."""
        return self.problem.dims.B * self.problem.dims.T

    @property
    def ctas(self) -> int:
        """How many CTAs there are."""
        return self.queries * self.kv_splits * self.row_blocks

    @property
    def boxes(self) -> int:
        """Of how many boxes TMA makes a piece of a key block: several where it has several pages."""
        return pages.boxes(self.problem.pages, KEYS)

    @property
    def subtract_max(self) -> bool:
        """As of `ForwardCore`: latent attention has no score."""
        return True

    @property
    def lag(self) -> float:
        """See `online_softmax`."""
        return LAG[self.problem.dtype.name]

    @property
    def out_dtype(self) -> np.dtype:
        """Partial results are float32."""
        return np.dtype(np.float32) if self.kv_splits > 1 else self.problem.dtype

    @functools.cached_property
    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers by name, in the order in which they lie in memory.

        `p_smem`: probabilities of both warpgroups; at first, in place of those of the second, the columns of the queries
        that are kept in registers. `q_smem`: one tile, by a number that compilers can't see through (see
        `Warpgroup._slot`). `rows_smem`: maxima of both warpgroups, and their row sums. `x_ready`, `x_free`: one
        barrier for each of the two key blocks, or for each warpgroup that hands something over.
        """
        dtype = self.problem.dtype
        tile = lambda dtype, *shape: plgpu.SMEM(shape, dtype, transforms=swizzle(dtype, 128))
        scratch: dict[str, Any] = {"q_ready": plgpu.Barrier(num_arrivals=2)}
        for name in PIECES:
            scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
            scratch[f"{name}_ready"] = plgpu.Barrier(num_arrivals=self.boxes, num_barriers=2)
        scratch["p_ready"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
        scratch["done"] = plgpu.Barrier(num_arrivals=2)
        scratch["rows_smem"] = plgpu.SMEM((4, ROWS), jnp.float32)
        scratch["p_smem"] = tile(dtype, 2, ROWS, KEYS)
        scratch["q_smem"] = tile(dtype, 1, ROWS, HV)
        for name, (_, size) in PIECES.items():
            scratch[f"{name}_smem"] = tile(dtype, 2, KEYS, size)
        for half in HALVES:  # of the output, which takes the place of keys that nothing reads any more
            out = tile(self.out_dtype, ROWS, HALF)
            if self.interpret:  # which has no unions
                scratch[f"out_{half}_smem"] = out
            else:
                scratch[f"{half}_smem"] = plgpu.RefUnion(scratch[f"{half}_smem"], out)
        return scratch
