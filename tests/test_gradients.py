import pytest

from tests import cases
from tests.cases import TABLE, Case

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_table(case, check):
    check(case, "xla", gradients=True)

@pytest.mark.parametrize("case", TABLE, ids=str)
def test_table_reference(case, check):
    check(case, "reference", gradients=True)
