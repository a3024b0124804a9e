"""Runs a function on arrays that are sharded over explicit mesh axes, by making these axes automatic inside.

What it computes is then sharded as on automatic mesh axes; JAX's rules of explicit ones would refuse many operations,
such as gathers.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_fa.operands.pytree import arrays_of


def explicit_sharding(*arrays: Any) -> NamedSharding | None:
    """Returns the sharding of the first of `arrays` that is on a mesh with explicit axes; None if there is none.

    Also None inside of a jax.shard_map over other axes, where JAX makes none automatic; raises NotImplementedError there if
    one of `arrays` is sharded over explicit axes.
    """
    shardings: Any = (jax.typeof(x).sharding for x in arrays if isinstance(x, jax.Array))
    explicit = [x for x in shardings if AxisType.Explicit in x.mesh.axis_types]
    if not explicit or AxisType.Manual not in explicit[0].mesh.axis_types:
        return explicit[0] if explicit else None
    if axes := [axis for x in explicit for axis in x.spec if axis is not None]:
        raise NotImplementedError(
            f"an array is sharded over the explicit mesh axes {axes} inside of a jax.shard_map over other axes. Make them"
            " manual too (name them in its axis_names and in_specs), or make the mesh with jax.sharding.AxisType.Auto for"
            " these axes."
        )
    return None


def on_automatic_axes(mesh: Any, out_specs: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns fn(*args), with the explicit axes of `mesh` automatic inside.

    Args:
      mesh: of the arrays in `args`.
      out_specs: a tree of PartitionSpecs: how the results are sharded.
      fn: the function.
      args: trees of arrays, and anything else. NumPy arrays stay what they are: their values may still be checked.
    """
    leaves, rebuild = arrays_of(args, lambda x: isinstance(x, jax.Array))
    is_spec = lambda x: isinstance(x, PartitionSpec)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=is_spec)
    in_automatic: Any = jax.sharding.auto_axes(lambda *leaves: fn(*rebuild(leaves)), out_sharding=shardings)
    return in_automatic(*leaves)
