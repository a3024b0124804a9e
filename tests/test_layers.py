"""What `make test` leaves out is there, and `make test-full` runs it."""

import pathlib

import pytest

from tests import cases, layers


@pytest.mark.parametrize("name", layers.THINNED)
def test_a_thinned_test_exists(name):
    file, function = name.split("::")
    assert f"def {function}(" in (pathlib.Path(__file__).parent / file).read_text()


def test_representatives_have_every_value_of_every_factor():
    few = layers.representatives(cases.TABLE)
    assert len(few) < len(cases.TABLE) / 3
    for factor in ("mask", "score", "dtype", "batch", "T", "S", "N", "K", "H", "Hv", "sinks", "dropout"):
        assert {getattr(c, factor) for c in few} == {getattr(c, factor) for c in cases.TABLE}, factor
