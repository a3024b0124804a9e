"""The blocks that kernels visit: all that the mask's ranges touch, and as full no more than lies inside them."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import masks
from pallas_fa.backends.gpu.few_queries import as_kernel_sees
from pallas_fa.backends.gpu.grouped_rows import of_operands
from pallas_fa.backends.gpu.schedule import visits, visits_of_blocks
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.problem import normalise


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


@st.composite
def masks_of_scalars(draw):
    """A mask whose arrays have one value for each of two sequences, of 3 queries and 40 keys."""
    ints = lambda lo, hi: np.array(draw(st.lists(st.integers(lo, hi), min_size=2, max_size=2)), np.int32)
    side = lambda: draw(st.sampled_from((None, 5, ints(0, 40))))
    align = draw(st.sampled_from(("top_left", "bottom_right")))
    window = masks.Window(side(), side(), ints(-50, 50), align)
    found = draw(st.sampled_from((window, masks.Causal(align, ints(-50, 50)) & window, masks.Causal(align) | window)))
    return found & masks.Lengths(draw(st.sampled_from((None, ints(-1, 5)))), ints(-1, 45))


@hypothesis.given(masks_of_scalars())
@hypothesis.settings(max_examples=30, deadline=None)
def test_visits_of_scalars_are_those_of_a_table(mask):
    """What a kernel computes from the scalars of a sequence is what the table has for it, for rows of two heads as well."""
    x = jnp.zeros((2, 40, 2, 8), jnp.bfloat16)
    problem, operands = normalise(jnp.zeros((2, 3, 4, 8), jnp.bfloat16), x, x, mask=mask)
    plan = ForwardPlan(as_kernel_sees(problem), ForwardConfig(1, 64))
    assert plan.scalar_visits and not plan.visit_table
    of_rows = of_operands(problem, operands).mask
    table = visits_of_blocks(operands.mask.kv_range, operands.mask.full_kv_range, 3, 3, 40, 8)
    for b in range(2):
        of_sequence = jax.tree.map(lambda x, b=b: x[b if x.shape[0] > 1 else 0, 0, 0, 0], of_rows)
        found = visits(of_sequence.kv_range(0, 6), of_sequence.full_kv_range(0, 6), 40, 8)
        expected = [np.broadcast_to(x, (2, 1, 1))[b, 0, 0] for x in table]
        assert [int(x) for x in found] == expected
