"""The blocks that kernels visit: all that the mask's ranges touch, and as full no more than lies inside them."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa.backends.gpu.schedule import visits


@st.composite
def ranges(draw):
    """(visited, full, size, block), `full` inside `visited`, or empty anywhere; both may reach past the ends."""
    size, block = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    bound = st.integers(-5, size + 5)
    lo, full_lo, full_hi, hi = sorted(draw(st.lists(bound, min_size=4, max_size=4)))
    empty = draw(bound)
    return (lo, hi), draw(st.sampled_from(((full_lo, full_hi), (empty, empty), (full_hi, full_lo)))), size, block


@pytest.mark.parametrize("at_least", (0, 1))
@hypothesis.given(ranges())
@hypothesis.settings(max_examples=100)
def test_blocks_of_ranges(at_least, given):
    (lo, hi), (full_lo, full_hi), size, block = given
    starts = np.arange(0, size, block)
    ends = np.minimum(starts + block, size)
    found = visits((lo, hi), (full_lo, full_hi), size, block, at_least)
    assert 0 <= found.first <= found.full_first <= found.full_last <= found.last <= len(starts)
    assert found.last - found.first >= at_least
    here = np.arange(len(starts))
    touched = (ends > max(lo, 0)) & (starts < min(hi, size)) & (hi > lo)
    visited = (here >= found.first) & (here < found.last)
    if touched.any():
        np.testing.assert_array_equal(visited, touched)
    assert visited.sum() <= max(touched.sum(), 1)
    is_full = (here >= found.full_first) & (here < found.full_last)
    # A ragged last block is none of the full ones, as its tail is not allowed.
    np.testing.assert_array_equal(is_full, (starts >= full_lo) & (starts + block <= min(full_hi, size)))
    traced = visits(*((jnp.int32(a), jnp.int32(b)) for a, b in ((lo, hi), (full_lo, full_hi))), size, block, at_least)
    assert tuple(map(int, traced)) == found
