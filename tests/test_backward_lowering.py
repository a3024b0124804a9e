"""The backward kernels lower for CUDA on any machine: every mask, score, head dim, length and tile configuration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import masks, scores
from pallas_fa.backends.gpu.shared_memory import fits
from pallas_fa.backends.hopper.backward.backward import backward, why_no_backward
from pallas_fa.backends.hopper.backward.choose import choose
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.backward.scratch import on_gpu
from pallas_fa.backends.hopper.backward.table import BackwardFacts, backward_configs
from pallas_fa.backends.hopper.config import BackwardConfig, Config
from pallas_fa.problem import Residuals, normalise
from tests import cases
from tests.cases import Case
from tests.interpreted_backward import GPU, problem_of
from tests.lowering import kernels


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
    ("H", "Hv", "count", "with_gradient_of_bias"),
    [
        *((H, Hv, 1, 1) for H, Hv in ((8, 8), (72, 72), (128, 128), (64, 128), (128, 64))),
        *((H, Hv, 2, 3) for H, Hv in ((192, 128), (256, 256), (136, 24))),
    ],
)
def test_every_head_dim_lowers(H, Hv, count, with_gradient_of_bias):
    assert lower_backward(dataclasses.replace(LOWERED, mask="causal", H=H, Hv=Hv)) == count
    assert lower_backward(dataclasses.replace(LOWERED, mask="dense", score="bias", H=H, Hv=Hv)) == with_gradient_of_bias


def test_head_dim_192_takes_one_pass_or_two_where_their_tiles_fit():
    case = dataclasses.replace(LOWERED, S=304, mask="causal", H=192, Hv=128)
    for mask in ("causal", "full", "segments", "dense", "lengths"):
        assert lower_backward(dataclasses.replace(case, mask=mask)) == 1
    assert lower_backward(dataclasses.replace(case, score="soft_cap")) == 2, "dS needs the logits themselves"
    assert lower_backward(dataclasses.replace(case, dropout=0.1)) == 2
    blocks, lengths = dataclasses.replace(case, mask="blocks"), np.array([100, 304], np.int32)
    assert lower_backward(blocks) == 1
    assert lower_backward(blocks, key_value_seq_lengths=lengths) == 2, "padding is tested by elements there"
    assert lower_backward(dataclasses.replace(case, mask="dense", score="bias")) == 2
    assert lower_backward(dataclasses.replace(case, mask="dense", score="everything")) == 3
    assert lower_backward(case, deterministic_gradients=True) == 2


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
@pytest.mark.parametrize(
    ("H", "masked", "dtype"),
    [(64, False, "bfloat16"), (128, True, "bfloat16"), (64, True, "float32"), (128, False, "float32")],
)
def test_every_config_lowers(gives, H, dtype, masked):
    deterministic = gives != ("dk", "dv", "dq")
    flags = dict(masked=masked, visit_table=masked, tests_arrays=masked, split=dtype == "float32")
    for config in backward_configs(BackwardFacts(gives, H, H, H, 4096, 4096, 10_000, group=1, **flags), GPU):
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


def test_head_parts_lower_where_they_divide_the_query_heads():
    case = dataclasses.replace(LOWERED, N=8, K=2, H=128, Hv=128, mask="causal")
    assert lower_backward(case, config=Config(backward=BackwardConfig(head_parts=4))) == 1
    with pytest.raises(NotImplementedError, match="head_parts=3 of config= does not divide the 4 query heads"):
        lower_backward(case, config=Config(backward=BackwardConfig(head_parts=3)))
    with pytest.raises(ValueError, match="head_parts=0 must be at least 1"):
        BackwardConfig(head_parts=0)


def test_deterministic_gradients_take_passes_without_additions():
    assert lower_backward(dataclasses.replace(LOWERED, mask="causal"), deterministic_gradients=True) == 2
    with pytest.raises(NotImplementedError, match="in no fixed order"):
        lower_backward(dataclasses.replace(LOWERED, score="bias_shared"), deterministic_gradients=True)


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
