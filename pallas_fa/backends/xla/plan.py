"""Which logits the XLA path holds at once: the rule, and what `explain` says of it.

On GPUs, whole rows of logits, since each pass over logits in memory costs time there. At most 1 GiB of float32 logits at a
time, and at most an eighth of all where one sequence has more than 2048 positions and both have more than 128. If that is
not all of them, a chunk holds

- a few heads, where no mask but an array, no score but a bias and no dropout is in the call: keys and values are then read
  once;
- else a few queries, which leave out keys that the mask rules out; at least 128 queries, so that at worst a chunk has 128
  logits for each key, head and batch entry, in proportion to the inputs.

The backward holds up to three such arrays, in the inputs' dtype. With all rows at once, XLA may keep logits and
probabilities from the forward to the backward of a program, as it does those of `jax.nn`. On other platforms, and for
symbolic lengths, block masks and keys in pages, chunks of queries and keys (`chunks.split_axes`).

The platform is that of `jax.default_backend()` while the program is traced. On another one it is as right, but slower.
"""

import jax

from pallas_fa.backends.xla.chunks import SYMBOLIC, Chunks, even_chunk, split_axes
from pallas_fa.masks import Dense
from pallas_fa.problem import Problem
from pallas_fa.scores import Bias
from pallas_fa.scores.base import free

_LOGITS_AT_ONCE = 2**30  # bytes
_SHORT, _FEW = 2048, 128  # positions
_FEWEST_CHUNKS = 8


def whole_rows(problem: Problem) -> Chunks | None:
    """Returns the query heads or the queries in chunks, whose rows are computed whole; None where keys are chunked, too."""
    dims, mask = problem.dims, problem.mask
    if not _on_gpu() or dims.has_symbolic_length or problem.pages or (mask is not None and mask.has_blocks):
        return None
    count = -(-_bytes(problem, dims.T * dims.S) // _LOGITS_AT_ONCE)
    if max(dims.T, dims.S) > _SHORT and min(dims.T, dims.S) > _FEW:
        count = max(count, _FEWEST_CHUNKS)
    heads = next((n for n in range(count, problem.K + 1) if problem.K % n == 0), None)
    if count > 1 and heads is not None and _same_everywhere(problem):
        return Chunks(1, dims.N, dims.N // heads)
    if count > 1:
        count = max(count, _FEWEST_CHUNKS)  # so that a mask rules out keys for some
    return Chunks(2, dims.T, even_chunk(dims.T, max(-(-dims.T // count), _FEW)))


def _same_everywhere(problem):
    """Whether only arrays depend on positions or heads: then no keys are ruled out, and a chunk may have few heads."""
    return (
        isinstance(problem.mask, Dense | None)
        and isinstance(free(problem.score), Bias | None)
        and problem.dropout is None
    )


def memory(problem: Problem) -> str | None:
    """Returns which logits are in memory at once, in words; None where that is not known."""
    dims = problem.dims
    if dims.has_symbolic_length or 0 in (dims.B, dims.T, dims.N, dims.S):
        return None
    rows, keys = whole_rows(problem), Chunks(3, dims.S, dims.S)
    if rows is not None and rows.axis == 1:
        size = _bytes(problem, dims.T * dims.S) // rows.count / 2**20
        return (
            f"logits of {dims.T} queries by {dims.S} keys at a time, for {rows.chunk} of {dims.N} heads, {size:.3g} MiB"
        )
    queries, keys = (rows, keys) if rows else split_axes(problem)
    size = _bytes(problem, queries.chunk * keys.chunk) / 2**20
    return f"logits of {queries.chunk} queries by {keys.chunk} keys at a time, {size:.3g} MiB"


def _bytes(problem, logits):
    """How many bytes so many logits of each batch entry and head take, at least 1."""
    B, N = (x if isinstance(x, int) else SYMBOLIC for x in (problem.dims.B, problem.dims.N))
    return max(B * N * logits * problem.acc_dtype.itemsize, 1)


def _on_gpu():
    return jax.default_backend() == "gpu"
