"""Arrays sharded over explicit mesh axes, whose types say how: inside, attention leaves the partitioning to the compiler.

Batch entries and heads are then computed where they lie, as on automatic mesh axes. What comes out is sharded as the
queries are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_fa.operands.pytree import arrays_of


def made_automatic[**P](attend: Callable[P, tuple[Any, Any]]) -> Callable[P, tuple[Any, Any]]:
    """`attend(query, ...)` -> (out [*B, T, N, Hv], lse [*B, T, N]), with explicit axes made automatic inside."""

    @functools.wraps(attend)
    def run(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        query: Any = args[0]
        if not isinstance(query, jax.Array) or AxisType.Explicit not in jax.typeof(query).sharding.mesh.axis_types:
            return attend(*args, **kwargs)
        arrays, rebuild = arrays_of((args, kwargs))
        sharding: Any = jax.typeof(query).sharding
        out, lse = (NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], *last)) for last in ((None,), ()))

        def automatic(*arrays: Any) -> Any:
            args, kwargs = rebuild(arrays)
            return attend(*args, **kwargs)  # pyright: ignore[reportCallIssue]

        in_automatic: Any = jax.sharding.auto_axes(automatic, out_sharding=(out, lse))
        return in_automatic(*arrays)

    return run
