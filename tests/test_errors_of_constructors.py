"""Bad masks and scores: their constructors refuse them, and say why."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import masks, scores
from tests.case_errors import OtherArray, check


class NoHash:
    """A function with settings, as a plain dataclass is: equality, and so no hash."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, *args):
        return args[0]


BAD_CONSTRUCTION = {
    "align": (lambda: masks.Causal("left"), ValueError, ("align='left'", "'top_left'", "'bottom_right'")),
    "offset of True": (lambda: masks.Causal(offset=True), TypeError, ("offset=True", "int", "Pass 1")),
    "offset of half": (lambda: masks.Causal(offset=0.5), TypeError, ("offset=0.5", "int")),
    "offset of a float array": (lambda: masks.Causal(offset=np.ones(2)), TypeError, ("offset.dtype=float64", "int32")),
    "offset of infinity": (lambda: masks.Causal(offset=math.inf), TypeError, ("offset=inf", "int")),
    "window": (lambda: masks.Window(-1), ValueError, ("left=-1", "flash-attn", "None", "offset=", "array(-1)")),
    "window of half": (lambda: masks.Window(None, 1.5), TypeError, ("right=1.5", "int", "None")),
    "window of infinity": (lambda: masks.Window(math.inf), TypeError, ("left=inf", "None")),
    "window of a pair": (lambda: masks.Window((3, 0)), TypeError, ("left=(3, 0)", "int array", "None")),
    "offsets as align": (lambda: masks.Causal(np.ones(2, int)), ValueError, ("align=array([1, 1])", "offset=")),
    "offset as align": (lambda: masks.Causal(3), ValueError, ("align=3", "offset=")),
    "slopes of None": (lambda: scores.Alibi(None), TypeError, ("slopes=None", "float array")),
    "align of a window": (lambda: masks.Window(1, align="left"), ValueError, ("align='left'", "Window", "'bottom_right'")),
    "align of Alibi": (lambda: scores.Alibi(np.ones(2), align="left"), ValueError, ("align='left'", "Alibi", "'top_left'")),
    "window of floats": (lambda: masks.Window(np.ones(2)), TypeError, ("left.dtype=float64", "integer", "int32")),
    "segments of floats": (
        lambda: masks.Segments(np.ones((2, 3)), np.ones((2, 3), int)),
        TypeError,
        ("q_ids.dtype=float64", "integer", ".astype(jnp.int32)"),
    ),
    "segments of None": (lambda: masks.Segments(None, np.ones((2, 3), int)), TypeError, ("q_ids", "NoneType", "int array")),
    "segments of 64 bits": (
        lambda: masks.Segments(np.zeros((2, 3), int), np.array([2**31, 0, 1])),
        ValueError,
        ("kv_ids", "2147483648", "int64 as int32", "np.unique"),
    ),
    "signed and unsigned segments": (
        lambda: masks.Segments(np.zeros((2, 3), np.int8), np.zeros((2, 3), np.uint32)),
        ValueError,
        ("q_ids.dtype=int8", "kv_ids.dtype=uint32", "int32"),
    ),
    "lengths of bools": (lambda: masks.Lengths(np.ones(2, bool)), TypeError, ("q_lengths.dtype=bool", "integer")),
    "dense of ints": (lambda: masks.Dense(np.ones((2, 2), int)), TypeError, ("int64", "bool array", "array != 0", "bias=")),
    "dense of a list": (lambda: masks.Dense([True]), TypeError, ("list", "bool array", "array != 0")),
    "custom of an array": (lambda: masks.Custom(np.ones(2)), TypeError, ("fn=", "function", "(b, n, t, s, *slices)")),
    "custom of what has no hash": (lambda: masks.Custom(NoHash()), TypeError, ("fn=", "NoHash", "hash", "frozen=True")),
    "custom arrays of 64 bits": (lambda: masks.Custom(abs, np.array([2**40])), ValueError, ("1099511627776", "np.unique")),
    "custom ranges of a function": (lambda: masks.Custom(abs, ranges=abs), TypeError, ("ranges=", "masks.Custom(fn)")),
    "and with a function": (lambda: operator.and_(masks.Causal(), abs), TypeError, ("Mask & builtin", "masks.Custom(fn)")),
    "custom ranges": (lambda: masks.Custom(abs, ranges=(0, 5)), TypeError, ("ranges=(0, 5)", "Mask", "Window(128, 0)")),
    "custom arrays": (lambda: masks.Custom(abs, "text"), TypeError, ("arrays", "str", "broadcastable")),
    "and with an array": (lambda: masks.Causal() & np.ones((2, 2), bool), TypeError, ("Mask &", "ndarray", "Dense(array)")),
    "array and a mask": (lambda: [True] & masks.Causal(), TypeError, ("Mask &", "list", "Dense(array)")),
    "or with an array": (lambda: operator.or_(masks.Causal(), jnp.ones(2, bool)), TypeError, ("Mask |", "Dense(array)")),
    "or with None": (lambda: None | masks.Causal(), TypeError, ("Mask |", "NoneType", "Dense(array)")),
    "And of what is no mask": (lambda: masks.And((masks.Causal(), 1)), TypeError, ("Mask And int", "Dense(array)")),
    "Or of an array": (lambda: masks.Or((np.ones((2, 2), bool), masks.Causal())), TypeError, ("Mask Or ndarray", "Dense(")),
    "And of a class": (lambda: masks.And((masks.Causal,)), TypeError, ("Mask And the class Causal", "Causal(...)")),
    "And of masks that are no tuple": (lambda: masks.And(masks.Causal()), TypeError, ("And: parts=Causal(", "And((a, b))")),
    "Or of nothing": (lambda: masks.Or(()), TypeError, ("Or: parts=()", "one Mask or more", "Or((a, b))")),
    "soft cap": (lambda: scores.SoftCap(0), ValueError, ("cap=0", "positive", "Leave the soft cap out")),
    "soft cap below float32": (lambda: scores.SoftCap(1e-50), ValueError, ("cap=1e-50", "7.9e-31", "Leave the soft")),
    "soft cap past floats": (lambda: scores.SoftCap(10**400), ValueError, ("cap=1000", "1.3e+30", "float32")),
    "slopes past integers": (lambda: scores.Alibi([10**400]), TypeError, ("slopes=[1000", "float array")),
    "slopes of powers of two": (lambda: scores.Alibi(jnp.ones(2, jnp.float8_e8m0fnu)), TypeError, ("float8_e8m0fnu",)),
    "soft cap of an array": (lambda: scores.SoftCap(jnp.ones(())), TypeError, ("cap=", "float", "scores.Custom(fn, cap)")),
    "slopes of ints": (lambda: scores.Alibi(np.ones(4, int)), TypeError, ("slopes.dtype=int64", "float", ".astype")),
    "bias of bools": (lambda: scores.Bias(np.ones(4, bool)), TypeError, ("array.dtype=bool", "float", ".astype")),
    "custom score": (lambda: scores.Custom(3), TypeError, ("fn=3", "function", "(x, b, n, t, s, *slices)")),
    "custom score of what has no hash": (lambda: scores.Custom(NoHash()), TypeError, ("fn=", "NoHash", "frozen=True")),
    "custom score of powers of two": (
        lambda: scores.Custom(abs, jnp.ones(2, jnp.float8_e8m0fnu)),
        TypeError,
        ("arrays holds a float8_e8m0fnu", "no sign", ".astype(jnp.float32)"),
    ),
    "custom score of long doubles": (
        lambda: scores.Custom(abs, np.ones(2, np.longdouble)),
        TypeError,
        ("arrays holds a float", "more than 64 bits", ".astype(jnp.float32)"),
    ),
    "custom score of complex numbers": (
        lambda: scores.Custom(lambda x, b, n, t, s, a: x * a.real, jnp.ones(2, jnp.complex64)),
        TypeError,
        ("arrays holds a complex64", "no gradient", "scores.Custom(fn, x.real, x.imag)"),
    ),
    "custom score of a PRNG key": (
        lambda: scores.Custom(abs, jax.random.key(0)),
        TypeError,
        ("arrays holds a key<", "bools or numbers", "jax.random.bernoulli(key, shape=(T, S))"),
    ),
    "custom mask of strings": (
        lambda: masks.Custom(abs, np.array(["a", "b"])),
        TypeError,
        ("arrays holds a <U1", "bools or numbers", "np.unique(x, return_inverse=True)[1]"),
    ),
    "dense of another library": (lambda: masks.Dense(OtherArray()), TypeError, ("Dense", "bool array", "got OtherArray")),
    "slopes of long doubles": (lambda: scores.Alibi(np.ones(4, np.longdouble)), TypeError, ("slopes.dtype=float", "float")),
    "custom score of text": (lambda: scores.Custom(abs, "text"), TypeError, ("arrays", "str", "broadcastable")),
    "strip of two": (
        lambda: scores.RelativeBias(lambda q, k: q - k),
        TypeError,
        ("strip=", "signature (q, k)", "one argument", "offsets s - t", "scores.Custom(fn)"),
    ),
    "then of a class": (lambda: scores.SoftCap(1).then(scores.SoftCap), TypeError, ("class SoftCap", "Make one: SoftCap(")),
    "chain": (lambda: scores.Chain((scores.SoftCap(1), 3)), TypeError, ("Chain takes a Score", "int", "Custom(fn)")),
    "chain of nothing": (lambda: scores.Chain(()), TypeError, ("Chain: parts=()", "one Score or more", "Chain((a, b))")),
    "chain of a score": (lambda: scores.Chain(scores.SoftCap(1)), TypeError, ("Chain: parts=SoftCap(", "Chain((a, b))")),
    "then": (lambda: scores.SoftCap(1).then(jnp.tanh), TypeError, ("then", "Score", "scores.Custom(fn)")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONSTRUCTION)
def test_bad_masks_and_scores(name):
    build, kind, says = BAD_CONSTRUCTION[name]
    with pytest.raises(kind) as error:
        build()
    check(error, kind, says)
