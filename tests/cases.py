"""THE table of cases: masks x scores x dtypes x lengths x heads x head dims x batch dims.

Every test of an implementation and the benchmarks read it. A mask or a score is a name here; it comes with the keyword
arguments that a caller would write and, independently of the library, with what it means in NumPy.

    case = Case(T=113, S=203, mask="segments", score="bias_heads")
    inputs = case.inputs()                        # arrays, deterministic
    out = pallas_fa.dot_product_attention(*inputs.qkv, **inputs.keywords(inputs.arrays))
    truth = oracle.attention(inputs)              # float64
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_fa import masks, scores

DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (
    *((1, 1), (3, 1), (1, 7), (64, 64), (113, 203), (239, 1), (108, 256), (256, 113), (512, 256), (640, 128)),
    *((1023, 1024), (799, 3)),
)
HEADS = ((4, 4), (4, 2), (4, 1), (6, 2))
HEAD_DIMS = (
    *((8, 8), (16, 16), (40, 40), (64, 64), (72, 72), (80, 128), (96, 96), (128, 128), (256, 256)),
    *((64, 128), (128, 64), (192, 128), (24, 256), (256, 8)),
)
BATCHES = ((2,), (), (2, 3), (1,))


class MaskCase(NamedTuple):
    """A mask: keyword arguments, and in NumPy which pairs it allows, broadcastable to [*B, N, T, S]."""

    keywords: dict[str, Any]
    allowed: Callable[[np.ndarray, np.ndarray], Any]  # of t [T, 1] and s [1, S]


class Step(NamedTuple):
    """One function of the logits x. `array` [*B|1, N|1, T|1, S|1] is a view of the array `name` (None: no array)."""

    name: str | None
    apply: Callable[..., Any]  # (numpy or jax.numpy, x, array, t, s) -> x
    derivatives: Callable[..., Any]  # (x, array, t, s) -> (d apply / d x, d apply / d array)
    view: Callable[[Any], Any] = lambda array: array


class ScoreCase(NamedTuple):
    """A score: its arrays, the keyword arguments made of them, and what they mean, step after step."""

    arrays: dict[str, np.ndarray]  # all get gradients
    keywords: Callable[[dict[str, Any]], dict[str, Any]]
    steps: tuple[Step, ...] = ()
    scale: float | None = None  # None: 1 / sqrt(H)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    T: int
    S: int
    mask: str = "full"
    score: str = "plain"
    dtype: str = "float32"
    N: int = 4
    K: int = 4
    H: int = 64
    Hv: int = 64
    batch: tuple[int, ...] = (2,)

    def __str__(self):
        batch = "x".join(map(str, self.batch)) or "none"
        sizes = f"T{self.T}-S{self.S}-N{self.N}-K{self.K}-H{self.H}-Hv{self.Hv}-B{batch}"
        return f"{self.mask}-{self.score}-{self.dtype}-{sizes}"

    def inputs(self) -> "Inputs":
        """Arrays of this case, standard normal; the same on every call."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        normal = lambda *shape: rng.standard_normal((*self.batch, *shape), np.float32).astype(numpy_dtype(self.dtype))
        return Inputs(
            case=self,
            qkv=(
                normal(self.T, self.N, self.H),
                normal(self.S, self.K, self.H),
                normal(self.S, self.K, self.Hv),
            ),
            d_out=normal(self.T, self.N, self.Hv),
            d_lse=normal(self.T, self.N).astype(np.float64 if self.dtype == "float64" else np.float32),
            mask=MASKS[self.mask](self, rng),
            score=SCORES[self.score](self, rng),
        )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a case, cotangents included."""

    case: Case
    qkv: tuple[np.ndarray, np.ndarray, np.ndarray]
    d_out: np.ndarray
    d_lse: np.ndarray
    mask: MaskCase
    score: ScoreCase

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the score, which get gradients beside q, k and v."""
        return self.score.arrays

    def keywords(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `dot_product_attention`, with these `arrays` in the score."""
        return {**self.mask.keywords, **self.score.keywords(arrays)}

    @property
    def allowed(self) -> np.ndarray:
        """bool [*B, N, T, S]"""
        case = self.case
        t, s = np.arange(case.T)[:, None], np.arange(case.S)[None, :]
        return np.broadcast_to(self.mask.allowed(t, s), (*case.batch, case.N, case.T, case.S))


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of this name, bfloat16 and 8-bit floats included."""
    return np.dtype(getattr(ml_dtypes, name, name))


# ---- masks ----------------------------------------------------------------------------------------------------------


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


def _nothing(case, rng):
    array = np.zeros((1, 1, 1), bool)
    return MaskCase({"mask": array}, lambda t, s: array)


MASKS: dict[str, Callable[[Case, np.random.Generator], MaskCase]] = {
    "full": _full,
    "causal": _causal,
    "bottom_right": _bottom_right,
    "bottom_right_lengths": _bottom_right_lengths,
    "offset": _offset,
    "offsets": _offsets,
    "window": _window,
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
}


# ---- scores ---------------------------------------------------------------------------------------------------------


def _normal(rng, shape, dtype):
    return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def _at_least_float32(case):
    return "float64" if case.dtype == "float64" else "float32"


def _add(name):
    return Step(name, lambda xp, x, a, t, s: x + a, lambda x, a, t, s: (1.0, 1.0))


def _cap(cap):
    return Step(
        None,
        lambda xp, x, a, t, s: cap * xp.tanh(x / cap),
        lambda x, a, t, s: (1 - np.tanh(x / cap) ** 2, None),
    )


def _times(name):
    return Step(name, lambda xp, x, a, t, s: x * a, lambda x, a, t, s: (a, x))


def _alibi(name):
    return Step(
        name,
        lambda xp, x, a, t, s: x - a * abs(t - s),
        lambda x, a, t, s: (1.0, -abs(t - s)),
        view=lambda a: a[..., None, None],
    )


def wave(x, b, n, t, s, gain):
    """A custom score in which x fans out and whose array gets a gradient."""
    return x + gain * jnp.sin(x)


def _wave(name):
    return Step(
        name, lambda xp, x, a, t, s: x + a * xp.sin(x), lambda x, a, t, s: (1 + a * np.cos(x), np.sin(x))
    )


def steeper_in(x, b, n, t, s, marked):
    """A custom score with an integer array, which gets no gradient."""
    return jnp.where(marked > 0, 1.5 * x, x)


def _plain_score(case, rng):
    return ScoreCase({}, lambda a: {})


def _static_scale(case, rng):
    return ScoreCase({}, lambda a: {"scale": 0.3}, scale=0.3)


def _traced_scale(case, rng):
    scale = np.asarray(0.2, numpy_dtype(_at_least_float32(case)))
    return ScoreCase({"scale": scale}, lambda a: {"scale": a["scale"]}, (_times("scale"),), scale=1.0)


def _bias(shape_of, other_dtype=False):
    def make(case, rng):
        dtype = case.dtype if not other_dtype else "bfloat16" if case.dtype == "float32" else _at_least_float32(case)
        arrays = {"bias": _normal(rng, shape_of(case), dtype)}
        return ScoreCase(arrays, lambda a: {"bias": a["bias"]}, (_add("bias"),))

    return make


def _soft_cap(case, rng):
    return ScoreCase({}, lambda a: {"logits_soft_cap": 1.5}, (_cap(1.5),))


def _alibi_score(shape_of):
    def make(case, rng):
        arrays = {"slopes": 0.1 * abs(_normal(rng, shape_of(case), _at_least_float32(case)))}
        return ScoreCase(arrays, lambda a: {"score": scores.Alibi(a["slopes"])}, (_alibi("slopes"),))

    return make


def _custom(case, rng):
    arrays = {"gain": 0.3 * _normal(rng, (case.N, 1, 1), _at_least_float32(case))}
    return ScoreCase(arrays, lambda a: {"score": scores.Custom(wave, a["gain"])}, (_wave("gain"),))


def _integers(case, rng):
    marked = np.asarray(rng.integers(0, 2, (*case.batch, 1, 1, case.S)), np.int32)
    factor = np.where(marked > 0, 1.5, 1.0)
    step = Step(None, lambda xp, x, a, t, s: x * xp.asarray(factor, x.dtype), lambda x, a, t, s: (factor, None))
    return ScoreCase({}, lambda a: {"score": scores.Custom(steeper_in, marked)}, (step,))


def _everything(case, rng):
    """scale, then bias, then soft cap, then the score's parts in their order."""
    wide = _at_least_float32(case)
    arrays = {
        "scale": np.asarray(0.2, numpy_dtype(wide)),
        "bias": _normal(rng, (case.N, case.T, case.S), case.dtype),
        "slopes": 0.1 * abs(_normal(rng, (*case.batch, case.N), wide)),
        "gain": 0.3 * _normal(rng, (*case.batch, 1, case.T, 1), wide),
        "second_bias": _normal(rng, (case.S,), wide),
    }

    def keywords(a):
        score = scores.Custom(wave, a["gain"]).then(scores.Alibi(a["slopes"])).then(scores.SoftCap(2.5))
        score = score.then(scores.Bias(a["second_bias"]))
        return {"scale": a["scale"], "bias": a["bias"], "logits_soft_cap": 3.0, "score": score}

    steps = (_times("scale"), _add("bias"), _cap(3.0), _wave("gain"), _alibi("slopes"), _cap(2.5), _add("second_bias"))
    return ScoreCase(arrays, keywords, steps, scale=1.0)


SCORES: dict[str, Callable[[Case, np.random.Generator], ScoreCase]] = {
    "plain": _plain_score,
    "static_scale": _static_scale,
    "traced_scale": _traced_scale,
    "bias": _bias(lambda c: (*c.batch, c.N, c.T, c.S)),
    "bias_shared": _bias(lambda c: (c.N, c.T, c.S)),
    "bias_keys": _bias(lambda c: (*c.batch, 1, 1, c.S)),
    "bias_head_keys": _bias(lambda c: (c.N, 1, c.S)),
    "bias_head_rows": _bias(lambda c: (c.N, c.T, 1)),
    "bias_other_dtype": _bias(lambda c: (1, c.T, c.S), other_dtype=True),
    "bias_partial_batch": _bias(lambda c: (*c.batch[:-1], *(1,) * len(c.batch[-1:]), c.N, 1, c.S)),
    "soft_cap": _soft_cap,
    "alibi": _alibi_score(lambda c: (c.N,)),
    "alibi_batch": _alibi_score(lambda c: (*c.batch, c.N)),
    "custom": _custom,
    "integers": _integers,
    "everything": _everything,
}


# ---- the table ------------------------------------------------------------------------------------------------------


def _pick(options, i):
    return options[i % len(options)]


def _table() -> tuple[Case, ...]:
    """Each group varies one factor in full and lets the others rotate, so that all meet at least once or twice."""
    rows = []
    usual_masks = ("causal", "full", "window_causal", "lengths", "bottom_right", "segments", "dense_keys")
    other_masks, other_scores = tuple(MASKS), tuple(SCORES)
    for i, (T, S) in enumerate(LENGTHS):
        N, K, batch = (2, 1, (1,)) if T * S > 100_000 else (*_pick(HEADS, i), (2,))
        for j, dtype in enumerate(DTYPES):
            rows.append(Case(T, S, _pick(usual_masks, i + 3 * j), dtype=dtype, N=N, K=K, H=64, Hv=64, batch=batch))
    for i, (H, Hv) in enumerate(HEAD_DIMS):
        N, K = _pick(HEADS, i + 1)
        for j, dtype in enumerate(DTYPES):
            T, S = _pick(((64, 64), (113, 203), (108, 256)), i + j)
            rows.append(Case(T, S, _pick(usual_masks, i + j), dtype=dtype, N=N, K=K, H=H, Hv=Hv))
    for i, mask in enumerate(MASKS):
        N, K = _pick(HEADS, i)
        batch = (2, 3) if "partial" in mask else _pick(BATCHES, i // 2)
        score = _pick(other_scores, 7 * i + 3)
        rows.append(Case(113, 203, mask, N=N, K=K, H=16, Hv=24, batch=batch))
        rows.append(Case(108, 256, mask, score, _pick(DTYPES, i), N=N, K=K, H=40, Hv=16, batch=batch))
    for i, score in enumerate(SCORES):
        N, K = _pick(HEADS, i + 1)
        batch = (2, 3) if "partial" in score else _pick(BATCHES, i // 2 + 1)
        mask = _pick(other_masks, 5 * i + 1)
        rows.append(Case(113, 203, "causal", score, N=N, K=K, H=16, Hv=24, batch=batch))
        rows.append(Case(128, 192, mask, score, _pick(DTYPES, i + 1), N=N, K=K, H=64, Hv=64, batch=batch))
    for i, (mask, score) in enumerate((("packed", "everything"), ("dense", "bias"), ("lengths", "alibi_batch"))):
        rows.append(Case(70, 90, mask, score, "float64", *_pick(HEADS, i + 1), H=16, Hv=8, batch=_pick(BATCHES, i)))
    return tuple(dict.fromkeys(rows))


TABLE = _table()
