"""Runs attention on arrays that are sharded over explicit mesh axes, by making these axes automatic inside.

Each device then computes the batch entries and heads it holds, as on automatic mesh axes. The outputs are sharded like
the queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pallas_fa.operands.automatic_axes import explicit_sharding, on_automatic_axes


def with_automatic_axes[**P](attend: Callable[P, tuple[Any, Any]]) -> Callable[P, tuple[Any, Any]]:
    """Wraps `attend(query, ...)`, which returns out (as the query) and lse [*B, T, N], to see automatic mesh axes only."""

    @functools.wraps(attend)
    def run(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        sharding = explicit_sharding(args[0])
        if sharding is None:
            return attend(*args, **kwargs)
        *batch, first, second, _ = sharding.spec
        rows = (first, second) if kwargs.get("layout") != "BNTH" else (second, first)
        specs = PartitionSpec(*batch, first, second, None), PartitionSpec(*batch, *rows)
        on_all = lambda args, kwargs: attend(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return on_automatic_axes(sharding.mesh, specs, on_all, args, kwargs)

    return run


def keeping_shardings[**P, T](change: Callable[P, T]) -> Callable[P, T]:
    """Wraps `change(tree, ...)`, which returns the same tree with other values, to see automatic mesh axes only."""

    @functools.wraps(change)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if explicit_sharding(*jax.tree.leaves(args[0])) is None:
            return change(*args, **kwargs)
        shardings: Any = jax.tree.map(lambda x: jax.typeof(x).sharding, args[0])
        in_automatic: Any = jax.sharding.auto_axes(change, out_sharding=shardings)
        return in_automatic(*args, **kwargs)

    return run
