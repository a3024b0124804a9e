"""Scores and masks on a tile of logits of a forward kernel."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.allowed import Pairs, elementwise_test
from pallas_fa.backends.gpu.forward_plan import ForwardCore
from pallas_fa.backends.gpu.layouts import indices
from pallas_fa.backends.gpu.online_softmax import with_positive_factor
from pallas_fa.scores.base import evaluate


class Place(NamedTuple):
    """Where a tile of logits is: batch entry, query head, its first query and its first key.

    `queries`: how many there are, where the rows of the tile are those of several key blocks, one after the other; None
    where each row is another query.
    """

    b: Any
    n: Any
    t0: Any
    s0: Any
    queries: int | None = None

    def positions(self, shape: tuple[int, int], interpret: bool) -> tuple[Any, Any]:
        """Returns (query, key) of each element of a tile of `shape`."""
        row, column = (indices(shape, axis, interpret) for axis in (0, 1))
        queries = self.queries_of_a_block(shape[0])
        if queries is not None:
            of_block = lax.div(row, jnp.full_like(row, queries))
            row, column = row - of_block * queries, column + of_block * shape[1]
        return self.t0 + row, self.s0 + column

    def queries_of_a_block(self, rows: int) -> int | None:
        """Returns how many of a tile's rows each key block has; None where all are of one key block."""
        return self.queries if self.queries is not None and self.queries < rows else None


def logits(
    plan: ForwardCore, x: Any, at: Place, is_boundary: bool, load: Callable[[], tuple[Any, Any]]
) -> tuple[Any, float]:
    """Returns (y, factor > 0) whose product are the logits after score and mask; -inf where masked.

    Args:
      plan: the kernel's.
      x: the products of queries and keys [queries, keys], unscaled.
      at: where the tile is.
      is_boundary: whether the mask, or the end of the keys, may hide some of them.
      load: returns score and mask with their arrays: scalars, or broadcast to the tile; called only where one is needed.
    """
    problem = plan.problem
    factor = problem.scale
    if problem.score is None and not is_boundary:
        return with_positive_factor(x, factor)
    score, mask = load()
    t, s = at.positions(x.shape, plan.interpret)
    if problem.score is not None:
        apply = lambda x, t, s, score: evaluate(score, x * problem.scale, at.b, at.n, t, s)
        x, factor = elementwise.inline_times(apply, x, t, s, score, precise=problem.dtype == jnp.float32)
    x, factor = with_positive_factor(x, factor)
    if is_boundary:
        end = problem.dims.S if plan.has_padding_keys else None
        if at.queries_of_a_block(x.shape[0]) is None:
            pairs = Pairs(x.shape, at.t0, at.s0, "kv_range", None, end, plan.interpret)
            allowed = pairs.allowed(mask, at.b, at.n, t, s)
            return x if allowed is None else jnp.where(allowed, x, -jnp.inf), factor
        if end is not None:
            x = jnp.where(s < end, x, -jnp.inf)
        if mask is not None:
            x = jnp.where(elementwise_test(mask, at.b, at.n, t, s), x, -jnp.inf)
    return x, factor
