"""Which interval of keys each chunk of queries needs, as few widths: a program has one loop body for each width."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.visits import hull
from pallas_fa.masks import Mask

_ALIGNMENT = 64  # of where an interval starts and ends, so that matmuls read whole tiles
_RUNS = 4  # of chunks, that may have intervals of one width each
_CHOICES = 8, 4, 2, 1  # of intervals that are known at run time: shares of the keys
_WORTH_A_CHOICE = 4096  # keys from which on such a choice, for which the host waits, pays


class _Interval(Chunks):
    """The keys as one interval of `chunk` positions, whose index is where it starts."""

    def start(self, i: Any) -> Any:
        return jnp.asarray(i, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Group:
    """Chunks of queries whose intervals have one width, or one of several widths that are known at run time.

    Attributes:
      first: the first chunk of queries.
      count: how many chunks.
      keys: the key axis for each width.
      choice: the index into `keys` for each chunk, int32 [count]; None where there is one width.
      starts: where the interval of each chunk starts, for each width: int32 [widths, count].
    """

    first: int
    count: int
    keys: tuple[Chunks, ...]
    choice: Any
    starts: Any

    def loop(self, step: Callable[[Any, Chunks, Any, Any], Any], carry: Any) -> Any:
        """Returns the carry after step(i, keys, j, carry) for each chunk i of queries and interval j of keys."""

        def one(n, carry):
            steps = [
                lambda carry, keys=keys, starts=starts: step(self.first + n, keys, jnp.asarray(starts)[n], carry)
                for keys, starts in zip(self.keys, self.starts, strict=True)
            ]
            return steps[0](carry) if self.choice is None else lax.switch(self.choice[n], steps, carry)

        if self.count == 1:
            return one(0, carry)
        return lax.fori_loop(np.int32(0), np.int32(self.count), one, carry)

    def loop_ahead(
        self, statistics: Callable[[Any], Any], ahead: Callable[..., Any], step: Callable[..., Any], carry: Any
    ) -> Any:
        """Does what `loop` does with step(i, keys, j, x, carry), where x = ahead(i, keys, j, statistics(i)).

        The loop computes x one chunk early, and statistics(i) one before that, so that both are parameters of its body,
        which XLA fuses into a matmul that uses them. Where widths differ from chunk to chunk, x is computed in the step.
        """
        if self.choice is not None or self.count == 1:

            def both(i, keys, j, carry):
                statistics_i, carry = carry
                return statistics(i + 1), step(i, keys, j, ahead(i, keys, j, statistics_i), carry)

            return self.loop(both, (statistics(self.first), carry))[1]
        (keys,), (starts,) = self.keys, map(jnp.asarray, self.starts)
        start = lambda n: lax.dynamic_index_in_dim(starts, n, keepdims=False, allow_negative_indices=False)
        first, last = np.int32(self.first), np.int32(self.count - 1)

        def step_and_ahead(n, carry):
            x, following, carry = carry
            n, carry = after(n, step(first + n, keys, start(n), x, carry))
            # What lies past the last chunk is clamped, and not used: statistics, of two chunks x as well.
            return ahead(first + n + 1, keys, start(n + 1), following), statistics(first + n + 2), carry

        # So that x waits until the memory of the last one is free.
        after = lambda i, carry: lax.optimization_barrier((i, carry))
        begin, carry = after(jnp.int32(0), carry)
        begin_ahead = lambda n, statistics_0: ahead(first + n, keys, start(n), statistics_0)
        if self.count == 2:  # a loop of one step would be unrolled
            x = begin_ahead(begin, statistics(first))
            return lax.fori_loop(np.int32(0), last + 1, step_and_ahead, (x, statistics(first + 1), carry))[2]
        x = _apart(begin_ahead, begin, statistics(first))
        x, _, carry = lax.fori_loop(np.int32(0), last, step_and_ahead, (x, statistics(first + 1), carry))
        return _apart(lambda x, carry: step(first + last, keys, start(last), x, carry), x, carry)


def _apart(fn, *args):
    """Returns fn(*args), computed apart from the rest of a program, so that XLA fuses the arguments as those of a loop.

    It is a branch that is always taken, which XLA does not know before it has fused.
    """
    always = lax.optimization_barrier(jnp.bool_(True))
    nothing = lambda *args: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *args))
    return lax.cond(always, fn, nothing, *args)


def groups(mask: Mask | None, rows: Chunks, S: int) -> list[Group]:
    """Returns groups of all chunks of rows that may attend to anything, in order.

    Args:
      mask: the bound mask, or None.
      rows: the query heads or the queries, in chunks.
      S: the number of keys.
    """
    count = rows.count
    everything = [Group(0, count, (Chunks(3, S, S),), None, np.zeros((1, count), np.int32))]
    if mask is None or rows.axis == 1 or S <= 2 * _ALIGNMENT:
        return everything
    lo, hi = hull(mask, "kv_range", rows, S)
    if isinstance(lo, np.ndarray):
        return _known(lo, hi, S)
    if count == 1 or S < _WORTH_A_CHOICE:
        return everything
    widths = [min(-(-S // (share * _ALIGNMENT)) * _ALIGNMENT, S) for share in _CHOICES]
    lo = lo // _ALIGNMENT * _ALIGNMENT
    choice = sum((hi - lo > width).astype(jnp.int32) for width in widths[:-1])
    starts = [jnp.clip(lo, 0, S - width) for width in widths]
    return [Group(0, count, tuple(_axis(S, width) for width in widths), choice, starts)]


def _known(lo, hi, S):
    """Groups of intervals that are known while tracing: equal runs of chunks, each as wide as its widest interval.

    A run has several chunks, so that it is a loop: of code without a loop, XLA would keep the logits for the backward.
    """
    lo, hi = lo // _ALIGNMENT * _ALIGNMENT, np.minimum(-(-hi // _ALIGNMENT) * _ALIGNMENT, S)
    needed = np.maximum(hi - lo, 0)
    runs = np.array_split(np.arange(len(lo)), max(1, min(_RUNS, len(lo) // 2)))
    found = []
    for width, same in itertools.groupby(runs, lambda run: int(needed[run].max())):
        here = np.concatenate(list(same))
        if width:
            starts = np.minimum(lo[here], S - width).astype(np.int32)
            found.append(Group(int(here[0]), len(here), (_axis(S, width),), None, starts[None]))
    return found


def _axis(S, width):
    return Chunks(3, S, S) if width == S else _Interval(3, S, width)
