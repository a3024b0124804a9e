"""A part of a mask, moved to a part of the problem, allows what the whole mask does there."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from pallas_fa.masks import Causal, Custom, Lengths
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands.part import Part
from tests.mask_properties import B, N, allowed, array_masks, bind, check_ranges, masks_and_sizes, static_masks


def moved(mask, part):
    return part.cut(mask).moved(part)


@hypothesis.given(masks_and_sizes(lambda T, S: static_masks(T, S) | array_masks(T, S)), st.data())
@hypothesis.settings(max_examples=75)
def test_a_part_of_a_mask_is_the_mask_of_the_part(mask_and_size, data):
    """And its ranges hold, with the start of the part known while tracing or not."""
    mask, T, S = mask_and_size
    mask = bind(mask, T, S)
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in (B, N, T, S))
    sizes = tuple(data.draw(st.integers(1, size - start)) for size, start in zip((B, N, T, S), starts, strict=True))
    want = allowed(mask, T, S)[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
    for start in (starts, tuple(map(jnp.int32, starts))):
        got = moved(mask, Part(start, sizes))
        np.testing.assert_array_equal(allowed(got, *sizes[2:], *sizes[:2]), want)
        if sizes[:2] == (B, N):
            check_ranges(got, *sizes[2:], 4, fit=False)


def test_a_part_of_a_custom_mask_keeps_its_indices():
    mask = bind(Custom(lambda b, n, t, s, x: (b + 2 * n + t + s) % 3 == x, np.arange(9) % 3), 12, 9)
    part = Part((1, 1, 3, 2), (1, 1, 5, 7))
    want = allowed(mask, 12, 9)[1:, 1:, 3:8, 2:]
    np.testing.assert_array_equal(allowed(moved(mask, part), 5, 7, 1, 1), want)


def test_a_part_has_lengths_of_its_own():
    """They are still found: padding in a part may hold NaN, too."""
    mask = bind(Lengths(np.array([5, 9]), np.array([2, 8])) & Causal(), 12, 9)
    found = lengths_of(moved(mask, Part((0, 0, 6, 3), (2, N, 6, 5))))
    np.testing.assert_array_equal(np.ravel(found.q_lengths), [0, 3])
    np.testing.assert_array_equal(np.ravel(found.kv_lengths), [0, 5])
