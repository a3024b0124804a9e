"""The forward kernel's own body in JAX's GPU interpreter: right results and no data race, without a GPU."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_fa import masks
from pallas_fa.backends import reference
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.hopper.forward import forward
from pallas_fa.backends.hopper.forward import load as forward_load
from pallas_fa.backends.hopper.forward.choose import choose
from pallas_fa.problem import normalise
from tests import interpreter, missing_wait
from tests.cases import Case

TWO, THREE = (Config(forward=ForwardConfig(compute_wgs=wgs, block_kv=64)) for wgs in (2, 3))
PING_PONG, THREE_PING_PONG = (
    Config(forward=ForwardConfig(compute_wgs=wgs, block_kv=64, ping_pong=True)) for wgs in (2, 3)
)
PAIRS_PING_PONG = Config(forward=ForwardConfig(compute_wgs=2, block_kv=64, q_block_pairs=1, ping_pong=True))
TWO_PAIRS = Config(forward=ForwardConfig(compute_wgs=1, block_kv=64, q_block_pairs=2))
PAIRED = Config(forward=ForwardConfig(compute_wgs=1, block_kv=64, q_block_pairs=1))
EIGHTY, MANY_KEYS = (
    Config(forward=ForwardConfig(block_kv=block_kv, pin_softmax=pins, ping_pong=True, rescale_under_qk=True))
    for block_kv, pins in ((80, True), (176, False))
)
GROUPED_ROWS, GROUPED_ROWS_OF_A_STEP = (
    Config(forward=ForwardConfig(2, block_kv, pin_softmax=False, persistent_ctas=3, grouped_rows=True))
    for block_kv in (64, 96)
)


def _split_heads(heads, parts, **options):
    return Config(forward=ForwardConfig(block_kv=64, kv_splits=parts, split_heads=heads, **options))


BASE = Case(113, 203, dtype="bfloat16", N=2, K=1, H=64, Hv=64, batch=(1,))

CASES = {
    "full": (dataclasses.replace(BASE, T=128, S=256), TWO),
    "full, 3 warpgroups": (dataclasses.replace(BASE, T=192, S=192), THREE),
    "full, 3 warpgroups, two past the end": (dataclasses.replace(BASE, T=200), THREE),
    "causal": (dataclasses.replace(BASE, T=200, S=200, mask="causal"), TWO),
    "causal, 3 warpgroups": (dataclasses.replace(BASE, T=200, S=200, mask="causal"), THREE),
    "window": (dataclasses.replace(BASE, mask="window_causal"), TWO),
    "segments": (dataclasses.replace(BASE, mask="segments"), TWO),
    "blocks of a mask of heads": (dataclasses.replace(BASE, N=4, K=2, mask="computed_blocks"), TWO),
    "whole blocks, 3 warpgroups": (dataclasses.replace(BASE, T=300, S=400, mask="blocks"), THREE),
    "whole blocks, pairs, bias": (dataclasses.replace(BASE, T=300, mask="blocks", score="bias_shared"), PAIRED),
    "dense mask": (dataclasses.replace(BASE, mask="dense"), TWO),
    "bias": (dataclasses.replace(BASE, score="bias_shared"), TWO),
    "relative bias, 3 warpgroups, one past the end": (
        dataclasses.replace(BASE, T=113, S=70, score="relative_bias"),
        THREE,
    ),
    "relative bias shared, pairs": (dataclasses.replace(BASE, mask="causal", score="relative_bias_shared"), PAIRED),
    "bias of rows, soft cap": (dataclasses.replace(BASE, mask="causal", score="everything"), TWO),
    "soft cap, sinks of -inf": (dataclasses.replace(BASE, mask="causal", score="soft_cap", sinks="batch"), THREE),
    "grouped heads": (dataclasses.replace(BASE, N=4, K=2, mask="causal"), TWO),
    "empty rows": (dataclasses.replace(BASE, batch=(2,), mask="lengths"), TWO),
    "odd head dims, sinks": (dataclasses.replace(BASE, H=72, Hv=40, mask="causal", sinks="heads"), TWO),
    "96 columns, causal, grouped heads": (
        dataclasses.replace(BASE, T=200, S=200, N=4, K=2, H=96, Hv=96, mask="causal"),
        TWO,
    ),
    "80 columns, those of values 96, pairs, empty rows": (
        dataclasses.replace(BASE, T=200, S=200, H=80, Hv=96, batch=(2,), mask="lengths"),
        PAIRED,
    ),
    "96 columns, those of values 80, bias": (
        dataclasses.replace(BASE, T=104, S=200, H=96, Hv=80, score="bias_shared"),
        TWO,
    ),
    "ping-pong, causal": (dataclasses.replace(BASE, T=200, S=200, mask="causal"), PING_PONG),
    "ping-pong, 3 warpgroups, two in front padding, bias": (
        dataclasses.replace(BASE, T=200, mask="window_causal", score="bias_shared"),
        THREE_PING_PONG,
    ),
    "ping-pong, 3 warpgroups, one in front padding, every kind of score": (
        dataclasses.replace(BASE, mask="bottom_right", score="everything"),
        THREE_PING_PONG,
    ),
    "pairs and ping-pong, segments": (dataclasses.replace(BASE, T=400, mask="segments"), PAIRS_PING_PONG),
    "pairs and ping-pong, steps of one warpgroup": (
        dataclasses.replace(BASE, T=300, S=300, mask="causal"),
        PAIRS_PING_PONG,
    ),
    "persistent, empty rows": (
        dataclasses.replace(BASE, T=200, S=200, batch=(2,), mask="lengths"),
        Config(forward=ForwardConfig(compute_wgs=2, block_kv=64, ping_pong=True, persistent_ctas=3)),
    ),
    "persistent, pairs, grouped heads, bias": (
        dataclasses.replace(BASE, T=300, N=4, K=2, score="bias_shared"),
        Config(forward=ForwardConfig(compute_wgs=1, block_kv=64, q_block_pairs=1, persistent_ctas=3)),
    ),
    "persistent, few keys": (
        dataclasses.replace(BASE, T=400, S=77, N=4, K=2, mask="full"),
        Config(forward=ForwardConfig(3, 80, pin_softmax=False, persistent_ctas=3)),
    ),
    "persistent, all keys in the only slot": (
        dataclasses.replace(BASE, T=300, S=200, mask="full", sinks="heads"),
        Config(forward=ForwardConfig(2, 256, 1, ping_pong=True, persistent_ctas=3)),
    ),
    "by tickets, causal, output in turns": (
        dataclasses.replace(BASE, T=300, S=300, N=3, K=3, H=192, Hv=128, mask="causal"),
        Config(forward=ForwardConfig(2, 128, ping_pong=True, persistent_ctas=2, by_tickets=True, out_chunks=1)),
    ),
    "by tickets, causal, bias, more CTAs than blocks": (
        dataclasses.replace(BASE, T=200, S=200, mask="causal", score="bias_shared", sinks="heads"),
        Config(forward=ForwardConfig(1, 64, persistent_ctas=9, by_tickets=True)),
    ),
    "by tickets, blocks of one step, lengths": (
        dataclasses.replace(BASE, T=250, S=64, N=4, K=2, batch=(2,), mask="lengths"),
        Config(forward=ForwardConfig(1, 64, persistent_ctas=3, by_tickets=True)),
    ),
    "output in turns, causal, of three chunks two": (
        dataclasses.replace(BASE, T=300, N=4, K=2, H=192, Hv=192, mask="causal"),
        Config(forward=ForwardConfig(1, 64, q_block_pairs=1, persistent_ctas=2, out_chunks=2)),
    ),
    "output in turns, single blocks, ping-pong, sinks": (
        dataclasses.replace(BASE, T=270, N=3, H=192, Hv=128, mask="full", sinks="heads"),
        Config(forward=ForwardConfig(2, 128, ping_pong=True, persistent_ctas=2, out_chunks=1)),
    ),
    "output in turns, pairs, fewer chunks, every kind of score": (
        dataclasses.replace(BASE, T=300, H=72, Hv=40, mask="causal", score="everything", dropout=0.3),
        Config(forward=ForwardConfig(1, 64, q_block_pairs=2, out_chunks=2)),
    ),
    "output in turns, of four chunks three": (
        dataclasses.replace(BASE, T=150, S=130, H=64, Hv=256, mask="full"),
        Config(forward=ForwardConfig(1, 64, persistent_ctas=1, out_chunks=3)),
    ),
    "output in turns, columns in two parts": (
        dataclasses.replace(BASE, T=200, S=130, H=64, Hv=384, mask="causal"),
        Config(forward=ForwardConfig(1, 64, q_block_pairs=1, out_chunks=2)),
    ),
    "output in turns, float32": (
        dataclasses.replace(BASE, T=200, H=64, Hv=96, mask="causal", dtype="float32"),
        Config(forward=ForwardConfig(1, 64, q_block_pairs=1, out_chunks=2)),
    ),
    "grouped rows": (dataclasses.replace(BASE, N=8, batch=(2,), mask="window_causal"), GROUPED_ROWS),
    "grouped rows, one step, sinks": (
        dataclasses.replace(BASE, T=203, N=8, K=2, mask="window", sinks="batch", batch=(2,)),
        GROUPED_ROWS_OF_A_STEP,
    ),
    "grouped rows, more queries than keys, float16, sinks of -inf": (
        dataclasses.replace(BASE, T=203, S=113, N=8, K=2, mask="window_int", sinks="heads", dtype="float16"),
        GROUPED_ROWS_OF_A_STEP,
    ),
    "pairs and one that is left": (dataclasses.replace(BASE, T=170), PAIRED),
    "pairs, causal, every kind of score, sinks": (
        dataclasses.replace(BASE, mask="causal", score="everything", sinks="heads"),
        PAIRED,
    ),
    "pairs, dense mask, bias": (dataclasses.replace(BASE, mask="dense", score="bias_shared"), PAIRED),
    "two pairs at a time, an odd number of blocks": (dataclasses.replace(BASE, T=270, mask="causal"), TWO_PAIRS),
    "two pairs at a time, one pair left, segments": (dataclasses.replace(BASE, T=370, mask="segments"), TWO_PAIRS),
    "sinks, empty rows": (dataclasses.replace(BASE, batch=(2,), mask="lengths", sinks="heads"), TWO),
    "dropout, causal": (dataclasses.replace(BASE, T=200, N=4, mask="causal", batch=(2,), dropout=0.3), THREE),
    "dropout, everything": (
        dataclasses.replace(BASE, mask="segments", score="everything", sinks="heads", dropout=0.3),
        PAIRS_PING_PONG,
    ),
    "80 keys a block": (dataclasses.replace(BASE, T=128, S=256), EIGHTY),
    "80 keys a block, odd lengths, bias of rows": (
        dataclasses.replace(BASE, mask="causal", score="everything"),
        EIGHTY,
    ),
    "176 keys a block, empty rows": (dataclasses.replace(BASE, batch=(2,), mask="lengths"), MANY_KEYS),
    "pairs, empty rows": (dataclasses.replace(BASE, T=170, batch=(2,), mask="lengths"), PAIRED),
}

SPLIT_HEADS = {
    "the last": (dataclasses.replace(BASE, T=128, S=256, N=3), _split_heads(2, 2)),
    "persistent, pairs, odd lengths": (
        dataclasses.replace(BASE, T=300, N=3, batch=(2,)),
        _split_heads(1, 3, compute_wgs=1, q_block_pairs=1, persistent_ctas=3),
    ),
    "a whole batch entry, empty rows, sinks": (
        dataclasses.replace(BASE, T=200, S=200, batch=(2,), mask="lengths", sinks="batch"),
        _split_heads(2, 2, ping_pong=True),
    ),
    "all, causal, more parts than keys of some, every kind of score": (
        dataclasses.replace(BASE, T=203, N=4, K=2, mask="causal", score="everything", sinks="heads"),
        _split_heads(4, 4, compute_wgs=3),
    ),
    "all, segments, dropout, bias": (
        dataclasses.replace(BASE, T=300, mask="segments", score="bias_shared", dropout=0.3),
        _split_heads(2, 3, ping_pong=True, rescale_under_qk=True, q_block_pairs=1),
    ),
    "more parts than key blocks": (dataclasses.replace(BASE, T=150, S=128), _split_heads(2, 4)),
    "columns of values in parts": (
        dataclasses.replace(BASE, T=203, S=300, N=2, K=2, H=320, Hv=512, mask="causal"),
        _split_heads(1, 2, compute_wgs=2),
    ),
}


def interpreted(problem, operands, kernel=forward.forward):
    """(out, lse), whether races were found."""
    return interpreter.interpreted(lambda operands: kernel(problem, operands, Gpu.visible(), interpret=True), operands)


def assert_right_and_free_of_races(problem, operands, kernel=forward.forward):
    (out, lse), races = interpreted(problem, operands, kernel)
    assert not races
    out = np.asarray(out, np.float32)
    truth = jax.jit(functools.partial(reference.attention, problem))(operands)
    true_out, true_lse = (np.asarray(x, np.float32) for x in truth)
    # One rounding of p and one of the result, to bfloat16.
    np.testing.assert_allclose(out, true_out, rtol=2e-2, atol=2e-2)
    assert np.linalg.norm(out - true_out) < 4e-3 * np.linalg.norm(true_out)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)


def problem_of(case, config):
    inputs = case.inputs()
    return normalise(*inputs.qkv, config=config, **inputs.keywords(inputs.arrays))


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name):
    assert_right_and_free_of_races(*problem_of(*CASES[name]))


@pytest.mark.parametrize("name", SPLIT_HEADS)
def test_interpreted_split_heads_are_right_and_free_of_races(name):
    assert_right_and_free_of_races(*problem_of(*SPLIT_HEADS[name]))


@pytest.mark.parametrize(("batch", "N", "heads"), [((2,), 1, 2), ((2,), 3, 3)])
def test_split_heads_of_a_devices_share_of_the_heads(batch, N, heads):
    """It may have fewer heads than the call for which the tiles were named: then all heads of as many entries."""
    case = dataclasses.replace(BASE, T=70, S=130, batch=batch, N=N, K=1)
    problem, operands = problem_of(case, _split_heads(4, 2))
    assert choose(problem, Gpu.visible(), interpret=True).split_heads == heads
    assert_right_and_free_of_races(problem, operands)


def test_interpreted_arrays_of_queries_are_read_before_the_next_are_loaded():
    """The only step of a query block reads them, and its CTA takes another block."""
    case = dataclasses.replace(BASE, T=300, S=64, score="bias_head_rows")
    config = Config(forward=ForwardConfig(1, 64, pin_softmax=False, persistent_ctas=1))
    assert_right_and_free_of_races(*problem_of(case, config))


@pytest.mark.parametrize("forbidden", [-1e9, -1e10, -1e30, float(np.finfo(np.float32).min)])
def test_a_large_negative_bias_is_a_mask(forbidden):
    """As in Flax models; a row in which it forbids everything is the mean of all values."""
    inputs = dataclasses.replace(BASE, T=200, S=200).inputs()
    bias = np.where(np.tri(200, dtype=np.bool_), 0, forbidden).astype(np.float32)
    bias[7] = forbidden
    problem, operands = normalise(*inputs.qkv, bias=bias, config=TWO)
    assert_right_and_free_of_races(problem, operands)


@pytest.mark.parametrize("growth", (2, 9, 62, 300))
@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("late", (pytest.param(False, marks=pytest.mark.full), True))
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float16", marks=pytest.mark.full)))
@pytest.mark.parametrize(("H", "block_kv"), ((64, 64), (128, 128)))
def test_maxima_that_grow(growth, with_bias, late, dtype, H, block_kv):
    """By less than `LAG` a step, which adds up, and by more; where probabilities would overflow, too."""
    inputs = dataclasses.replace(BASE, T=64, S=512, H=H, Hv=H, dtype=dtype).inputs()
    q, k, v = inputs.qkv
    config = Config(forward=ForwardConfig(compute_wgs=2, block_kv=block_kv, rescale_under_qk=late))
    # Logits in base 2 grow by so much from one block of 64 keys to the next, and for odd queries back again at the end. The
    # last keys are visited first.
    block = np.arange(512)[::-1] // 64
    rises = growth * np.where(np.arange(64)[:, None] % 2, np.minimum(block, 7 - block), block) * np.log(2)
    if with_bias:
        problem, operands = normalise(q, k, v, bias=rises.astype(np.float32), config=config)
    else:  # by one more column of q and k
        q, k = (np.array(x, np.float32) for x in (q, k))
        q[..., 0], k[..., 0] = H**0.5, (growth * block * np.log(2))[None, :, None]
        problem, operands = normalise(*(np.asarray(x, v.dtype) for x in (q, k)), v, config=config)
    assert_right_and_free_of_races(problem, operands)


def test_interpreted_masks_that_hide_keys_anywhere_in_persistent_ctas():
    """The first query block has front padding; how many steps it has is known while tracing, and hidden from compilers."""
    inputs = dataclasses.replace(BASE, T=300, S=640, H=128, Hv=128, N=1, K=1).inputs()
    config = Config(forward=ForwardConfig(persistent_ctas=2, pin_softmax=False))
    mask = masks.Custom(lambda b, n, t, s: (t - s) % 3 != 0)
    assert_right_and_free_of_races(*normalise(*inputs.qkv, mask=mask, config=config))


def test_padding_may_hold_nan():
    case = dataclasses.replace(BASE, batch=(2,), mask="lengths")
    inputs = case.inputs()
    lengths = [inputs.mask.keywords[f"{name}_seq_lengths"] for name in ("query", "key_value", "key_value")]
    poisoned = []
    for x, n in zip(inputs.qkv, lengths, strict=True):
        padding = np.arange(x.shape[1])[None, :, None, None] >= n[:, None, None, None]
        poisoned.append(np.where(padding, np.asarray(np.nan, x.dtype), x))
    clean, _ = interpreted(*normalise(*inputs.qkv, config=TWO, **inputs.keywords({})))
    (out, lse), races = interpreted(*normalise(*poisoned, config=TWO, **inputs.keywords({})))
    assert not races
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(clean[0], np.float32))
    np.testing.assert_array_equal(lse, clean[1])


def test_the_race_detector_sees_a_missing_wait(monkeypatch):
    """Without the wait for a slot to be free, a tile of keys is overwritten while it is read."""
    monkeypatch.setattr(forward_load, "wait_free", lambda *args: None)
    problem, operands = problem_of(dataclasses.replace(BASE, T=128, S=384), TWO)
    missing_wait.assert_seen(lambda: interpreted(problem, operands))
