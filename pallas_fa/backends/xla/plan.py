"""When the XLA path computes whole rows of logits, and how many at a time: the rule, and what it says in `explain`.

On GPUs, chunks of queries with all their keys, of at most 256 MiB of logits, and at least 128 queries (then logits are at
most 128 for each key, head and batch entry: memory stays proportional to the inputs). On other platforms, and for symbolic
lengths and block masks, chunks of queries and keys (`chunks.split_axes`).

The platform is that of `jax.default_backend()` while the program is traced. A program that runs elsewhere is as right, and
not as fast.
"""

import jax

from pallas_fa.backends.xla.chunks import Chunks, even_chunk
from pallas_fa.problem import Problem

_SHORT = 2048  # positions up to which all logits may be computed at once
_LOGITS_AT_ONCE = 2**30  # bytes
_LOGITS_OF_A_CHUNK = 2**28  # bytes
_FEWEST_CHUNKS = 8
_FEWEST_QUERIES = 128


def whole_rows(problem: Problem) -> Chunks | None:
    """Returns the query axis in chunks of which whole rows are computed; None where the keys are chunked, too."""
    dims, mask = problem.dims, problem.mask
    if not _on_gpu() or dims.has_symbolic_length or (mask is not None and mask.has_blocks):
        return None
    per_query = max(dims.B * dims.N * dims.S * problem.acc_dtype.itemsize, 1)
    if max(dims.T, dims.S) <= _SHORT and dims.T * per_query <= _LOGITS_AT_ONCE:
        return Chunks(2, dims.T, dims.T)
    most = max(min(_LOGITS_OF_A_CHUNK // per_query, dims.T // _FEWEST_CHUNKS), _FEWEST_QUERIES)
    return Chunks(2, dims.T, even_chunk(dims.T, most))


def _on_gpu():
    return jax.default_backend() == "gpu"


def remark(problem: Problem) -> str:
    """Returns what is in memory at once, in words."""
    queries = whole_rows(problem)
    if queries is None:
        return ""
    size = problem.dims.B * problem.dims.N * queries.chunk * problem.dims.S * problem.acc_dtype.itemsize
    return f"whole rows of {queries.chunk} queries at a time, with at most {size / 2**20:.3g} MiB of logits"
