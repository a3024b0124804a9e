"""Calls under JAX's strict modes, which users turn on to find mistakes of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from tests.lowering import kernels

MODES = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "NaN": lambda: jax.debug_nans(True),
    "leaks": lambda: jax.checking_leaks(),
    "no jit": lambda: jax.disable_jit(),
    "64 bits": lambda: jax.enable_x64(True),
}
LENGTHS = np.array([5, 8], np.int32)
IDS = np.repeat(np.arange(2, dtype=np.int32), 8)[None].repeat(2, axis=0)
BIAS = np.linspace(-1, 1, 4 * 16 * 16, dtype=np.float32).reshape(4, 16, 16)
CALLS = {
    "causal": {"is_causal": True},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "offsets": {"mask": masks.Causal(offset=LENGTHS) & masks.Window(3, 2, offset=LENGTHS)},
    "bottom right": {"mask": masks.Causal(align="bottom_right"), "key_value_seq_lengths": LENGTHS},
    "documents": {"is_causal": True, "query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "window or prefix": {"mask": masks.Window(3, 0) | masks.Lengths(kv_lengths=LENGTHS)},
    "lengths of one side": {
        "is_causal": True,
        "query_seq_lengths": LENGTHS,
        "mask": masks.Window(LENGTHS, None) | masks.Window(None, LENGTHS),
        "score": scores.RelativeBias(lambda offset: jnp.cos(offset), align="bottom_right"),
    },
    "blocks": {"mask": masks.BlockMask(np.tri(4, dtype=np.bool_), 4), "key_value_seq_lengths": LENGTHS},
    "bias": {"bias": BIAS, "logits_soft_cap": 20.0},
    "relative bias": {"score": scores.RelativeBias(np.linspace(-1, 1, 4 * 31, dtype=np.float32).reshape(4, 31))},
    "ALiBi": {"score": scores.Alibi(np.float32([0.5, 0.25, 0.125, 0.0625]), offset=LENGTHS)},
}


def tokens(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 4, 8)), dtype)


def with_gradient(x, **keywords):
    loss = lambda x: jnp.sum(pallas_fa.dot_product_attention(x, x, x, **keywords))
    return jax.value_and_grad(loss)(x)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_does_the_same(mode, call, small_chunks):
    x = tokens()
    expected = with_gradient(x, **CALLS[call])
    for implementation in ("xla", "reference"):
        with MODES[mode]():
            found = with_gradient(x, implementation=implementation, **CALLS[call])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_kernels_lower():
    """Under both rules of promotion at once. Not while checking leaks: Pallas's own run_state holds its tracers."""
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    mask = masks.Window(3, 2, offset=LENGTHS) & masks.Causal(offset=LENGTHS) | masks.Causal(align="bottom_right")
    mask |= masks.Window(LENGTHS, None)
    lengths = {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
    with MODES["rank promotion"](), MODES["dtype promotion"]():
        assert kernels(lambda x: with_gradient(x, mask=mask, **lengths), x) == 2
