"""The masks of the table of cases: what a caller writes, and in NumPy what it means.

A case is a `tests.cases.Case`; only its sizes are read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pallas_fa import masks


class MaskCase(NamedTuple):
    """A mask: keyword arguments, and in NumPy which pairs it allows, broadcastable to [*B, N, T, S]."""

    keywords: dict[str, Any]
    allowed: Callable[[np.ndarray, np.ndarray], Any]  # of t [T, 1] and s [1, S]


def _inner(x, dims=3):
    """[*B] -> [*B, 1, 1, 1]"""
    return x.reshape(*x.shape, *(1,) * dims)


def _some_lengths(case, rng, size):
    lengths = np.asarray(rng.integers(1, size + 1, case.batch), np.int32)
    if lengths.size > 1:
        lengths.flat[0] = 0  # and one entry in which there is nothing
    return lengths


def _documents(rng, case, length, count=4):
    """Sorted ids, as packing makes them."""
    return np.sort(np.asarray(rng.integers(0, count, (*case.batch, length)), np.int32), axis=-1)


def _full(case, rng):
    return MaskCase({}, lambda t, s: True)


def _causal(case, rng):
    return MaskCase({"is_causal": True}, lambda t, s: s <= t)


def _bottom_right(case, rng):
    mask = masks.Causal("bottom_right")
    return MaskCase({"mask": mask}, lambda t, s: s <= t + case.S - case.T)


def _bottom_right_lengths(case, rng):
    q, kv = _some_lengths(case, rng, case.T), _some_lengths(case, rng, case.S)
    keywords = {"mask": masks.Causal("bottom_right"), "query_seq_lengths": q, "key_value_seq_lengths": kv}
    q, kv = _inner(q), _inner(kv)
    return MaskCase(keywords, lambda t, s: (s <= t + kv - q) & (t < q) & (s < kv))


def _offset(case, rng):
    return MaskCase({"mask": masks.Causal(offset=5)}, lambda t, s: s <= t + 5)


def _offsets(case, rng):
    offset = np.asarray(rng.integers(-case.T // 2, case.S + 1, case.batch), np.int32)
    return MaskCase({"mask": masks.Causal(offset=offset)}, lambda t, s: s <= t + _inner(offset))


def _window(case, rng):
    return MaskCase({"local_window_size": (9, 30)}, lambda t, s: (t - 9 <= s) & (s <= t + 30))


def _window_offsets(case, rng):
    offset = np.asarray(rng.integers(-case.T // 2, case.S + 1, case.batch), np.int32)
    mask = masks.Window(40, 8, offset)
    return MaskCase({"mask": mask}, lambda t, s: abs(s - t - _inner(offset) + 16) <= 24)


def _window_left(case, rng):
    return MaskCase({"local_window_size": (20, None)}, lambda t, s: t - 20 <= s)


def _window_int(case, rng):
    return MaskCase({"local_window_size": 12}, lambda t, s: abs(t - s) <= 12)


def _window_causal(case, rng):
    keywords = {"local_window_size": (40, 7), "is_causal": True}
    return MaskCase(keywords, lambda t, s: (t - 40 <= s) & (s <= t))


def _segments(case, rng):
    q, kv = _documents(rng, case, case.T), _documents(rng, case, case.S)
    keywords = {"query_segment_ids": q, "key_value_segment_ids": kv}
    return MaskCase(keywords, lambda t, s: q[..., None, :, None] == kv[..., None, None, :])


def _segments_shuffled(case, rng):
    q, kv = (np.asarray(rng.integers(-1, 3, (*case.batch, n)), np.int32) for n in (case.T, case.S))
    mask = masks.Segments(q, kv)
    return MaskCase({"mask": mask}, lambda t, s: q[..., None, :, None] == kv[..., None, None, :])


def _packed(case, rng):
    made = _segments(case, rng)
    mask = masks.Window(33, None)
    keywords = {**made.keywords, "mask": mask, "is_causal": True}
    return MaskCase(keywords, lambda t, s: made.allowed(t, s) & (s <= t) & (t - 33 <= s))


def _lengths(case, rng):
    q, kv = _some_lengths(case, rng, case.T), _some_lengths(case, rng, case.S)
    keywords = {"query_seq_lengths": q, "key_value_seq_lengths": kv}
    return MaskCase(keywords, lambda t, s: (t < _inner(q)) & (s < _inner(kv)))


def _key_lengths(case, rng):
    kv = _some_lengths(case, rng, case.S)
    return MaskCase({"key_value_seq_lengths": kv, "is_causal": True}, lambda t, s: (s < _inner(kv)) & (s <= t))


def _query_lengths(case, rng):
    q = _some_lengths(case, rng, case.T)
    return MaskCase({"query_seq_lengths": q}, lambda t, s: t < _inner(q))


def _head_lengths(case, rng):
    shape = (*case.batch, case.N, 1, 1)
    q, kv = (np.asarray(rng.integers(0, n + 1, shape), np.int32) for n in (case.T, case.S))
    return MaskCase({"mask": masks.Lengths(q, kv)}, lambda t, s: (t < q) & (s < kv))


def _dense(shape_of):
    def make(case, rng):
        array = rng.random(shape_of(case)) < 0.6
        return MaskCase({"mask": array}, lambda t, s: array)

    return make


def _in_prefix(b, n, t, s, prefix):
    return s < prefix


def _prefix(case, rng):
    prefix = np.asarray(rng.integers(0, case.S + 1, (*case.batch, 1, 1, 1)), np.int32)
    mask = masks.Causal() | masks.Custom(_in_prefix, prefix)
    return MaskCase({"mask": mask}, lambda t, s: (s <= t) | (s < prefix))


def every_third(b, n, t, s):
    """A custom mask: every third key of a window."""
    return ((t - s) % 3 == 0) & (abs(t - s) <= 60)


def _dilated(case, rng):
    mask = masks.Custom(every_third, ranges=masks.Window(60, 60))
    return MaskCase({"mask": mask}, lambda t, s: ((t - s) % 3 == 0) & (abs(t - s) <= 60))


def near_in_2d(b, n, t, s):
    """A custom mask: neighbours in an image of 16 columns, in a larger window for later heads."""
    return (abs(t // 16 - s // 16) <= n) & (abs(t % 16 - s % 16) <= 3)


@functools.cache
def _near_blocks(T, S, N):
    return masks.block_mask(masks.Custom(near_in_2d), T, S, (64, 32), heads=N)


def _computed_blocks(case, rng):
    n = np.arange(case.N)[:, None, None]
    return MaskCase({"mask": _near_blocks(case.T, case.S, case.N)}, lambda t, s: near_in_2d(None, n, t, s))


def _blocks(case, rng):
    blocks = rng.random((*case.batch, case.N, -(-case.T // 64), -(-case.S // 64))) < 0.5
    mask = masks.BlockMask(blocks, 64) & masks.Causal(
        offset=case.S - 60
    )  # later queries see the last, ragged block whole
    in_blocks = blocks.repeat(64, axis=-2)[..., : case.T, :].repeat(64, axis=-1)[..., : case.S]
    return MaskCase({"mask": mask}, lambda t, s: in_blocks & (s <= t + case.S - 60))


def _nothing(case, rng):
    array = np.zeros((1, 1, 1), bool)
    return MaskCase({"mask": array}, lambda t, s: array)


def _window_arrays(case, rng):
    """Sides that arrays give, in part negative: away from the query, and empty windows."""
    left = np.asarray(rng.integers(-10, 60, case.batch), np.int32)
    right = np.asarray(rng.integers(-10, 30, (*case.batch, case.N, 1, 1)), np.int32)
    return MaskCase({"local_window_size": (left, right)}, lambda t, s: (t - _inner(left) <= s) & (s <= t + right))


def _window_array_causal(case, rng):
    """As under a scan over layers: one traced size, beside what is static."""
    keywords = {"local_window_size": (np.asarray(rng.integers(0, 60), np.int16), 5), "is_causal": True}
    return MaskCase(keywords, lambda t, s: (t - keywords["local_window_size"][0] <= s) & (s <= t))


def _window_bottom_right(case, rng):
    kv = _some_lengths(case, rng, case.S)
    keywords = {"mask": masks.Window(20, 5, 3, "bottom_right"), "key_value_seq_lengths": kv}
    distance = lambda t, s: s - t - 3 - (_inner(kv) - case.T)
    return MaskCase(keywords, lambda t, s: (-20 <= distance(t, s)) & (distance(t, s) <= 5) & (s < _inner(kv)))


def _key_intervals(case, rng):
    """In no order, some of them empty, one from end to start."""
    starts, ends = (np.asarray(rng.integers(-9, case.S + 9, (*case.batch, case.T)), np.int32) for _ in range(2))
    mask = masks.KeyIntervals(starts, ends)
    return MaskCase({"mask": mask}, lambda t, s: (starts[..., None, :, None] <= s) & (s < ends[..., None, :, None]))


def cu_seqlens(rng, shape, size, documents=5):
    """Cumulative lengths of documents that end before `size`, one of them empty."""
    inner = np.sort(rng.integers(0, size, (*shape, documents - 1)), axis=-1)
    zero = np.zeros((*shape, 1), int)
    return np.concatenate([zero, zero, inner + (size > 20)], axis=-1).astype(np.int32)


def _documents_causal(case, rng):
    """As flash-attn's varlen functions: causal and a window, each aligned at the ends of a document."""
    cu_q, cu_k = (cu_seqlens(rng, case.batch, size) for size in (case.T, case.S))
    mask = masks.from_cu_seqlens(cu_q, cu_k, T=case.T, is_causal=True, window=(40, None))

    def allowed(t, s):
        found = np.zeros((*case.batch, 1, case.T, case.S), bool)
        for i in np.ndindex(case.batch):
            for q0, q1, k0, k1 in zip(cu_q[i], cu_q[i][1:], cu_k[i], cu_k[i][1:], strict=False):
                before_end = (s - k1) - (t - q1)
                found[i] |= (q0 <= t) & (t < q1) & (k0 <= s) & (s < k1) & (before_end <= 0) & (before_end >= -40)
        return found

    return MaskCase({"mask": mask}, allowed)


MASKS: dict[str, Callable[[Any, np.random.Generator], MaskCase]] = {
    "full": _full,
    "causal": _causal,
    "bottom_right": _bottom_right,
    "bottom_right_lengths": _bottom_right_lengths,
    "offset": _offset,
    "offsets": _offsets,
    "window": _window,
    "window_offsets": _window_offsets,
    "window_left": _window_left,
    "window_int": _window_int,
    "window_causal": _window_causal,
    "segments": _segments,
    "segments_shuffled": _segments_shuffled,
    "packed": _packed,
    "lengths": _lengths,
    "key_lengths": _key_lengths,
    "query_lengths": _query_lengths,
    "head_lengths": _head_lengths,
    "dense": _dense(lambda c: (*c.batch, c.N, c.T, c.S)),
    "dense_keys": _dense(lambda c: (*c.batch, 1, 1, c.S)),
    "dense_head_keys": _dense(lambda c: (c.N, 1, c.S)),
    "dense_head_rows": _dense(lambda c: (c.N, c.T, 1)),
    "dense_shared": _dense(lambda c: (c.T, c.S)),
    "dense_partial_batch": _dense(lambda c: (*c.batch[:-1], *(1,) * len(c.batch[-1:]), 1, c.T, c.S)),
    "prefix": _prefix,
    "dilated": _dilated,
    "nothing": _nothing,
    "window_array_causal": _window_array_causal,
    "window_arrays": _window_arrays,
    "window_bottom_right": _window_bottom_right,
    "key_intervals": _key_intervals,
    "documents": _documents_causal,
    "computed_blocks": _computed_blocks,
    "blocks": _blocks,
}
