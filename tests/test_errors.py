"""Bad input: each error has the right type and says which argument, its value, the rule and the remedy.

All calls here are traced with shapes only, so that an error is known to come before anything is computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks
from tests.case_errors import BAD, GOOD, B, H, N, S, T, bools, check, ints, shape


def call(arguments):
    """The call with these arguments replaced, traced. ShapeDtypeStructs become tracers, all else stays what it is."""
    arguments = {**GOOD, **arguments}
    abstract = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rest = {name: x for name, x in arguments.items() if name not in abstract}
    return jax.eval_shape(lambda a: pallas_fa.dot_product_attention(**a, **rest), abstract)


_SMOKE = ("heads not a multiple", "mask not broadcastable", "only key segment ids", "negative window")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.smoke) if x in _SMOKE else x for x in BAD])
def test_bad_input(name):
    arguments, kind, says = BAD[name]
    with pytest.raises(kind) as error:
        call(arguments)
    check(error, kind, says)


@pytest.mark.parametrize(
    "name", ("heads not a multiple", "integer query", "only query segment ids", "float mask", "segment ids of 64 bits")
)
def test_explain_raises_the_same(name):
    arguments, kind, says = BAD[name]
    with pytest.raises(kind) as error:
        pallas_fa.explain(**{**GOOD, **arguments})
    check(error, kind, says)


def test_good_input_is_not_refused():
    """The call that all of these vary is a good one, and so are the borders of what is refused."""
    assert call({}).shape == (B, T, N, H)
    for arguments in (
        {"local_window_size": (0, 0)},
        {"local_window_size": np.int64(3)},
        {"local_window_size": (None, None)},
        {"local_window_size": (3.0, 2)},
        {"local_window_size": ints()},
        {"local_window_size": (np.ones(B, int), np.ones((B, N, 1, 1), int))},
        {"logits_soft_cap": 1e-3},
        {"logits_soft_cap": 30},
        {"scale": 0},
        {"scale": 1e-50},
        {"logits_soft_cap": 1e30},
        {"logits_soft_cap": 1e-30},
        {"local_window_size": 10**400},
        {"mask": masks.Causal(offset=-(10**400))},
        {"return_residual": None},
        {"return_residual": np.False_},
        {"is_causal": None},
        {"scale": ints()},
        {"query_segment_ids": np.full((B, T), 3), "key_value_segment_ids": shape(B, S, dtype=jnp.uint8)},
        {"query_seq_lengths": [3, 2**40]},
        {"scale": -1.0},
        {"scale": np.float32(0.5)},
        {"is_causal": np.True_},
        {"query_seq_lengths": [3, 4], "key_value_seq_lengths": shape(B, dtype=jnp.uint8)},
        {"precision": ("default", "highest")},
        {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32},
        {"mask": bools(), "bias": shape()},
        {"implementation": ("xla", "reference")},
    ):
        assert call(arguments).shape == (B, T, N, H), arguments
