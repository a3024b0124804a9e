"""The kernels by mma.sync in JAX's GPU interpreter: right results and no data race, without a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends.mma.backward.backward import backward, why_no_backward
from pallas_fa.backends.mma.config import BackwardConfig, Config, ForwardConfig, FusedBackwardConfig
from pallas_fa.backends.mma.forward.forward import forward
from pallas_fa.problem import normalise
from tests import interpreted_backward as of_hopper_backward
from tests import test_kernel_interpreted as of_hopper
from tests.lowering import kernels
from tests.test_kernel_interpreted import BASE, assert_right_and_free_of_races, interpreted, problem_of

FORWARD_TILES = ForwardConfig(2, 64, 64, stages=2), ForwardConfig(1, 128, 64), ForwardConfig(1, 64, 32)
# The calls that the other kernels are tested on, each with one form of tiles.
FORWARD_CASES = {name: (case, FORWARD_TILES[i % 3]) for i, (name, (case, _)) in enumerate(of_hopper.CASES.items())}


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_forward_is_right_and_free_of_races(name):
    case, tiles = FORWARD_CASES[name]
    problem, operands = problem_of(case, Config(forward=tiles))
    assert_right_and_free_of_races(problem, operands, forward)


def test_padding_may_hold_nan():
    inputs = dataclasses.replace(BASE, batch=(2,), mask="lengths").inputs()
    lengths = [inputs.mask.keywords[f"{name}_seq_lengths"] for name in ("query", "key_value", "key_value")]
    poisoned = []
    for x, n in zip(inputs.qkv, lengths, strict=True):
        padding = np.arange(x.shape[1])[None, :, None, None] >= n[:, None, None, None]
        poisoned.append(np.where(padding, np.asarray(np.nan, x.dtype), x))
    config = Config(forward=FORWARD_TILES[0])
    call = lambda arrays: interpreted(*normalise(*arrays, config=config, **inputs.keywords({})), forward)
    (out, lse), races = call(poisoned)
    clean, _ = call(inputs.qkv)
    assert not races
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(clean[0], np.float32))
    np.testing.assert_array_equal(lse, clean[1])


BACKWARD_TILES = BackwardConfig(2, 64, 32), BackwardConfig(1, 128, 32, stages=1), BackwardConfig(1, 64, 64)
FUSED_TILES = (
    FusedBackwardConfig(2, 64, 32),
    FusedBackwardConfig(2, 128, 16, stages=1),
    FusedBackwardConfig(1, 64, 32),
    FusedBackwardConfig(1, 128, 32, stages=1),
    FusedBackwardConfig(2, 64, 16, stages=1, values_in_registers=True),
    FusedBackwardConfig(2, 128, 16, values_in_registers=True),
)


def _backward_cases():
    """The calls that the other kernels are tested on: in one pass where that gives all gradients, else, and every fourth
    of them too, in several."""
    for i, (name, (case, keywords)) in enumerate(of_hopper_backward.CASES.items()):
        # Head dims past 256 have the tiles of the table: those here need more shared memory there than there is.
        several = None if case.H > 256 else BACKWARD_TILES[i % 3]
        first = i % len(FUSED_TILES)
        order = FUSED_TILES[first:] + FUSED_TILES[:first]
        tiles = [x for x in order if case.H <= 256 and _gives_all(case, keywords, x)][:1]
        if not tiles or i % 4 == 0:
            tiles.append(several)
        for number, x in enumerate(tiles):
            marks = pytest.mark.full if number else ()
            yield pytest.param(case, {**keywords, "config": x and Config(backward=x)}, id=f"{name}, {x}", marks=marks)


def _gives_all(case, keywords, tiles):
    """Whether one pass with these tiles gives all gradients of a call."""
    ordered = case.score == "bias_head_rows" or "deterministic_gradients" in keywords
    return not ordered and all(-(-dim // 64) % tiles.wgs == 0 for dim in (case.H, case.Hv))


@pytest.mark.parametrize("case, keywords", list(_backward_cases()))
def test_backward_is_right_and_free_of_races(case, keywords):
    kernels = dict(backward=backward, why_no_backward=why_no_backward)
    of_hopper_backward.is_right_and_free_of_races(case, keywords, **kernels)


def _head_parts(tiles, **case):
    deterministic = isinstance(tiles, BackwardConfig)  # in several passes
    case = dataclasses.replace(of_hopper_backward.BASE, **dict(T=136, S=200, N=4, K=1, H=64, Hv=64) | case)
    return case, {"config": Config(backward=tiles), "deterministic_gradients": deterministic}


# The query heads of a key head are in parts.
HEAD_PARTS = {
    "causal": _head_parts(FusedBackwardConfig(1, 128, 32, stages=1, head_parts=2), mask="causal"),
    "lengths, a part for each": _head_parts(FusedBackwardConfig(1, 64, 32, head_parts=4), mask="lengths", batch=(2,)),
    "several key heads, shared columns": _head_parts(
        FusedBackwardConfig(2, 64, 32, head_parts=2), N=8, K=2, H=128, Hv=100, mask="window_causal"
    ),
    "values in registers, float16": _head_parts(
        FusedBackwardConfig(2, 128, 16, values_in_registers=True, head_parts=2), H=128, Hv=128, dtype="float16"
    ),
    "two passes, documents, dropout": _head_parts(
        BackwardConfig(2, 64, 32, head_parts=2), mask="segments", score="soft_cap", dropout=0.3
    ),
    "three passes, bias": _head_parts(
        BackwardConfig(1, 64, 32, stages=1, head_parts=4), H=160, mask="causal", score="bias"
    ),
}


@pytest.mark.parametrize("name", HEAD_PARTS)
def test_head_parts_are_right_and_free_of_races(name):
    kernels = dict(backward=backward, why_no_backward=why_no_backward)
    of_hopper_backward.is_right_and_free_of_races(*HEAD_PARTS[name], **kernels)


@pytest.mark.parametrize("score", ["bias_shared", "bias_head_keys"])
def test_backward_has_the_arrays_of_each_warpgroup(score):
    """Tiles of the mask and the bias, or a bias of keys, whose gradient the warpgroups have in parts."""
    case = dataclasses.replace(of_hopper_backward.WIDE, mask="segments", score=score)
    kernels = dict(backward=backward, why_no_backward=why_no_backward)
    of_hopper_backward.is_right_and_free_of_races(case, {"config": Config(backward=FUSED_TILES[0])}, **kernels)


def test_backward_passes_values_through_the_slot_of_keys():
    """Values are in registers before keys take their slot, and each piece of dQ is added to columns of its own."""
    case, keywords = of_hopper_backward.CASES["head dim 256, empty rows"]
    kernels = dict(backward=backward, why_no_backward=why_no_backward)
    config = Config(backward=FUSED_TILES[4])
    of_hopper_backward.is_right_and_free_of_races(case, {**keywords, "config": config}, **kernels)


@pytest.mark.parametrize(
    "tiles", [BACKWARD_TILES[0], FUSED_TILES[2], FusedBackwardConfig(1, 64, 32, values_in_registers=True)], ids=str
)
def test_gradients_of_padding_that_holds_nan_are_zero(tiles):
    case = dataclasses.replace(BASE, batch=(2,), N=2, K=2, mask="lengths")
    problem, operands = of_hopper_backward.problem_of(case, {"config": Config(backward=tiles)})
    out, lse, d_out, d_lse = of_hopper_backward.residuals_of(case, problem, operands)
    keywords = case.inputs().mask.keywords
    there = lambda x, name: (
        np.arange(x.shape[1])[None, :, None, None] < keywords[f"{name}_seq_lengths"][:, None, None, None]
    )
    names = ("query", "key_value", "key_value")
    poisoned = [
        np.where(there(x, name), x, np.asarray(np.nan, x.dtype)) for x, name in zip(operands[:3], names, strict=True)
    ]
    d_out = np.where(there(d_out, "query"), d_out, np.asarray(np.nan, d_out.dtype))
    of = lambda arrays, d_out: of_hopper_backward.interpreted(
        problem, operands._replace(q=arrays[0], k=arrays[1], v=arrays[2]), out, lse, d_out, d_lse, backward=backward
    )
    gradients, races = of(poisoned, d_out)
    clean, _ = of(operands[:3], np.where(there(d_out, "query"), d_out, np.zeros((), d_out.dtype)))
    assert not races
    for name, x, y in zip(names, gradients, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
        assert not np.asarray(x, np.float32)[~np.broadcast_to(there(x, name), x.shape)].any()


def test_the_race_detector_sees_a_missing_barrier(monkeypatch):
    """Without the meeting, a warpgroup reads keys that another one is still to load, or loads over what others read."""
    from pallas_fa.backends.mma.cta import Cta

    monkeypatch.setattr(Cta, "meet", lambda self: None)
    problem, operands = problem_of(dataclasses.replace(BASE, T=128, S=256), Config(forward=FORWARD_TILES[0]))
    _, races = interpreted(problem, operands, forward)
    assert races


@pytest.mark.parametrize("dtype", ["bool", "bfloat16"])
def test_arrays_of_narrow_tiles_lower(dtype):
    """Pallas loads no tiles whose rows have 16 bytes."""
    q, x = jnp.ones((1, 128, 1, 64), jnp.bfloat16), jnp.ones((128, 128), dtype)
    config = Config(forward=ForwardConfig(1, 64, 16), backward=BackwardConfig(1, 64, 16))
    keywords = {"mask" if dtype == "bool" else "bias": x, "implementation": "mma", "config": config}
    call = lambda q: pallas_fa.dot_product_attention(q, q, q, **keywords)
    assert kernels(lambda q: jax.vjp(call, q)[1](q), q) == 3
