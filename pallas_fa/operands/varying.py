"""Handles the mesh axes that arrays vary over inside `jax.shard_map`, where JAX records them in types and checks them.

Attention makes all its arrays vary over the same axes. JAX then sums the gradient of a replicated array, such as a bias,
over the axes that the others vary over. The loops and kernels inside run without these checks.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


def vary_together(*trees: Any) -> tuple[Any, ...]:
    """Returns `trees` with each array varying over all mesh axes that any of the arrays varies over."""
    axes = _varying_axes(trees)
    return tuple(jax.tree.map(functools.partial(_vary, axes), tree) for tree in trees)


def without_checks(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns `fn(*args)`, run without checks of varying axes; its results vary over the axes of the arguments."""
    axes = _varying_axes(args)
    if not axes:
        return fn(*args)
    leaves, structure = jax.tree.flatten(args)
    run = jax.shard_map(
        lambda *leaves: fn(*jax.tree.unflatten(structure, map(_drop_varying, leaves))),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=set(),
        check_vma=False,
    )
    return jax.tree.map(functools.partial(_vary, axes), run(*leaves))


def is_checked(axis_name: Hashable) -> bool:
    """Returns whether JAX records here which arrays vary along a mesh axis."""
    return axis_name in _varying_axes(lax.axis_index(axis_name))


def is_replicated(x: Any, axis_name: str) -> bool:
    """Returns whether JAX's types prove that `x` is replicated along a mesh axis; False where nothing is checked."""
    return is_checked(axis_name) and axis_name not in _varying_axes(x)


def is_varying(x: Any, axis_name: str) -> bool:
    """Returns whether JAX's types say that `x` varies along a mesh axis; False where nothing is checked."""
    return is_checked(axis_name) and axis_name in _varying_axes(x)


def _varying_axes(tree: Any) -> frozenset[str]:
    """Returns all mesh axes that arrays of `tree` vary over: none outside of shard_map."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def _drop_varying(x):
    # Without checks, arguments keep their varying types but results of operations have none, so that the types of a primal
    # and its derivative would differ. This operation costs nothing, and its result has no varying type.
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def _vary(axes, x):
    missing = tuple(axis for axis in sorted(axes) if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x
