"""Checks what callers inside `jax.shard_map` can get wrong."""

from typing import Any

import jax
from jax import lax

from pallas_fa.context_parallel import placement as placements
from pallas_fa.operands import varying
from pallas_fa.operands.dims import Dims
from pallas_fa.problem import Problem


def axis_size(axis_name: Any) -> int:
    """Returns the number of devices along a mesh axis; raises unless it is one axis, and manual here."""
    if isinstance(axis_name, (tuple, list)):
        raise TypeError(
            f"axis_name={axis_name!r} must be one name of a mesh axis. Make the mesh with one axis for the sequence, of"
            " size the product of these."
        )
    try:
        return lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):  # no axis of this name; a name that cannot be one; a number
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of a mesh that is manual here. Call this inside jax.shard_map over a"
            " mesh with that axis (named in axis_names, if that is given); outside of it use dot_product_attention."
        ) from None


def refuse_reference(implementation: Any) -> None:
    """Raises NotImplementedError if 'reference' is named, which a ring can't use."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    if isinstance(names, (tuple, list)) and "reference" in names:
        raise NotImplementedError(
            f"implementation={implementation!r}: 'reference' has no backward for the keys of one hop. Use 'xla' or None."
        )


def refuse_narrow_keys(problem: Problem) -> None:
    """Raises ValueError where keys and values have fewer bits than queries: each device's share is that of training."""
    if problem.has_narrow_keys:
        raise ValueError(
            f"key.dtype={problem.kv_dtype} must be query.dtype={problem.dtype} here: keys and values of 8 bits are those of"
            " caches. Use decode_attention for a cache, or convert them with `.astype`."
        )


def require_shards(axis_name: Any, **arrays: Any) -> None:
    """Raises ValueError unless each array is this device's shard along the mesh axis."""
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            continue
        explicit = [axis for axis in jax.typeof(x).sharding.spec if axis is not None]
        if explicit:
            raise ValueError(
                f"{name} is sharded over the explicit mesh axes {explicit} inside of a jax.shard_map that is manual over"
                f" axis_name={axis_name!r}. Make them manual too (name them in its axis_names and in_specs), or make the"
                " mesh with jax.sharding.AxisType.Auto for these axes."
            )
        if varying.is_replicated(x, axis_name):
            raise ValueError(
                f"{name} is the same on all devices along axis_name={axis_name!r}, but each must hold its own shard of the"
                f" sequence. Shard it: in_specs=PartitionSpec(None, {axis_name!r}) for [B, length, heads, dim] (and if these"
                f" are shards, say so with jax.lax.pcast(x, {axis_name!r}, to='varying'))."
            )


def require_replicated(axis_name: Any, **trees: Any) -> None:
    """Raises ValueError where JAX's types say that an array of `trees` differs along the mesh axis."""
    for name, tree in trees.items():
        if any(varying.is_varying(x, axis_name) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)):
            raise ValueError(
                f"{name} varies along axis_name={axis_name!r}, but each device must have all of it: only key, value and"
                f" key_value_segment_ids are shards. Leave {axis_name!r} out of its in_specs, as in PartitionSpec(); what"
                f" was computed from shards must be brought together, as by jax.lax.all_gather(..., to='invarying')."
            )


def require_blocks(dims: Dims, size: int, placement: placements.Placement) -> None:
    """Raises ValueError where a shard cannot be split into the blocks of the placement.

    Args:
      dims: the sizes of one device's shards.
      size: the number of devices.
      placement: how many blocks a shard has.
    """
    for name, length in (("query", dims.T), ("key", dims.S)):
        if length % placements.blocks_of(placement):
            raise ValueError(
                f"placement={placement!r} gives each device two blocks of one size, but {name} has the odd length {length}"
                f" on each of {size} devices. Make the whole length a multiple of {2 * size} (pad it, and give"
                " key_value_seq_lengths), or use placement='contiguous'."
            )
