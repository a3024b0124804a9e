"""A step of the online softmax that looks for no maximum: row sums say where one must be raised.

What is subtracted from a row's logits need not be their maximum, as long as no probability is too large. The sums of a
step, which are computed anyway, show that. The logits are kept until then, which takes registers (evidence:
forward/maxima-by-sums).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.layouts import PER_ROW
from pallas_fa.backends.gpu.online_softmax import plus_columns
from pallas_fa.backends.gpu.registers import rounded
from pallas_fa.backends.gpu.warps import any_above


def softmax_by_sums(
    x: Any, factor: float, m: Any, l: Any, *, lag: float, dtype: Any, interpret: bool
) -> tuple[Any, ...]:
    """As `online_softmax` without a score, where no mask hides logits: returns (partial sums, p, maximum, rescaling factor).

    A row's maximum is raised where one of the partial sums of this step is above 2^lag, in base 2. Only then are the
    probabilities of its warp computed again, and only such rows get others.

    Args:
      x, factor, m, l: as of `online_softmax`.
      lag: see above.
      dtype: of p; 16-bit floats are rounded here, and not where p is used.
      interpret: for JAX's GPU interpret mode.
    """
    base_2, largest_sum = factor * LOG2E, 2.0**lag
    as_dtype = lambda p: p if dtype == jnp.float32 else rounded(p, dtype, interpret)
    probabilities = lambda x, shift: jnp.exp2(x * base_2 - lax.broadcast_in_dim(shift, x.shape, [0]))
    p = probabilities(x, m)  # infinity in rows that have seen no key
    sums = plus_columns(None, p)
    p = as_dtype(p)  # before the vote: else both forms are in registers there

    def raised(x, m, l, sums, _):
        fits = sums.max(axis=1) <= largest_sum
        new_m = jnp.where(fits, m, jnp.maximum(m, x.max(axis=1) * base_2))
        shift = jnp.where(new_m == -jnp.inf, 0.0, new_m)
        p, rescale = probabilities(x, shift), jnp.exp2(m - shift)
        return plus_columns(l * lax.broadcast_in_dim(rescale, l.shape, [0]), p), as_dtype(p), new_m, rescale

    def unchanged(_, m, l, sums, p):
        return l + sums, p, m, plgpu.layout_cast(jnp.ones(m.shape, jnp.float32), PER_ROW)

    return lax.cond(any_above(sums, largest_sum, interpret), raised, unchanged, x, m, l, sums, p)
