"""Fixtures and settings of all tests."""

import gc
import os

# XLA runs the warpgroups of an interpreted kernel on its thread pool; with fewer threads than warpgroups they would wait
# for one another for ever. Set before JAX starts.
os.environ["NPROC"] = "16"
# Eight CPU devices, for the tests of sharding; the others use the first.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import numpy as np
import pytest

# Where a partitioned function is inlined, XLA of jaxlib 0.11.2 may follow the stack frames of its operations in a circle,
# for ever (docs/sharding.md). It depends on the lines of the callers; without frames there is no circle.
jax.config.update("jax_traceback_in_locations_limit", 0)

# No deadlines: the first call of a shape compiles. Deterministic: what CI saw can be seen again.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items):
    from tests import layers

    layers.thin(items)
    # What is imported and collected stays to the end: the garbage collector, some 8% of the time, need not look at it.
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture
def small_chunks(monkeypatch):
    """xla works in chunks of 64 x 64, so that small cases have several, the last ones overlapping."""
    from pallas_fa.backends.xla import chunks, plan

    monkeypatch.setattr(chunks, "_CHUNK_LOGITS", 1)
    monkeypatch.setattr(plan, "all_at_once", lambda problem, *, backward=False: False)


@pytest.fixture(scope="module")
def quick_compilation():
    """XLA compiles in about half the time; the results are the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """What one run of the training program compiled, the next reads; in other processes too."""
    from tests import training

    with training.compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def check(record_property):
    """Asserts that an implementation is accurate on a case, and records by how much."""
    from tests import accuracy

    def check(case, implementation, gradients, **options):
        found = accuracy.errors(case, implementation, gradients, **options)
        _check_errors(found, "backward" if gradients else "forward", record_property)

    return check


@pytest.fixture
def check_tangents(record_property):
    """Asserts that the tangents of an implementation are accurate on a case, and records by how much."""
    from tests import accuracy

    def check(case, implementation):
        _check_errors(accuracy.tangent_errors(case, implementation), "tangents", record_property)

    return check


def _check_errors(found, kind, record_property):
    for e in found:
        key = f"{e.implementation or 'default'} {kind} {e.case.dtype}"
        record_property(f"error {key}", (e.result, e.max, e.max_limit, e.mean, e.mean_limit))
    wrong = [str(e) for e in found if not (e.max <= e.max_limit and e.mean <= e.mean_limit)]
    assert not wrong, "\n".join(wrong)


def pytest_terminal_summary(terminalreporter):
    """Of what the accuracy tests saw, the errors that came nearest to their limits."""
    seen = {}
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for key, value in report.user_properties:
            if key.startswith("error "):
                seen.setdefault(key.removeprefix("error "), []).append(value)
    if seen:
        terminalreporter.section(
            "errors nearest to their limits, relative to the largest element of the truth", sep="-"
        )
    for key, values in sorted(seen.items()):
        name, error, limit = max(((v[0], v[1], v[2]) for v in values), key=lambda v: v[1] / v[2])
        mean_name, mean, mean_limit = max(((v[0], v[3], v[4]) for v in values), key=lambda v: v[1] / v[2])
        terminalreporter.write_line(
            f"{key:27} max {error:.1e} of {limit:.1e} ({name}), mean {mean:.1e} of {mean_limit:.1e} ({mean_name}),"
            f" {len(values)} results"
        )
