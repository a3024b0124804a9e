"""THE table of cases: masks x scores x dtypes x lengths x heads x head dims x batch dims.

Every test of an implementation and the benchmarks read it. A mask or a score is a name here; it comes with the keyword
arguments that a caller would write and, independently of the library, with what it means in NumPy.

    case = Case(T=113, S=203, mask="segments", score="bias_heads")
    inputs = case.inputs()                        # arrays, deterministic
    out = pallas_fa.dot_product_attention(*inputs.qkv, **inputs.keywords(inputs.arrays))
    truth = oracle.attention(inputs)              # float64
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.case_dropout import multipliers
from tests.case_masks import MASKS as MASKS
from tests.case_masks import MaskCase
from tests.case_masks import every_third as every_third
from tests.case_scores import SCORES as SCORES
from tests.case_scores import ScoreCase, numpy_dtype
from tests.case_scores import steeper_in as steeper_in
from tests.case_scores import wave as wave

DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (
    *((1, 1), (3, 1), (1, 7), (64, 64), (113, 203), (239, 1), (108, 256), (256, 113), (512, 256), (640, 128)),
    *((1023, 1024), (799, 3)),
)
HEADS = ((4, 4), (4, 2), (4, 1), (6, 2))
HEAD_DIMS = (
    *((8, 8), (16, 16), (40, 40), (64, 64), (72, 72), (80, 128), (96, 96), (128, 128), (256, 256)),
    *((64, 128), (128, 64), (192, 128), (24, 256), (256, 8), (59, 100)),
)
BATCHES = ((2,), (), (2, 3), (1,))


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
    sinks: str = "none"
    dropout: float = 0.0

    def __str__(self):
        batch = "x".join(map(str, self.batch)) or "none"
        sizes = f"T{self.T}-S{self.S}-N{self.N}-K{self.K}-H{self.H}-Hv{self.Hv}-B{batch}"
        sinks = "" if self.sinks == "none" else f"-sinks_{self.sinks}"
        dropout = f"-dropout{self.dropout:g}" if self.dropout else ""
        return f"{self.mask}-{self.score}-{self.dtype}-{sizes}{sinks}{dropout}"

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
            sinks=SINKS[self.sinks](self, rng),
            dropout_key=rng.integers(0, 2**32, (2, 4)[self.T % 2], np.uint32),
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
    sinks: dict[str, np.ndarray]  # "sinks", or nothing
    dropout_key: np.ndarray

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the score, and sinks, which get gradients beside q, k and v."""
        return self.score.arrays | self.sinks

    def keywords(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `dot_product_attention`, with these `arrays` in the score, and as sinks."""
        rate = self.case.dropout
        dropout = {"dropout_rate": rate, "dropout_key": self.dropout_key} if rate else {}
        sinks = {name: arrays[name] for name in self.sinks}
        return {**self.mask.keywords, **self.score.keywords(arrays), **sinks, **dropout}

    @property
    def multipliers(self) -> Any:
        """What dropout multiplies the probabilities by, float64 [*B, N, T, S]; 1 without dropout."""
        case = self.case
        if not case.dropout:
            return 1.0
        shape = math.prod(case.batch), case.N, case.T, case.S
        return multipliers(self.dropout_key, case.dropout, *np.ogrid[tuple(map(slice, shape))]).reshape(
            *case.batch, *shape[1:]
        )

    @property
    def allowed(self) -> np.ndarray:
        """bool [*B, N, T, S]"""
        case = self.case
        t, s = np.arange(case.T)[:, None], np.arange(case.S)[None, :]
        return np.broadcast_to(self.mask.allowed(t, s), (*case.batch, case.N, case.T, case.S))


def _sinks_of_heads(case, rng):
    return {"sinks": rng.standard_normal(case.N).astype("float64" if case.dtype == "float64" else "float32")}


def _sinks_of_batch(case, rng):
    """In the dtype of the case; the first is -inf: no sink."""
    sinks = rng.standard_normal((*case.batch, case.N))
    sinks[..., 0] = -np.inf
    return {"sinks": sinks.astype(numpy_dtype(case.dtype))}


SINKS: dict[str, Callable[[Case, np.random.Generator], dict[str, np.ndarray]]] = {
    "none": lambda case, rng: {},
    "heads": _sinks_of_heads,
    "batch": _sinks_of_batch,
}


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
    for i, (mask, score, dtype) in enumerate(
        (
            *(
                ("window_causal", "plain", "float32"),
                ("lengths", "bias_shared", "bfloat16"),
                ("packed", "custom", "float64"),
            ),
            *(
                ("causal", "soft_cap", "bfloat16"),
                ("nothing", "plain", "float32"),
                ("head_lengths", "everything", "float16"),
            ),
            *(("dense", "everything", "float32"), ("full", "plain", "bfloat16")),
        )
    ):
        sizes = dict(zip(("N", "K"), _pick(HEADS, i + 1), strict=True), H=64, Hv=64, batch=_pick(BATCHES, i))
        rows.append(Case(113, 203, mask, score, dtype, **sizes, sinks=("heads", "batch")[i % 2]))
    for i, (T, S, mask, score, dtype) in enumerate(
        (
            (113, 203, "causal", "plain", "bfloat16"),
            (70, 90, "packed", "custom", "float64"),
            (128, 192, "full", "everything", "float16"),
            (108, 256, "lengths", "bias_shared", "bfloat16"),
            (3, 40, "window_causal", "plain", "float32"),
        )
    ):
        sizes = dict(zip(("N", "K"), _pick(HEADS, i + 1), strict=True), batch=_pick(BATCHES, i))
        rows.append(Case(T, S, mask, score, dtype, **sizes, sinks=_pick(("none", "heads"), i), dropout=0.3))
    return tuple(dict.fromkeys(rows))


TABLE = _table()
