"""How JAX's GPU interpreter shows that a kernel lacks a wait."""

import re
from collections.abc import Callable

import jax

# Its words for a barrier that ran ahead of a thread.
AHEAD = re.compile("no threads observed phase|barrier is already at phase|missed observing phase")


def assert_seen(interpreted: Callable) -> None:
    """Asserts that `interpreted`, which returns results and whether races were found, shows a missing wait.

    By a race, or by an error where a barrier runs ahead of a thread: which comes first depends on the threads' pace.
    """
    try:
        _, races = interpreted()
    except jax.errors.JaxRuntimeError as error:
        assert AHEAD.search(str(error)), error
    else:
        assert races
