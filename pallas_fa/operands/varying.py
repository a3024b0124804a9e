"""Inside `jax.shard_map`, an array's type says over which mesh axes its values vary, and JAX checks it.

Attention makes all its arrays vary alike, so that the gradient of one that did not vary (a bias that is the same on all
devices) is summed over the axes of the others. The loops and kernels inside know nothing of it and run unchecked.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


def made_alike(*trees: Any) -> tuple[Any, ...]:
    """The arrays of `trees`, each varying over all mesh axes over which any of them does."""
    axes = _varying(trees)
    return tuple(jax.tree.map(functools.partial(_vary, axes), tree) for tree in trees)


def unchecked(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, run without these checks; its results vary as the arguments do."""
    axes = _varying(args)
    if not axes:
        return fn(*args)
    leaves, structure = jax.tree.flatten(args)
    run = jax.shard_map(
        lambda *leaves: fn(*jax.tree.unflatten(structure, map(_unmarked, leaves))),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=set(),
        check_vma=False,
    )
    return jax.tree.map(functools.partial(_vary, axes), run(*leaves))


def _varying(tree: Any) -> frozenset[str]:
    """All mesh axes over which arrays of `tree` vary; none outside of shard_map."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def _unmarked(x):
    # Where nothing is checked, what an operation returns is not marked as varying, but arguments still are, and a
    # derivative between the two would not match. This is an operation, of no work.
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def _vary(axes, x):
    missing = tuple(axis for axis in sorted(axes) if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def known_alike(x: Any, axis_name: str) -> bool:
    """Whether JAX checks that `x` is the same on all devices along a mesh axis."""
    checks = axis_name in _varying(lax.axis_index(axis_name))
    return checks and axis_name not in _varying(x)
