"""`ragged_paged_attention`: attention of sequences with any number of queries each, as in continuous batching."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_fa import masks
from pallas_fa.arguments.arrays import float_array
from pallas_fa.arguments.shapes import dtypes_fit
from pallas_fa.attention import attend
from pallas_fa.cache import scales
from pallas_fa.cache.ragged_blocks import Blocks, Sequences
from pallas_fa.operands.offsets import as_int32, int_array
from pallas_fa.operands.pages import Paged
from pallas_fa.operands.pytree import as_count, is_array, is_finite, is_static_number
from pallas_fa.scores.soft_cap import check_cap
from pallas_fa.sharding.explicit_axes import keeping_shardings

_BLOCK = 16  # queries: as many as the kernels for few queries take; with pages of 8 bits, rows
_LONG_BLOCK = 128  # of prompts, whose keys are then read less often


def ragged_paged_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Causal attention of the queries of many sequences, one behind the other, to keys and values in pages.

    The signature of `ragged_paged_attention` in `jax.experimental.pallas.ops.tpu`, for prefill and decoding in one call.
    The last query of a sequence sees its last key. The queries of a sequence are cut into blocks, each an entry of a
    batch for `paged_attention`.

    Shapes: N query heads, K key/value heads (N % K == 0), H head dim, P pages of `page` rows.

    Args:
      q: [tokens, N, H], the queries of all sequences, and any number of rows behind them.
      kv_pages: [P, page, 2 K, H], the same dtype or one of 8 bits: keys in the even heads, values in the odd ones. Not
        copied.
      kv_lens: int [max sequences], how many rows each sequence has in its pages, those of its queries included.
      page_indices: int [max sequences, pages per sequence]. Entries past a sequence's rows may be anything.
      cu_q_lens: int [max sequences + 1], where the queries of each sequence start, and where those of the last one end.
      num_seqs: int [1], how many sequences there are. What the arrays above say of others may be anything.
      sm_scale: factor of the logits. The default is 1, not 1 / sqrt(H).
      sliding_window: how many keys a query sees, its own included; None for all up to its own.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      mask_value: no effect. Masked logits are -inf.
      k_scale: factor of all keys, and `v_scale` of all values. It multiplies the output in float32; where `q` has 16 bits,
        the output is rounded to these before and after.
      num_kv_pages_per_block: no effect, like `vmem_limit_bytes`. They tune the TPU's kernel.
      num_queries_per_block: queries of a block. Unless it is given: 128 as long as a sequence has as many, which reads the
        keys of a prompt once for each 128 queries, then 16; with pages of 8 bits, then as many as are 16 rows with the heads
        of a key head. Only short ones where `q` has fewer tokens than 128, or a symbolic number.
      implementation: as in `pallas_fa.paged_attention`.

    Returns:
      [tokens, N, H] in the dtype of `q`; 0 for tokens of no sequence.

    Raises:
      ValueError, TypeError: an argument is wrong. Values of `num_seqs`, `cu_q_lens` and `kv_lens` that contradict each other
        are, too, where NumPy arrays hold them, so that they are known while tracing.
      NotImplementedError: the implementation cannot do the call, or gradients are asked for of another than `reference`.
    """
    del mask_value, num_kv_pages_per_block, vmem_limit_bytes
    queries, pages = float_array("q", q, "[tokens, N, H]"), float_array("kv_pages", kv_pages, "[P, page, 2 K, H]")
    given = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    lengths, table, starts, count = integers = [int_array(name, x) for name, x in given.items()]
    _check(queries, pages, lengths, table, starts, count)
    _check_values(queries.shape[0], lengths, starts, count)
    lengths, table, starts, count = map(as_int32, integers)
    size = None if num_queries_per_block is None else _count("num_queries_per_block", num_queries_per_block)
    mask = masks.Causal(align="bottom_right")
    if sliding_window is not None:
        mask = mask & masks.Window(_count("sliding_window", sliding_window) - 1, None, align="bottom_right")
    factors = _factor("sm_scale", sm_scale), _factor("k_scale", 1.0 if k_scale is None else k_scale)
    scale = _factor("sm_scale * k_scale", factors[0] * factors[1])
    of_values = None if v_scale is None else _factor("v_scale", v_scale)
    soft_cap = None if soft_cap is None else check_cap("soft_cap", soft_cap, "Use None")
    if not queries.shape[0] or not queries.shape[1]:
        return queries
    # Keys of 8 bits are converted anew for each 16 rows (evidence: decode/narrow-keys).
    short = _BLOCK if queries.dtype == pages.dtype else max(1, _BLOCK // (queries.shape[1] // (pages.shape[2] // 2)))
    attend_blocks = functools.partial(
        attend, mask=mask, scale=scale, logits_soft_cap=soft_cap, implementation=implementation
    )

    @keeping_shardings
    def run(queries, pages, lengths, table, starts, count):
        sequences = Sequences.of(lengths, starts, count[0])
        out = jnp.zeros_like(queries)
        for blocks in _cut(queries.shape[0], sequences, size, short):
            keys, values = (Paged(pages, table[blocks.sequence], interleaved=i) for i in (0, 1))
            of_blocks, _ = attend_blocks(blocks.of_tokens(queries), keys, values, key_value_seq_lengths=blocks.keys)
            rows = jnp.take(of_blocks.reshape(-1, *queries.shape[1:]), blocks.row, axis=0, mode="clip")
            out = jnp.where((blocks.row >= 0)[:, None, None], rows, out)
        return out

    out = run(queries, pages, lengths, table, starts, count)
    return scales.times(out, of_values)


def _cut(tokens, sequences, size, short):
    """Returns blocks that have all queries: those of `size`; if it is None, long ones and the rest in `short` ones."""
    count = sequences.queries.shape[0]
    most = tokens // (size or short) + count
    is_known = isinstance(most, int)  # symbolic sizes do not compare
    most = min(tokens, most) if is_known else most
    if size is not None or not is_known or tokens < _LONG_BLOCK:
        return (Blocks.of(sequences, size or short, tokens, most),)
    long, rest = sequences.cut(_LONG_BLOCK)
    most = min(most, count * -(-(_LONG_BLOCK - 1) // short))
    return Blocks.of(long, _LONG_BLOCK, tokens, tokens // _LONG_BLOCK), Blocks.of(rest, short, tokens, most)


def _check(q, pages, lengths, table, starts, count):
    shapes = f"q.shape={tuple(q.shape)}, kv_pages.shape={tuple(pages.shape)}"
    if q.ndim != 3:
        raise ValueError(
            f"q.shape={tuple(q.shape)} must be [tokens, N, H], one dim for tokens of all sequences. Reshape it."
        )
    if pages.ndim != 4 or pages.shape[2] % 2:
        raise ValueError(
            f"kv_pages.shape={tuple(pages.shape)} must be [P, page, 2 K, H], with keys in the even heads and values in the"
            " odd ones. Stack them, jnp.stack([key, value], axis=-2), and reshape."
        )
    if 0 in pages.shape:
        raise ValueError(
            f"kv_pages.shape={tuple(pages.shape)} has a dim of 0: a page, a row, a head and a column are the least. Without"
            " keys every output is 0: make it with jnp.zeros_like(q)."
        )
    if q.shape[-1] != pages.shape[-1]:
        raise ValueError(
            f"{shapes}: the head dims H={q.shape[-1]} and {pages.shape[-1]} must be equal, since queries are multiplied by"
            " keys. Project both to one head dim."
        )
    if q.shape[1] % (pages.shape[2] // 2):
        raise ValueError(
            f"{shapes}: the number of query heads N={q.shape[1]} must be a multiple of that of key heads"
            f" K={pages.shape[2] // 2}, since each key head serves N // K query heads. Repeat the fewer heads."
        )
    if not dtypes_fit(q.dtype, pages.dtype):
        raise ValueError(
            f"q.dtype={q.dtype} and kv_pages.dtype={pages.dtype} differ: they must be one dtype, or that of the pages one of"
            " 8 bits, since nothing is converted silently. Convert one with `.astype`."
        )
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"page_indices.shape={tuple(table.shape)} must be [max sequences, pages per sequence], each at least 1. Fill it"
            " up with any numbers; num_seqs and kv_lens say what is there."
        )
    sequences = table.shape[0]
    for name, x, size in (("kv_lens", lengths, sequences), ("cu_q_lens", starts, sequences + 1)):
        if tuple(x.shape) != (size,):
            raise ValueError(
                f"{name}.shape={tuple(x.shape)} must be {(size,)}, since page_indices has a row for each of"
                f" {sequences} sequences. Fill it up; num_seqs says how many are there."
            )
    if tuple(count.shape) != (1,):
        one = "Use jnp.reshape(num_seqs, (1,))." if count.size == 1 else "Pass an array of one int."
        raise ValueError(f"num_seqs.shape={tuple(count.shape)} must be (1,): how many sequences there are. {one}")


def _check_values(tokens, lengths, starts, count):
    """Raises ValueError where NumPy arrays, whose values are known while tracing, contradict each other or the shapes."""
    if not isinstance(starts, np.ndarray) or not isinstance(count, np.ndarray):
        return
    (n,), most = count, len(lengths)
    if not 0 <= n <= most:
        raise ValueError(
            f"num_seqs={count} must be from 0 to {most}, of how many sequences the other arrays speak. Make these longer, or"
            " pass how many sequences there are."
        )
    used = starts[: n + 1]
    if n and ((used < 0).any() or (used[1:] < used[:-1]).any() or used[-1] > tokens):
        raise ValueError(
            f"cu_q_lens={starts}: of num_seqs={n} sequences the starts and the last end, {used}, must be from 0 to {tokens},"
            " the tokens of q, and never fall. Pass [0, 5, 9] for two sequences of 5 and 4 queries."
        )
    queries = used[1:] - used[:-1]
    if isinstance(lengths, np.ndarray) and (short := lengths[:n] < queries).any():
        i = int(np.argmax(short))
        raise ValueError(
            f"kv_lens[{i}]={lengths[i]} is less than the {queries[i]} queries of that sequence, whose keys it counts, too."
            " Write these into the pages first, and add their number."
        )


def _factor(name, x):
    """A factor, checked; where it is an array, in float32 at least, so that no product is rounded to fewer bits."""
    if not is_static_number(x) and not (is_array(x) and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(f"{name}={x!r} must be a number or a scalar float array. Leave it out for 1.0.")
    if is_static_number(x) and not is_finite(x):
        raise ValueError(f"{name}={x!r} must be finite in float32. Leave it out for 1.0.")
    return x.astype(np.promote_types(x.dtype, np.float32)) if is_array(x) and not is_static_number(x) else float(x)


def _count(name, x):
    return as_count(name, x, "Leave it out for the default.")
