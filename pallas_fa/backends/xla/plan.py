"""Which logits the XLA path holds at once: the rule, and what `explain` says of it.

On GPUs, whole rows of logits, since each pass over logits in memory costs time there:

- all rows at once, where both sequences have at most 2048 positions and the logits take at most 1 GiB. XLA may keep them
  and the probabilities from the forward to the backward of a program, as it does those of `jax.nn`;
- else chunks of queries, at least eight, with at most 256 MiB of logits each, but at least 128 queries: then a chunk has
  128 logits for each key, head and batch entry, so that memory stays proportional to the inputs.

The backward holds up to four such arrays, two of them in the inputs' dtype. On other platforms, and for symbolic lengths,
block masks and keys in pages, chunks of queries and keys (`chunks.split_axes`).

The platform is that of `jax.default_backend()` while the program is traced. On another one it is as right, but slower.
"""

import jax

from pallas_fa.backends.xla.chunks import SYMBOLIC, Chunks, even_chunk, split_axes
from pallas_fa.problem import Problem

_SHORT = 2048
_LOGITS_AT_ONCE = 2**30  # bytes
_LOGITS_OF_A_CHUNK = 2**28  # bytes
_FEWEST_CHUNKS = 8
_FEWEST_QUERIES = 128


def whole_rows(problem: Problem) -> Chunks | None:
    """Returns the query axis in chunks of which whole rows are computed; None where the keys are chunked, too."""
    dims, mask = problem.dims, problem.mask
    if not _on_gpu() or dims.has_symbolic_length or problem.pages or (mask is not None and mask.has_blocks):
        return None
    of_a_query = _bytes(problem, dims.S)
    if max(dims.T, dims.S) <= _SHORT and dims.T * of_a_query <= _LOGITS_AT_ONCE:
        return Chunks(2, dims.T, dims.T)
    most = max(min(_LOGITS_OF_A_CHUNK // of_a_query, dims.T // _FEWEST_CHUNKS), _FEWEST_QUERIES)
    return Chunks(2, dims.T, even_chunk(dims.T, most))


def memory(problem: Problem) -> str | None:
    """Returns which logits are in memory at once, in words; None where that is not known."""
    dims = problem.dims
    if dims.has_symbolic_length or 0 in (dims.B, dims.T, dims.N, dims.S):
        return None
    queries, keys = whole_rows(problem), Chunks(3, dims.S, dims.S)
    queries, keys = (queries, keys) if queries else split_axes(problem)
    size = _bytes(problem, queries.chunk * keys.chunk) / 2**20
    return f"logits of {queries.chunk} queries by {keys.chunk} keys at a time, {size:.3g} MiB"


def _bytes(problem, logits):
    """How many bytes so many logits of each batch entry and head take, at least 1."""
    B, N = (x if isinstance(x, int) else SYMBOLIC for x in (problem.dims.B, problem.dims.N))
    return max(B * N * logits * problem.acc_dtype.itemsize, 1)


def _on_gpu():
    return jax.default_backend() == "gpu"
