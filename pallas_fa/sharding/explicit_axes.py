"""Runs attention on arrays that are sharded over explicit mesh axes, by making these axes automatic inside.

Each device then computes the batch entries and heads it holds, as on automatic mesh axes. The outputs are sharded like
the queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_fa.operands.pytree import arrays_of


def with_automatic_axes[**P](attend: Callable[P, tuple[Any, Any]]) -> Callable[P, tuple[Any, Any]]:
    """Wraps `attend(query, ...)`, which returns out (as the query) and lse [*B, T, N], to see automatic mesh axes only."""

    @functools.wraps(attend)
    def run(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        query: Any = args[0]
        if not isinstance(query, jax.Array) or AxisType.Explicit not in jax.typeof(query).sharding.mesh.axis_types:
            return attend(*args, **kwargs)
        arrays, rebuild = arrays_of((args, kwargs))
        sharding: Any = jax.typeof(query).sharding
        *batch, first, second, _ = sharding.spec
        rows = (first, second) if kwargs.get("layout") != "BNTH" else (second, first)
        specs = (*batch, first, second, None), (*batch, *rows)
        out, lse = (NamedSharding(sharding.mesh, PartitionSpec(*spec)) for spec in specs)

        def automatic(*arrays: Any) -> Any:
            args, kwargs = rebuild(arrays)
            return attend(*args, **kwargs)  # pyright: ignore[reportCallIssue]

        in_automatic: Any = jax.sharding.auto_axes(automatic, out_sharding=(out, lse))
        return in_automatic(*arrays)

    return run


def keeping_shardings[**P, T](change: Callable[P, T]) -> Callable[P, T]:
    """Wraps `change(tree, ...)`, which returns the same tree with other values, to see automatic mesh axes only."""

    @functools.wraps(change)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        shardings: Any = jax.tree.map(lambda x: jax.typeof(x).sharding, args[0])
        if not any(AxisType.Explicit in x.mesh.axis_types for x in jax.tree.leaves(shardings)):
            return change(*args, **kwargs)
        in_automatic: Any = jax.sharding.auto_axes(change, out_sharding=shardings)
        return in_automatic(*args, **kwargs)

    return run
