"""The table of cases: out, log-sum-exp and every gradient of every implementation against float64 truth."""

import pytest

from tests import accuracy, layers


@pytest.mark.parametrize("case", layers.of_table())
def test_table(case, check, small_chunks):
    check(case, "xla", gradients=True)
    # JAX differentiates the reference. In 16 bits it casts to float32 first, so that its gradients are those of float32.
    check(case, "reference", gradients=case.dtype in accuracy.RELATIVE)
