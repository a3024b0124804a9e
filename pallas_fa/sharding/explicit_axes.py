"""Arrays sharded over explicit mesh axes, whose types say how: inside, attention leaves the partitioning to the compiler.

Batch entries and heads are then computed where they lie, as on automatic mesh axes. What comes out is sharded as the
queries are.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_fa.operands.pytree import arrays_of


def run(attend: Callable[..., Any], arguments: dict[str, Any], **rest: Any) -> Any:
    """`attend(**arguments, **rest)`, whose results (out, lse) are [*B, T, N, Hv] and [*B, T, N]."""
    query = arguments["query"]
    if not isinstance(query, jax.Array) or AxisType.Explicit not in jax.typeof(query).sharding.mesh.axis_types:
        return attend(**arguments, **rest)
    arrays, rebuild = arrays_of(arguments)
    sharding = jax.typeof(query).sharding
    out, lse = (NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], *last)) for last in ((None,), ()))

    def automatic(*arrays):
        return attend(**rebuild(arrays), **rest)

    return jax.sharding.auto_axes(automatic, out_sharding=(out, lse))(*arrays)
