"""Which logits the XLA path holds at once: the rule, and what `explain` says of it.

On GPUs, whole rows of logits, since each pass over logits in memory costs time there. At most 1 GiB of float32 logits at a
time, or 4 GiB where that is all of them and no sequence has more than 2048 positions, 1024 with a window. At most an eighth
of all where one sequence has more than 2048 positions and both have more than 128. If that is not all of them, a chunk holds

- where no mask but an array, no score but a bias and no dropout is in the call, a few heads: keys and values are then read
  once;
- else a few queries, which leave out keys that the mask rules out; at least 128 queries, so that at worst a chunk has 128
  logits for each key, head and batch entry, in proportion to the inputs.

The backward holds up to three such arrays, in the inputs' dtype. With all rows at once, XLA may keep logits and
probabilities from the forward to the backward of a program, as it does those of `jax.nn`.

On CPUs, all logits at once where they are few, since chunks cost more calls of smaller matmuls: up to 2**18 for each batch
entry and head, half as many in the backward, and four times as many where neither mask, score but a bias, nor dropout is in
the call, for XLA then fuses the softmax with the matmuls. In all, at most 256 MiB, or as many as one chunk would hold. A
call with 64 times as many keys as queries takes chunks, which copy no keys. The backward holds up to three such arrays.

All other calls, those with symbolic lengths, block masks and keys in pages, and those on other platforms take chunks of
queries and keys (`chunks.split_axes`).

The platform is that of `jax.default_backend()` while the program is traced. On another one it is as right, but slower.
"""

import jax

from pallas_fa.backends.xla.chunks import SYMBOLIC, Chunks, even_chunk, split_axes
from pallas_fa.masks import Dense, Window
from pallas_fa.masks.base import parts_of
from pallas_fa.problem import Problem
from pallas_fa.scores import Bias
from pallas_fa.scores.base import free

_LOGITS_AT_ONCE = 2**30  # bytes
_SHORT_LOGITS_AT_ONCE = 2**32
_VERY_SHORT, _SHORT, _FEW = 1024, 2048, 128  # positions
_FEWEST_CHUNKS = 8
# On CPUs. Decision record: xla/all-at-once-on-cpus.
_FEW_LOGITS = 2**18  # of one batch entry and head
_FEW_BYTES = 2**28
_MANY_KEYS = 64  # times as many as queries


def whole_rows(problem: Problem) -> Chunks | None:
    """Returns the query heads or the queries in chunks, whose rows are computed whole; None where keys are chunked, too."""
    dims = problem.dims
    if not _on_gpu() or _needs_chunks_of_keys(problem):
        return None
    size, longest = _bytes(problem, dims.T * dims.S), max(dims.T, dims.S)
    count = -(-size // _LOGITS_AT_ONCE)
    if longest <= (_VERY_SHORT if parts_of(problem.mask, Window) else _SHORT) and size <= _SHORT_LOGITS_AT_ONCE:
        count = 1
    if longest > _SHORT and min(dims.T, dims.S) > _FEW:
        count = max(count, _FEWEST_CHUNKS)
    heads = next((n for n in range(count, problem.K + 1) if problem.K % n == 0), None)
    if count > 1 and heads is not None and _same_everywhere(problem):
        return Chunks(1, dims.N, dims.N // heads)
    if count > 1:
        count = max(count, _FEWEST_CHUNKS)  # so that a mask rules out keys for some
    return Chunks(2, dims.T, even_chunk(dims.T, max(-(-dims.T // count), _FEW)))


def all_at_once(problem: Problem, *, backward: bool = False) -> bool:
    """Returns whether all logits are computed at once on a CPU."""
    dims = problem.dims
    if jax.default_backend() != "cpu" or _needs_chunks_of_keys(problem) or dims.S >= _MANY_KEYS * dims.T:
        return False
    if backward and problem.part_of_keys:
        return False  # whose probabilities are those of more keys
    if all(axis.is_whole for axis in split_axes(problem)):
        return True
    most = _FEW_LOGITS // 2 if backward else _FEW_LOGITS
    most = 4 * most if problem.mask is None and _same_everywhere(problem) else most
    return dims.T * dims.S <= most and _bytes(problem, dims.T * dims.S) <= _FEW_BYTES


def _needs_chunks_of_keys(problem):
    mask = problem.mask
    is_cache = problem.pages is not None or problem.has_narrow_keys  # gathered, or converted, a chunk at a time
    return problem.dims.has_symbolic_length or is_cache or (mask is not None and mask.has_blocks)


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
    rows = whole_rows(problem)
    if rows is not None and rows.axis == 1:
        size = _bytes(problem, dims.T * dims.S) // rows.count / 2**20
        return (
            f"logits of {dims.T} queries by {dims.S} keys at a time, for {rows.chunk} of {dims.N} heads, {size:.3g} MiB"
        )
    if rows is not None:
        return f"logits of {_words(problem, rows.chunk, dims.S)}"
    forward, backward = (
        _words(problem, *((dims.T, dims.S) if at_once else (axis.chunk for axis in split_axes(problem))))
        for at_once in (all_at_once(problem), all_at_once(problem, backward=True))
    )
    return f"logits of {forward}" + ("" if backward == forward else f", in the backward {backward}")


def _words(problem, queries, keys):
    return f"{queries} queries by {keys} keys at a time, {_bytes(problem, queries * keys) / 2**20:.3g} MiB"


def _bytes(problem, logits):
    """How many bytes so many logits of each batch entry and head take, at least 1."""
    B, N = (x if isinstance(x, int) else SYMBOLIC for x in (problem.dims.B, problem.dims.N))
    return max(B * N * logits * problem.acc_dtype.itemsize, 1)


def _on_gpu():
    return jax.default_backend() == "gpu"
