"""The backward kernels' own bodies in JAX's GPU interpreter: right gradients and no data race, without a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import dot_product_attention, masks
from pallas_fa.backends.gpu import named_barriers
from pallas_fa.backends.hopper.backward import order
from pallas_fa.backends.hopper.backward.choose import choose, choose_passes
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.config import BackwardConfig, Config
from pallas_fa.problem import normalise
from pallas_fa.scores.base import Fixed
from pallas_fa.scores.bias import Bias
from tests import missing_wait
from tests.interpreted_backward import (
    AT_192,
    BASE,
    BY_GRADIENT,
    CASES,
    GPU,
    HEAD_PARTS,
    WIDE,
    interpreted,
    is_right_and_free_of_races,
    problem_of,
    residuals_of,
    xla_gradients,
)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name):
    is_right_and_free_of_races(*CASES[name])


@pytest.mark.parametrize("name", AT_192)
def test_head_dim_192_is_right_and_free_of_races(name):
    is_right_and_free_of_races(*AT_192[name])


@pytest.mark.parametrize("name", BY_GRADIENT)
def test_a_warpgroup_for_each_gradient_is_right_and_free_of_races(name):
    case, keywords = BY_GRADIENT[name]
    problem, _ = problem_of(case, keywords)
    assert choose(problem, choose_passes(problem, GPU)[0], GPU).by_gradient
    is_right_and_free_of_races(case, keywords)


@pytest.mark.parametrize("name", HEAD_PARTS)
def test_head_parts_are_right_and_free_of_races(name):
    is_right_and_free_of_races(*HEAD_PARTS[name])


@pytest.mark.parametrize("N", [1, 2, 6])
def test_head_parts_of_a_devices_share_of_the_heads(N):
    """It may have fewer query heads of a key head than the call for which the tiles were named: then fewer parts."""
    case, keywords = HEAD_PARTS["lengths, a part for each"]
    not_asked = lambda problem, gpu: None  # of the call, before its heads are shared out
    is_right_and_free_of_races(dataclasses.replace(case, N=N), keywords, why_no_backward=not_asked)


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
    keywords = {"config": Config(backward=BackwardConfig(by_tile=True, l2_head_group=2, **option))}
    problem, _ = problem_of(case, keywords)
    plan = choose(problem, passes(problem)[0], GPU, interpret=True)
    assert plan.order.by_tile
    assert (plan.visits.blocks, plan.order.grid.l2_head_group) == (3, 2)
    is_right_and_free_of_races(case, keywords)


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
