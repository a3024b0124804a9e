"""The backward kernels without a GPU: their own bodies in JAX's GPU interpreter, and lowering for CUDA.

The interpreter cannot add to device memory, so there every block keeps its part of dQ; those additions are proved by
reruns on a GPU.
"""

import contextlib
import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import dot_product_attention, masks, scores
from pallas_fa.backends.gpu import named_barriers
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import fits
from pallas_fa.backends.hopper.backward import order
from pallas_fa.backends.hopper.backward.backward import backward, why_no_backward
from pallas_fa.backends.hopper.backward.choose import choose
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.backward.scratch import on_gpu
from pallas_fa.backends.hopper.backward.table import BackwardFacts, backward_configs
from pallas_fa.backends.hopper.config import BackwardConfig, Config, ForwardConfig
from pallas_fa.backends.xla import attention as xla
from pallas_fa.problem import Residuals, normalise
from pallas_fa.scores.base import Fixed
from pallas_fa.scores.bias import Bias
from tests import cases, missing_wait
from tests.cases import Case
from tests.lowering import kernels

BASE = Case(113, 203, dtype="bfloat16", N=2, K=1, H=64, Hv=64, batch=(1,))
WIDE = dataclasses.replace(BASE, H=128, Hv=128)
GPU = Gpu("9.0", 132, 227 * 1024)
ONE_STAGE = Config(backward=BackwardConfig(compute_wgs=1, width=64, stages=(1, 1), ds_stages=1))

CASES = {
    "full": (dataclasses.replace(BASE, T=256, S=256), {}),
    "full, H=128": (dataclasses.replace(WIDE, T=128, S=256), {}),
    "causal": (dataclasses.replace(BASE, T=200, S=200, mask="causal"), {}),
    "causal, grouped heads": (dataclasses.replace(WIDE, T=200, S=200, N=4, K=2, mask="causal"), {}),
    "one tile of dS": (
        dataclasses.replace(WIDE, mask="causal"),
        {"config": Config(backward=BackwardConfig(ds_stages=1))},
    ),
    "one stage": (dataclasses.replace(BASE, mask="causal"), {"config": ONE_STAGE}),
    "window": (dataclasses.replace(BASE, mask="window_causal"), {}),
    "window, a warpgroup sits out": (dataclasses.replace(WIDE, T=320, S=300, mask="window_causal"), {}),
    "segments": (dataclasses.replace(BASE, mask="segments"), {}),
    "segments, a warpgroup sits out": (dataclasses.replace(WIDE, T=260, S=260, mask="segments"), {}),
    "a warpgroup sits out, head dim 256": (
        dataclasses.replace(BASE, T=270, S=270, N=1, H=256, Hv=256, mask="window_causal"),
        {},
    ),
    "statistics last": (
        dataclasses.replace(BASE, T=200, S=200, N=4, K=2, mask="causal"),
        {"config": Config(backward=BackwardConfig(2, 128, statistics_last=True))},
    ),
    "several blocks, one past the end": (
        dataclasses.replace(BASE, T=200, S=200, N=2, K=2, batch=(2,), mask="causal"),
        {"config": Config(backward=BackwardConfig(1, 64, persistent_ctas=3))},
    ),
    "several blocks, empty rows, grouped heads": (
        dataclasses.replace(BASE, T=200, S=300, N=4, K=2, batch=(2,), mask="lengths"),
        {"config": Config(backward=BackwardConfig(2, 128, (1, 1), 1, persistent_ctas=5))},
    ),
    "one key block, empty rows": (dataclasses.replace(BASE, T=200, S=100, batch=(2,), mask="lengths"), {}),
    "odd head dims": (dataclasses.replace(BASE, H=72, Hv=40, mask="causal"), {}),
    "one key block of several heads, float32": (
        dataclasses.replace(BASE, T=64, S=64, N=4, K=2, H=32, Hv=32, batch=(2,), mask="causal", dtype="float32"),
        {"config": Config(backward=BackwardConfig(1, 64, (1, 1), 1, persistent_ctas=3))},
    ),
    "sums start at zeros": (
        dataclasses.replace(WIDE, T=200, S=200, mask="causal"),
        {"config": Config(backward=BackwardConfig(first_store=False))},
    ),
    "tiles of dQ that nothing adds to": (dataclasses.replace(WIDE, T=300, S=100, mask="bottom_right"), {}),
    "blocks start at tiles of their own": (dataclasses.replace(WIDE, T=300, S=300, score="alibi"), {}),
    "blocks start at tiles of their own, bias of keys": (dataclasses.replace(WIDE, T=300, score="bias_head_keys"), {}),
    "blocks of a mask of heads": (dataclasses.replace(WIDE, N=4, K=2, mask="computed_blocks"), {}),
    "whole blocks": (dataclasses.replace(WIDE, T=300, S=400, mask="blocks"), {}),
    "whole blocks, deterministic": (
        dataclasses.replace(BASE, T=200, S=300, mask="blocks", score="bias_shared"),
        {"deterministic_gradients": True},
    ),
    "dense mask": (dataclasses.replace(BASE, mask="dense"), {}),
    "empty rows": (dataclasses.replace(BASE, batch=(2,), mask="lengths"), {}),
    "empty rows, sinks": (dataclasses.replace(BASE, batch=(2,), mask="lengths", sinks="heads"), {}),
    "one key block of several heads, odd head dims": (
        dataclasses.replace(BASE, T=64, S=64, N=4, K=2, H=40, Hv=48, batch=(2,), mask="causal"),
        {"config": Config(backward=BackwardConfig(1, 64, persistent_ctas=3))},
    ),
    "96 columns, grouped heads": (
        dataclasses.replace(BASE, T=200, S=200, N=4, K=2, H=96, Hv=96, mask="causal"),
        {},
    ),
    "80 columns, those of values 96, empty rows": (
        dataclasses.replace(BASE, T=112, S=200, H=80, Hv=96, batch=(2,), mask="lengths"),
        {},
    ),
    "96 columns, those of values 80, deterministic": (
        dataclasses.replace(BASE, T=112, S=200, H=96, Hv=80, mask="window_causal"),
        {"deterministic_gradients": True},
    ),
    "head dim 192, sums of dQ": (
        dataclasses.replace(BASE, T=136, S=200, N=4, K=2, H=192, Hv=128, mask="causal"),
        {},
    ),
    "head dim 192, lengths that are no multiples of 8": (dataclasses.replace(BASE, H=192, Hv=128, mask="lengths"), {}),
    "unequal head dims": (dataclasses.replace(BASE, H=64, Hv=128, mask="causal"), {}),
    "head dim 256": (dataclasses.replace(BASE, H=256, Hv=200, mask="causal"), {}),
    "soft cap": (dataclasses.replace(BASE, mask="causal", score="soft_cap"), {}),
    "bias, sinks": (dataclasses.replace(BASE, score="bias_shared", sinks="heads"), {}),
    "bias of each entry": (dataclasses.replace(BASE, T=256, S=256, batch=(2,), score="bias"), {}),
    "bias of each entry, causal, dropout": (
        dataclasses.replace(WIDE, mask="causal", batch=(2,), score="bias", dropout=0.3),
        {},
    ),
    "bias, warpgroups share 64 columns of dQ": (
        dataclasses.replace(BASE, T=136, S=200, mask="causal", batch=(2,), score="bias_shared"),
        {"config": Config(backward=BackwardConfig(2, 64))},
    ),
    "bias, sequences end in their tiles": (dataclasses.replace(WIDE, score="bias_shared"), {}),
    "dense mask, bias": (dataclasses.replace(BASE, mask="dense", batch=(2,), score="bias_shared"), {}),
    "bias, head dim 256": (dataclasses.replace(BASE, H=256, Hv=256, score="bias_shared"), {}),
    "bias, head dim 512": (dataclasses.replace(BASE, T=64, S=130, H=512, Hv=512, score="bias_shared"), {}),
    "relative bias, head dim 256": (dataclasses.replace(BASE, H=256, score="relative_bias"), {}),
    "relative bias": (dataclasses.replace(BASE, S=130, mask="causal", score="relative_bias"), {}),
    "relative bias, shared by heads": (dataclasses.replace(BASE, N=2, K=2, score="relative_bias_shared"), {}),
    "bias of keys": (dataclasses.replace(BASE, mask="causal", score="bias_head_keys"), {}),
    "bias of queries": (dataclasses.replace(BASE, mask="causal", score="bias_head_rows"), {}),
    "alibi": (dataclasses.replace(BASE, score="alibi"), {}),
    "dropout, causal, grouped heads": (
        dataclasses.replace(WIDE, T=200, S=200, N=4, K=2, mask="causal", batch=(2,), dropout=0.3),
        {},
    ),
    "dropout, padding, bias of queries": (
        dataclasses.replace(BASE, mask="lengths", score="bias_head_rows", sinks="heads", dropout=0.3),
        {},
    ),
    "dropout, head dim 256": (dataclasses.replace(BASE, H=256, Hv=200, mask="causal", dropout=0.3), {}),
    "negative scale": (BASE, {"scale": -0.3}),
    "deterministic": (dataclasses.replace(BASE, mask="causal"), {"deterministic_gradients": True}),
}


def problem_of(case, keywords, qkv=None):
    inputs = case.inputs()
    return normalise(*(qkv or inputs.qkv), **inputs.keywords(inputs.arrays), **keywords)


def interpreted(problem, operands, out, lse, d_out, d_lse, gpu=GPU, backward=backward):
    """The gradients, and whether races were found."""
    # Its only door is private: pallas has no public name for what the race detector found.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: TID251

    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with contextlib.redirect_stdout(io.StringIO()), plgpu.force_gpu_interpret_mode(parameters):
        results = backward(problem, Residuals(operands, out, lse), d_out, d_lse, gpu, interpret=True)
        results = jax.block_until_ready(results)
        return results, gpu_callbacks.get_races().races_found


def residuals_of(case, problem, operands):
    """(out, lse, d_out, d_lse)"""
    inputs = case.inputs()
    out, lse = xla.forward(problem, operands)
    return out, lse, jnp.asarray(inputs.d_out), jnp.asarray(inputs.d_lse)


def xla_gradients(problem, operands, out, lse, d_out, d_lse):
    return xla.backward(problem, Residuals(operands, out, lse), d_out, d_lse)


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name):
    is_right_and_free_of_races(*CASES[name])


@pytest.mark.parametrize(("T", "keywords"), [(300, ()), (100, ("query_seq_lengths",))], ids=["keys", "both, one tile"])
def test_a_cta_that_holds_all_keys_of_a_head_writes_all_of_dq(T, keywords):
    """Also where there are none: nothing is zeroed before. What lies in padding is NaN."""
    case = dataclasses.replace(BASE, T=T, S=100, N=2, K=2, H=64, Hv=64, batch=(3,))
    inputs, lengths = case.inputs(), np.array([0, 70, 100])
    lengths = dict.fromkeys(("key_value_seq_lengths", *keywords), lengths)
    q, k, v = inputs.qkv
    padding = np.arange(100)[:, None, None] >= np.array([0, 70, 100])[:, None, None, None]
    k, v = (jnp.where(padding, jnp.nan, x).astype(x.dtype) for x in (k, v))
    q = jnp.where(padding, jnp.nan, q).astype(q.dtype) if keywords else q
    problem, operands = normalise(q, k, v, **lengths)
    plan = choose(problem, passes(problem)[0], GPU)
    assert plan.dq.is_final and plan.dq.start is None
    residuals = problem, operands, *residuals_of(case, problem, operands)
    got, races = interpreted(*residuals)
    assert not races
    for x, true in zip(got, xla_gradients(*residuals), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(true, np.float32), atol=2e-2, rtol=2e-2)


def test_kernels_compute_no_gradient_of_a_bias_that_is_a_constant():
    """They store one where it is wanted; a constant takes the tiles of a call whose bias needs no memory for gradients."""
    x, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 128, 2, 64), (1, 2, 128, 128)))
    attend = functools.partial(dot_product_attention, implementation="mosaic_gpu")

    def of_bias(by):
        loss = lambda q, bias: attend(q, q, q, bias).astype(jnp.float32).sum()
        text = jax.jit(jax.grad(loss, by)).trace(x, bias).lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
        assert len(calls) == 2
        return calls[1].split("->")[-1].count("1x2x128x128xbf16")

    assert (of_bias(0), of_bias((0, 1))) == (0, 1)

    fixed = Fixed(Bias(bias), frozenset([0]))
    case = dataclasses.replace(BASE, T=128, S=200, score="bias_shared")
    problem, operands = problem_of(case, {})
    residuals = residuals_of(case, problem, operands)
    operands = operands._replace(score=dataclasses.replace(fixed, score=operands.score))
    problem = problem.with_operands(operands)
    plan = choose(problem, passes(problem)[0], GPU)
    assert not plan.score_gradients.added and plan.config.width == 128 and plan.config.ds_stages == 2
    got, races = interpreted(problem, operands, *residuals)
    assert not races and len(got) == 3
    for x, true in zip(got, xla_gradients(problem, operands, *residuals), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(true, np.float32), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("H", "batch", "score"), [(128, 2, "bias_shared"), (64, 3, "bias_other_dtype"), (40, 2, "bias_shared")]
)
def test_large_sums_over_the_batch(monkeypatch, H, batch, score):
    monkeypatch.setattr(order, "_L2_HOLDS", 0)
    case = dataclasses.replace(BASE, T=260, S=200, N=2, H=H, Hv=H, batch=(batch,), score=score)
    problem, _ = problem_of(case, {})
    plan = choose(problem, passes(problem)[0], GPU)
    assert plan.order.ordered_sums and plan.order.grid.by_head
    is_right_and_free_of_races(case, {})


BY_TILE = {
    "H=128": ({}, {}),
    "H=64, soft cap": ({"H": 64, "Hv": 64, "score": "soft_cap"}, {"width": 128}),
    "window, soft cap": ({"T": 512, "mask": "window_causal", "score": "soft_cap", "dropout": 0.3}, {}),
}


@pytest.mark.parametrize("name", BY_TILE)
def test_heads_of_a_tile_before_the_next_tile(name):
    """In two sections of heads, one from the first tile up, one from the last tile down."""
    changes, option = BY_TILE[name]
    case = dataclasses.replace(WIDE, **(dict(batch=(2,), T=384, S=384, N=4, K=2, mask="causal") | changes))
    keywords = {"config": Config(backward=BackwardConfig(by_tile=True, **option))}
    gpu = dataclasses.replace(GPU, multiprocessors=6)
    problem, _ = problem_of(case, keywords)
    plan = choose(problem, passes(problem)[0], gpu, interpret=True)
    assert plan.order.by_tile
    assert (plan.visits.blocks, plan.order.grid.l2_head_group) == (3, 2)
    is_right_and_free_of_races(case, keywords, gpu)


def test_by_tile_only_where_sections_fill_the_gpu_once():
    def goes(S, **changes):
        case = dataclasses.replace(WIDE, T=S, S=S, **(dict(batch=(2,), N=64, K=8, mask="causal") | changes))
        problem, _ = problem_of(case, {})
        return choose(problem, passes(problem)[0], GPU).order.by_tile

    assert goes(1024)
    assert goes(4096)
    assert not goes(4096, N=16), "two query heads of a key head"
    assert not goes(4096, mask="full")
    assert not goes(4096, mask="segments")
    assert not goes(4096, score="alibi"), "a slope would have to be read in each step"
    assert not goes(3072), "24 blocks of 16 heads are not a multiple of what fills 132"
    assert not goes(16384), "a head fills the GPU alone"


@pytest.mark.parametrize(("mask", "N", "warps"), [("full", 1, 1), ("causal", 1, 2), ("causal", 8, 1)])
def test_one_warp_stores_where_blocks_differ_in_the_order_of_tiles(mask, N, warps):
    problem, _ = problem_of(dataclasses.replace(WIDE, T=256, S=256, mask=mask, N=N), {})
    plan = choose(problem, passes(problem)[0], GPU)
    assert plan.config.store_warps == 2
    assert plan.order.store_warps == warps


def is_right_and_free_of_races(case, keywords, gpu=GPU, backward=backward, why_no_backward=why_no_backward):
    problem, operands = problem_of(case, keywords)
    residuals = residuals_of(case, problem, operands)
    assert why_no_backward(problem, gpu) is None
    gradients, races = interpreted(problem, operands, *residuals, gpu=gpu, backward=backward)
    assert not races
    exact = dataclasses.replace(problem, dtype=np.dtype(np.float32), precision=jax.lax.Precision.HIGHEST, config=None)
    truth = xla_gradients(exact, as_float32(operands), *as_float32(residuals))
    for ours, true, like in zip(gradients, truth, operands.differentiable, strict=True):
        assert ours.shape == like.shape
        assert ours.dtype == like.dtype
        error = np.linalg.norm(np.asarray(ours, np.float32) - true) / (np.linalg.norm(true) + 1e-20)
        # A rounding of p or dS and one of the result, to bfloat16; sums over all of T x S cancel.
        assert error < (4e-3 if ours.size > 1000 else 2e-2)


@pytest.mark.parametrize("name", [name for name in CASES if "sits out" in name])
def test_a_warpgroup_sits_out_what_only_the_other_visits(name):
    problem, operands = problem_of(*CASES[name])
    plan = choose(problem, passes(problem)[0], GPU, interpret=True)
    table = np.asarray(plan.visits.table(operands.mask))
    first, last = (table[..., i].reshape(*table.shape[:2], plan.visits.blocks, -1) for i in (0, 3))
    assert first.shape[-1] == 2
    assert ((first.max(-1) > first.min(-1)) | (last.max(-1) > last.min(-1))).any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_may_hold_nan(deterministic):
    case = dataclasses.replace(BASE, batch=(2,), N=1, mask="lengths")
    keywords = {"deterministic_gradients": deterministic}
    inputs = case.inputs()
    q_lengths, kv_lengths = (inputs.mask.keywords[f"{x}_seq_lengths"] for x in ("query", "key_value"))
    problem, operands = problem_of(case, keywords)
    out, lse, d_out, d_lse = residuals_of(case, problem, operands)

    def poisoned(x, lengths):
        padding = np.arange(x.shape[1])[None, :] >= lengths[:, None]
        return jnp.where(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), jnp.nan, x)

    qkv = (poisoned(x, n) for x, n in zip(inputs.qkv, (q_lengths, kv_lengths, kv_lengths), strict=True))
    _, poisoned_operands = problem_of(case, keywords, tuple(qkv))
    clean, _ = interpreted(problem, operands, out, lse, d_out, d_lse)
    ours, races = interpreted(
        problem, poisoned_operands, out, lse, poisoned(d_out, q_lengths), poisoned(d_lse, q_lengths)
    )
    assert not races
    for a, b, lengths in zip(ours[:3], clean[:3], (q_lengths, kv_lengths, kv_lengths), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        for row, length in zip(np.asarray(a, np.float32), lengths, strict=True):
            assert not row[length:].any()


@pytest.mark.parametrize("forbidden", [-1e9, -1e10, -1e30, float(np.finfo(np.float32).min)])
def test_a_large_negative_bias_is_a_mask(forbidden):
    case = dataclasses.replace(BASE, T=130, S=130)
    causal, operands = problem_of(case, {"is_causal": True})
    residuals = residuals_of(case, causal, operands)
    bias = np.where(np.tri(130, dtype=np.bool_), 0, forbidden).astype(np.float32)
    problem, with_bias = problem_of(case, {"bias": bias})
    ours, races = interpreted(problem, with_bias, *residuals)
    assert not races
    for ours_x, true in zip(ours[:3], xla_gradients(causal, operands, *residuals)[:3], strict=True):
        true = np.asarray(true, np.float32)
        assert np.linalg.norm(np.asarray(ours_x, np.float32) - true) < 1e-2 * np.linalg.norm(true)


def test_a_share_without_visits_does_not_stretch_its_blocks():
    """A dense band of keys of which every second 64 are nobody's."""
    T = 1024
    t, s = np.arange(T)[:, None], np.arange(T)
    band = (abs(t - s) < 128) & (s // 64 % 2 == 0)
    problem, operands = problem_of(dataclasses.replace(WIDE, T=T, S=T), {"mask": band})
    plan = choose(problem, passes(problem)[0], GPU, interpret=True)
    table = np.asarray(plan.visits.table(operands.mask)).reshape(plan.visits.blocks, 2, 4)
    assert (table[:, 1, 0] == table[:, 1, 3]).all()
    visited = table[..., 3].max(1) - table[..., 0].min(1)
    assert (visited == table[:, 0, 3] - table[:, 0, 0]).all()
    assert (visited > 0).all()


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("empty", ["by mask", "by bias"])
def test_what_is_in_the_gradient_of_an_empty_rows_lse_is_harmless(implementation, empty):
    case = dataclasses.replace(BASE, T=130, S=130)
    bias = np.zeros((130, 130), np.float32)
    bias[0] = -np.inf
    keywords = {"mask": masks.Causal(offset=-1)} if empty == "by mask" else {"bias": bias}
    problem, operands = problem_of(case, keywords)
    out, lse, d_out, d_lse = residuals_of(case, problem, operands)
    assert (lse[:, 0] == -jnp.inf).all()

    def gradients(at_empty):
        residuals = out, lse, d_out, d_lse.at[:, 0].set(at_empty)
        if implementation == "xla":
            return xla_gradients(problem, operands, *residuals)
        return interpreted(problem, operands, *residuals)[0]

    for zero, nan in zip(*(jax.tree.leaves(gradients(x)) for x in (0, jnp.nan)), strict=True):
        np.testing.assert_array_equal(np.asarray(zero, np.float32), np.asarray(nan, np.float32))


def test_the_race_detector_sees_a_missing_wait(monkeypatch):
    """Where nobody waits for slots to be free, tiles are overwritten while they are read."""
    monkeypatch.setattr(named_barriers.NamedBarrier, "wait", lambda self, i=0: None)
    case = dataclasses.replace(BASE, T=512, S=128)
    problem, operands = problem_of(case, {})
    residuals = residuals_of(case, problem, operands)
    missing_wait.assert_seen(lambda: interpreted(problem, operands, *residuals))


# ---- lowering ----


def lower_backward(case, **keywords):
    """How many GPU kernels are in the lowered backward of a case, or the reason why there are none."""
    inputs = case.inputs()

    def fn(q, k, v, arrays, out, lse, d_out, d_lse):
        problem, operands = normalise(q, k, v, **inputs.keywords(arrays), **keywords)
        reason = why_no_backward(problem, GPU)
        if reason is not None:
            raise NotImplementedError(reason)
        return backward(problem, Residuals(operands, out, lse), d_out, d_lse, GPU)

    B, T, N = inputs.d_lse.reshape(-1, *inputs.d_lse.shape[-2:]).shape
    like = functools.partial(jax.ShapeDtypeStruct, (B, T, N, case.Hv), inputs.d_out.dtype)
    rows = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return kernels(fn, *inputs.qkv, inputs.arrays, like(), rows, like(), rows)


LOWERED = Case(200, 300, dtype="bfloat16", N=4, K=2, H=64, Hv=64, batch=(2,))


@pytest.mark.parametrize("mask", cases.MASKS)
def test_every_mask_lowers(mask):
    batch = (2, 3) if "partial" in mask else (2,)
    assert lower_backward(dataclasses.replace(LOWERED, mask=mask, batch=batch)) == 1


@pytest.mark.parametrize("score", cases.SCORES)
def test_every_score_lowers(score):
    batch = (2, 3) if "partial" in score else (2,)
    assert lower_backward(dataclasses.replace(LOWERED, mask="causal", score=score, batch=batch)) in (1, 2)


@pytest.mark.parametrize(
    ("H", "Hv", "count"),
    [(8, 8, 1), (72, 72, 1), (128, 128, 1), (64, 128, 1), (128, 64, 1), (192, 128, 3), (256, 256, 3), (136, 24, 3)],
)
def test_every_head_dim_lowers(H, Hv, count):
    assert lower_backward(dataclasses.replace(LOWERED, mask="causal", H=H, Hv=Hv)) == count
    assert lower_backward(dataclasses.replace(LOWERED, mask="dense", score="bias", H=H, Hv=Hv)) == count


def test_head_dim_192_takes_two_passes_where_their_tiles_fit():
    case = dataclasses.replace(LOWERED, S=304, mask="causal", H=192, Hv=128)
    assert lower_backward(case) == 2
    assert lower_backward(dataclasses.replace(case, mask="segments")) == 2
    assert lower_backward(dataclasses.replace(case, mask="dense", score="bias")) == 2
    assert lower_backward(dataclasses.replace(case, mask="dense", score="everything")) == 3
    assert lower_backward(case, deterministic_gradients=True) == 3


@pytest.mark.parametrize(("T", "S"), [(108, 256), (333, 517), (104, 108)])
@pytest.mark.parametrize(("score", "batch"), [("bias", (2,)), ("bias_shared", (2,)), ("bias", ())])
@pytest.mark.parametrize("H", [64, 128])
def test_lengths_that_are_no_multiples_of_8_lower_with_a_bias(H, T, S, score, batch):
    """TMA stores rows in eights, and tiles of 64 columns that it copies in chunks can't be halved."""
    assert lower_backward(dataclasses.replace(LOWERED, T=T, S=S, H=H, Hv=H, score=score, batch=batch)) == 1


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 7), (799, 3), (239, 1), (1023, 1024)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_length_lowers(T, S, dtype):
    assert lower_backward(dataclasses.replace(LOWERED, T=T, S=S, mask="causal", dtype=dtype, batch=())) == 1


@pytest.mark.parametrize("gives", [("dk", "dv", "dq"), ("dk", "dv"), ("dq",)])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_config_lowers(gives, H, dtype, masked):
    deterministic = gives != ("dk", "dv", "dq")
    flags = dict(masked=masked, visit_table=masked, tests_arrays=masked, split=dtype == "float32")
    for config in backward_configs(BackwardFacts(gives, H, H, 4096, 4096, 10_000, group=1, **flags), GPU):
        # Tiles of 64 queries share columns of dQ at H=64 where lengths are multiples of 8.
        case = dataclasses.replace(LOWERED, S=304, H=H, Hv=H, mask="causal", dtype=dtype)
        assert lower_backward(case, config=Config(backward=config), deterministic_gradients=deterministic) == (
            2 if deterministic else 1
        )


@pytest.mark.parametrize(
    "option", [{"by_tile": True}, {"first_store": False}, {"store_warps": 1}, {"stagger": 1}], ids=str
)
@pytest.mark.parametrize("mask", ["full", "causal", "segments"])
def test_options_of_a_config_lower(option, mask):
    case = dataclasses.replace(LOWERED, H=128, Hv=128, mask=mask)
    assert case.N > case.K, "by_tile is for grouped heads"
    assert lower_backward(case, config=Config(backward=BackwardConfig(**option))) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [*((name, 0) for name in ("compute_wgs", "width", "ds_stages", "l2_head_group", "store_warps")), ("stagger", -1)],
)
def test_a_wrong_configuration_says_why(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        BackwardConfig(**{field: value})


def test_deterministic_gradients_take_passes_without_additions():
    assert lower_backward(dataclasses.replace(LOWERED, mask="causal"), deterministic_gradients=True) == 2
    with pytest.raises(NotImplementedError, match="in no fixed order"):
        lower_backward(dataclasses.replace(LOWERED, score="bias_shared"), deterministic_gradients=True)


@pytest.mark.parametrize("config", [ForwardConfig(n) for n in (1, 2, 3)] + [BackwardConfig(n) for n in (1, 2)], ids=str)
def test_every_number_of_warpgroups_has_registers(config):
    """What the warpgroups set for themselves fits what a CTA has at its launch: 64K registers, alike for all threads."""
    compute, other = config.registers
    assert compute % 8 == other % 8 == 0 and 24 <= other <= compute <= 255
    at_launch = min(65536 // (128 * (config.compute_wgs + 1)) // 8 * 8, 248)
    assert config.compute_wgs * compute + other <= (config.compute_wgs + 1) * at_launch


def test_every_table_config_fits_shared_memory():
    for H in (64, 128, 192, 256):
        case = dataclasses.replace(LOWERED, H=H, Hv=H)
        problem, _ = problem_of(case, {})
        for gives in passes(problem):
            assert fits(on_gpu(choose(problem, gives, GPU)), GPU)


def test_a_custom_mask_and_score_lower():
    mask = masks.Custom(lambda b, n, t, s: (t + s) % 3 == 0) | masks.Window(10, 10)
    score = scores.Custom(lambda x, b, n, t, s: jax.nn.relu(x) + jnp.where(t > s, x, 0.0))
    assert lower_backward(LOWERED, mask=mask, score=score) == 1
