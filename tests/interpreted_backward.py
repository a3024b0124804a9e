"""Hopper's backward kernels in JAX's GPU interpreter, beside XLA's gradients: the cases, and how they are compared.

The interpreter cannot add to device memory, so there every block keeps its part of dQ; those additions are proved by
reruns on a GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.backward.backward import backward, why_no_backward
from pallas_fa.backends.hopper.config import BackwardConfig, Config
from pallas_fa.backends.xla import attention as xla
from pallas_fa.problem import Residuals, normalise
from tests import interpreter
from tests.cases import Case

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
        {"config": Config(backward=BackwardConfig(2, 64, (2, 1)))},
    ),
    "statistics last": (
        dataclasses.replace(BASE, T=200, S=200, N=4, K=2, mask="causal"),
        {"config": Config(backward=BackwardConfig(2, 128, statistics_last=True))},
    ),
    "statistics last, bias": (
        dataclasses.replace(BASE, T=136, S=200, score="bias_shared"),
        {"config": Config(backward=BackwardConfig(2, 64, statistics_last=True))},
    ),
    "dK last, dQ by columns": (
        dataclasses.replace(WIDE, T=200, S=200, mask="causal"),
        {"config": Config(backward=BackwardConfig(2, 64, dk_last=True))},
    ),
    "several blocks, one past the end": (
        dataclasses.replace(BASE, T=200, S=200, N=2, K=2, batch=(2,), mask="causal"),
        {"config": Config(backward=BackwardConfig(1, 64, persistent_ctas=3, by_tickets=True))},
    ),
    "several blocks, empty rows, grouped heads": (
        dataclasses.replace(BASE, T=200, S=300, N=4, K=2, batch=(2,), mask="lengths"),
        {"config": Config(backward=BackwardConfig(2, 128, (1, 1), 1, persistent_ctas=5, by_tickets=True))},
    ),
    "several blocks, dealt out in turn": (
        dataclasses.replace(BASE, T=136, S=300, N=2, K=2),
        {"config": Config(backward=BackwardConfig(2, 128, (1, 1), 1, persistent_ctas=2))},
    ),
    "several blocks, a window, deterministic": (
        dataclasses.replace(BASE, T=200, S=200, N=2, K=2, mask="window_causal"),
        {"config": Config(backward=BackwardConfig(1, 64, persistent_ctas=3)), "deterministic_gradients": True},
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
    "head dim 192, lengths that are no multiples of 8": (dataclasses.replace(BASE, H=192, Hv=128, mask="lengths"), {}),
    "head dim 256, empty rows": (dataclasses.replace(BASE, H=256, Hv=256, batch=(2,), mask="lengths"), {}),
    "unequal head dims": (dataclasses.replace(BASE, H=64, Hv=128, mask="causal"), {}),
    "head dim 256": (dataclasses.replace(BASE, H=256, Hv=200, mask="causal"), {}),
    "soft cap": (dataclasses.replace(BASE, mask="causal", score="soft_cap"), {}),
    "soft cap, lengths, head dim 256": (dataclasses.replace(BASE, H=256, Hv=256, mask="lengths", score="soft_cap"), {}),
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
    "negative scale, head dim 256": (dataclasses.replace(BASE, H=256, Hv=256), {"scale": -0.1}),
    "deterministic": (dataclasses.replace(BASE, mask="causal"), {"deterministic_gradients": True}),
}
# At head dim 192 with values of 128 or less, whose gradients take one pass.
AT_192 = {
    "causal, grouped heads": (
        dataclasses.replace(BASE, T=136, S=200, N=4, K=2, H=192, Hv=128, mask="causal"),
        {},
    ),
    "empty rows": (
        dataclasses.replace(BASE, T=136, S=200, H=192, Hv=128, batch=(2,), mask="lengths"),
        {},
    ),
    "soft cap, two passes": (
        dataclasses.replace(BASE, T=136, S=200, H=192, Hv=128, mask="window_causal", score="soft_cap"),
        {},
    ),
    "float16, one tile of dS": (
        dataclasses.replace(BASE, T=200, S=200, H=192, Hv=64, mask="dense", dtype="float16"),
        {"config": Config(backward=BackwardConfig(2, 64, (1, 1), 1, p_before_dp=True, statistics_last=True))},
    ),
}


def _by_gradient(**tiles):
    config = Config(backward=BackwardConfig(2, 64, by_gradient=True, **tiles))
    return {"config": config, "deterministic_gradients": True}


# A warpgroup for each of dV and dK: what is chosen past 128, and what may be named where it costs less to interpret.
BY_GRADIENT = {
    "full, head dim 256": (dataclasses.replace(BASE, T=136, S=200, H=256, Hv=256), {}),
    "a soft cap and a window, head dim 192": (
        dataclasses.replace(BASE, T=136, S=200, H=192, Hv=192, mask="window_causal", score="soft_cap"),
        {},
    ),
    "Hv past H, segments, a soft cap, grouped heads": (
        dataclasses.replace(BASE, T=136, S=200, N=4, K=2, H=72, Hv=192, mask="segments", score="soft_cap"),
        {},
    ),
    "a dense mask, float16": (
        dataclasses.replace(BASE, T=136, S=200, H=200, Hv=136, mask="dense", dtype="float16"),
        {},
    ),
    "lengths, empty rows": (
        dataclasses.replace(BASE, T=130, S=200, batch=(2,), mask="lengths"),
        _by_gradient(statistics_last=True),
    ),
    "one tile of output gradients, lengths": (
        dataclasses.replace(BASE, T=200, S=200, batch=(2,), mask="lengths"),
        _by_gradient(stages=(2, 1), statistics_last=True),
    ),
    "one stage, lengths": (
        dataclasses.replace(BASE, T=200, S=200, batch=(2,), mask="lengths"),
        _by_gradient(stages=(1, 1)),
    ),
    "one stage, a dense mask": (dataclasses.replace(BASE, T=200, S=200, mask="dense"), _by_gradient(stages=(1, 1))),
    "several blocks": (
        dataclasses.replace(BASE, T=200, S=200, N=2, K=2, batch=(2,), mask="causal"),
        _by_gradient(persistent_ctas=3),
    ),
    "several blocks by tickets": (
        dataclasses.replace(BASE, T=200, S=200, N=2, K=2, batch=(2,), mask="causal"),
        _by_gradient(persistent_ctas=3, by_tickets=True),
    ),
    "heads in parts": (
        dataclasses.replace(BASE, T=136, S=200, N=4, mask="causal"),
        _by_gradient(head_parts=2),
    ),
    "128 queries": (
        dataclasses.replace(BASE, T=300, S=200, mask="causal"),
        {
            "config": Config(backward=BackwardConfig(2, 128, by_gradient=True)),
            "deterministic_gradients": True,
        },
    ),
    "a block mask": (dataclasses.replace(BASE, T=300, S=300, mask="blocks"), _by_gradient()),
}


def _head_parts(parts, tiles=None, deterministic=False, **case):
    config = Config(backward=BackwardConfig(head_parts=parts, **(tiles or {})))
    case = dataclasses.replace(BASE, **dict(T=136, S=200, N=4, K=1, H=64, Hv=64) | case)
    return case, {"config": config, "deterministic_gradients": deterministic}


# The query heads of a key head are in parts.
HEAD_PARTS = {
    "causal": _head_parts(2, mask="causal"),
    "lengths, a part for each": _head_parts(4, mask="lengths", batch=(2,)),
    "several key heads": _head_parts(2, N=8, K=2, H=96, Hv=80, mask="window_causal"),
    "one part": _head_parts(1, H=128, Hv=96, mask="causal"),
    "one part, documents, dropout": _head_parts(1, mask="segments", score="soft_cap", dropout=0.3),
    "tile after tile": _head_parts(2, dict(by_tile=True, l2_head_group=1), N=8, mask="causal"),
    "deterministic, dropout, scores": _head_parts(2, deterministic=True, mask="causal", score="bias", dropout=0.3),
    "head dim 192, float16": _head_parts(
        4, dict(stages=(2, 1), p_before_dp=True), H=192, Hv=128, mask="segments", dtype="float16"
    ),
    "shared columns": _head_parts(2, dict(stages=(1, 1), chunk_slots=4), H=320, Hv=128, mask="causal"),
    "float32": _head_parts(2, dict(compute_wgs=1, stages=(1, 1), ds_stages=1), mask="causal", dtype="float32"),
}


def problem_of(case, keywords, qkv=None):
    inputs = case.inputs()
    return normalise(*(qkv or inputs.qkv), **inputs.keywords(inputs.arrays), **keywords)


def interpreted(problem, operands, out, lse, d_out, d_lse, gpu=GPU, backward=backward):
    """The gradients, and whether races were found."""
    run = lambda residuals, *cotangents: backward(problem, residuals, *cotangents, gpu, interpret=True)
    return interpreter.interpreted(run, Residuals(operands, out, lse), d_out, d_lse)


def residuals_of(case, problem, operands):
    """(out, lse, d_out, d_lse)"""
    inputs = case.inputs()
    out, lse = jax.jit(functools.partial(xla.forward, problem))(operands)
    return out, lse, jnp.asarray(inputs.d_out), jnp.asarray(inputs.d_lse)


def xla_gradients(problem, operands, out, lse, d_out, d_lse):
    return jax.jit(functools.partial(xla.backward, problem))(Residuals(operands, out, lse), d_out, d_lse)


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def is_right_and_free_of_races(case, keywords, backward=backward, why_no_backward=why_no_backward):
    problem, operands = problem_of(case, keywords)
    residuals = residuals_of(case, problem, operands)
    assert why_no_backward(problem, GPU) is None
    gradients, races = interpreted(problem, operands, *residuals, backward=backward)
    assert not races
    exact = dataclasses.replace(problem, dtype=np.dtype(np.float32), precision=jax.lax.Precision.HIGHEST, config=None)
    truth = xla_gradients(exact, as_float32(operands), *as_float32(residuals))
    for ours, true, like in zip(gradients, truth, operands.differentiable, strict=True):
        assert ours.shape == like.shape
        assert ours.dtype == like.dtype
        error = np.linalg.norm(np.asarray(ours, np.float32) - true) / (np.linalg.norm(true) + 1e-20)
        # A rounding of p or dS and one of the result, to bfloat16; sums over all of T x S cancel.
        assert error < (4e-3 if ours.size > 1000 else 2e-2)
