"""The page of support says what the backends' records say."""

from tests import support_matrix


def test_the_page_holds_the_matrix_of_today():
    """If this fails: python -m tests.support_matrix."""
    assert support_matrix.PAGE.read_text() == support_matrix.page_with(support_matrix.matrix())


def test_the_matrix_has_both_answers():
    rows = support_matrix.matrix().splitlines()
    assert any("| no (" in row for row in rows) and any("gradients on xla (" in row for row in rows)
