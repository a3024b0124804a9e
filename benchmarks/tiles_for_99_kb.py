"""The tiles of the kernels by mma.sync for GPUs on which a CTA has 99 KB of shared memory, to be named on any GPU."""

from typing import Any

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.mma.backward.choose import plans
from pallas_fa.backends.mma.config import Config
from pallas_fa.backends.mma.forward.choose import choose
from pallas_fa.problem import normalise

_L4 = Gpu("8.9", 58, 99 * 1024)


def config(query: Any, key: Any, value: Any, **keywords: Any) -> Config:
    """Returns the tiles for a call of `dot_product_attention` of which one pass gives all gradients."""
    problem, _ = normalise(query, key, value, **keywords)
    (backward,) = plans(problem, _L4)
    return Config(forward=choose(problem, _L4).config, backward=backward.config)
