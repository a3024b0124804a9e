"""The placements of a sequence on a ring of devices: zigzag, there and back, and the balance that it gives."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_fa.context_parallel import from_zigzag, placement, to_zigzag
from tests.context_parallel_calls import T


@pytest.mark.parametrize("size", (2, 4, 8))
def test_zigzag_balances_causal_masks(size):
    """In every hop each device computes as many pairs of blocks as any other: three in the first, then two."""
    block = T // (2 * size)
    for hop in range(size):
        needed = [
            sum(
                q_start >= kv_start
                for q_start in placement.starts("zigzag", device, size, block)
                for kv_start in placement.starts("zigzag", (device - hop) % size, size, block)
            )
            for device in range(size)
        ]
        assert needed == [2 if hop else 3] * size


@pytest.mark.parametrize("axis", (0, -2))
def test_zigzag_and_back(axis):
    x = np.arange(24).reshape(12, 2)
    zigzag = to_zigzag(x, axis, 3)
    np.testing.assert_array_equal(zigzag[:, 0] // 4, [0, 0, 5, 5, 1, 1, 4, 4, 2, 2, 3, 3])
    np.testing.assert_array_equal(from_zigzag(zigzag, axis, 3), x)


@pytest.mark.parametrize("jitted", (False, True))
def test_explicit_axes_stay(jitted):
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Explicit,) * 2)
    x = np.arange(64).reshape(2, 16, 2)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "ring")))
    permuted = lambda x: to_zigzag(x, 1, 4)
    zigzag = (jax.jit(permuted) if jitted else permuted)(sharded)
    assert jax.typeof(zigzag).sharding.spec == jax.typeof(sharded).sharding.spec
    np.testing.assert_array_equal(zigzag, to_zigzag(x, 1, 4))
    np.testing.assert_array_equal(from_zigzag(zigzag, 1, 4), x)


@pytest.mark.parametrize("permute", (to_zigzag, from_zigzag))
@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ((np.zeros((1, 12)), 1, 4), "size 12, not a multiple of 2 \\* ring_size = 8"),
        ((np.zeros(12), 0, 2.0), "ring_size=2.0 must be an int of at least 1"),
        ((np.zeros(12), 0, 0), "ring_size=0 must be an int of at least 1"),
        ((np.zeros(12), 0, "2"), "ring_size='2' must be an int of at least 1"),
        ((np.zeros(12), None, 2), r"axis=None is not an axis of an array of shape \(12,\)"),
        ((np.zeros(12), 1, 2), r"axis=1 is not an axis of an array of shape \(12,\)"),
        ((None, 0, 2), "x=None is a NoneType; it must be an array"),
    ),
)
def test_what_has_no_zigzag(permute, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        permute(*arguments)
