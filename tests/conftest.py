"""Fixtures and settings of all tests."""

import hypothesis
import numpy as np
import pytest

# No deadlines: the first call of a shape compiles. Deterministic: what CI saw can be seen again.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")


@pytest.fixture
def small_chunks(monkeypatch):
    """xla works in chunks of 64 x 64, so that small cases have several, the last ones overlapping."""
    from pallas_fa import xla

    monkeypatch.setattr(xla, "_CHUNK_LOGITS", 1)


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def check(record_property):
    """Asserts that an implementation is accurate on a case, and records by how much."""
    from tests import accuracy

    def check(case, implementation, gradients):
        found = accuracy.errors(case, implementation, gradients)
        for e in found:
            direction = "backward" if gradients else "forward"
            key = f"error {implementation or 'default'} {direction} {case.dtype} {e.result}"
            record_property(key, (e.max, e.max_limit, e.mean, e.mean_limit))
        wrong = [str(e) for e in found if not (e.max <= e.max_limit and e.mean <= e.mean_limit)]
        assert not wrong, "\n".join(wrong)

    return check


def pytest_terminal_summary(terminalreporter):
    """The largest errors that the accuracy tests saw, by dtype and result, beside the limits of those cases."""
    worst = {}
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for key, value in report.user_properties:
            if key.startswith("error "):
                worst.setdefault(key, []).append(value)
    if worst:
        terminalreporter.section("largest errors, relative to the largest element of float64 truth", sep="-")
        for key, values in sorted(worst.items()):
            maxima, means = ([value[i : i + 2] for value in values] for i in (0, 2))
            (a, a_limit), (m, m_limit) = (max(pairs, key=lambda pair: pair[0] / pair[1]) for pairs in (maxima, means))
            terminalreporter.write_line(
                f"{key.removeprefix('error '):42} max {a:.1e} of {a_limit:.1e} allowed, mean {m:.1e} of {m_limit:.1e},"
                f" {len(values)} cases"
            )
