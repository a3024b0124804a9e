"""The kernels by mma.sync in JAX's GPU interpreter: right results and no data race, without a GPU."""

import dataclasses

import numpy as np
import pytest

from pallas_fa.backends import reference
from pallas_fa.backends.mma.config import Config, ForwardConfig
from pallas_fa.backends.mma.forward.forward import forward
from pallas_fa.problem import normalise
from tests import test_kernel_interpreted as of_hopper
from tests.test_kernel_interpreted import BASE, interpreted, problem_of

FORWARD_TILES = ForwardConfig(2, 64, 64, stages=2), ForwardConfig(1, 128, 64), ForwardConfig(1, 64, 32)
# The calls that the other kernels are tested on, each with one form of tiles.
FORWARD_CASES = {name: (case, FORWARD_TILES[i % 3]) for i, (name, (case, _)) in enumerate(of_hopper.CASES.items())}


def errors(problem, operands, out, lse):
    """The relative error of `out`; raises where `lse` is wrong."""
    true_out, true_lse = (np.asarray(x, np.float32) for x in reference.attention(problem, operands))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    return np.linalg.norm(np.asarray(out, np.float32) - true_out) / np.linalg.norm(true_out)


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_forward_is_right_and_free_of_races(name):
    case, tiles = FORWARD_CASES[name]
    problem, operands = problem_of(case, Config(forward=tiles))
    results, races = interpreted(problem, operands, forward)
    assert not races
    assert errors(problem, operands, *results) < 4e-3


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


def test_the_race_detector_sees_a_missing_barrier(monkeypatch):
    """Without the meeting, a warpgroup reads keys that another one is still to load, or loads over what others read."""
    from pallas_fa.backends.mma.cta import Cta

    monkeypatch.setattr(Cta, "meet", lambda self: None)
    problem, operands = problem_of(dataclasses.replace(BASE, T=128, S=256), Config(forward=FORWARD_TILES[0]))
    _, races = interpreted(problem, operands, forward)
    assert races
