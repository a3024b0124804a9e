"""The order of a sequence on the devices of a ring.

"contiguous": device i holds the i-th of R shards. "zigzag": the sequence is split into 2R blocks, and device i holds blocks
i and 2R - 1 - i, so that every device has equal work under a causal mask.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_fa.operands.pytree import as_count, is_static_int
from pallas_fa.sharding.explicit_axes import keeping_shardings

Placement = Literal["contiguous", "zigzag"]


def check(placement: Any) -> Placement:
    """Returns `placement`; raises ValueError if it is none."""
    if placement not in get_args(Placement):
        raise ValueError(
            f"placement={placement!r} is not a way to place a sequence. Use 'zigzag' (balanced under causal masks; arrays go"
            " through to_zigzag) or 'contiguous' (shards in their order, as jax.shard_map cuts them)."
        )
    return placement


def blocks_of(placement: Placement) -> int:
    """Returns how many contiguous blocks a device holds."""
    return 2 if placement == "zigzag" else 1


def starts(placement: Placement, device: Any, ring_size: int, block: int) -> tuple[Any, ...]:
    """Returns the global positions at which the blocks of a device start.

    Args:
      placement: the order of the sequence on the devices.
      device: the index of a device along the ring, an int or an int32 scalar array.
      ring_size: the number of devices.
      block: the number of positions in a block.
    """
    if placement == "contiguous":
        return (device * block,)
    return device * block, (2 * ring_size - 1 - device) * block


def to_zigzag(x: ArrayLike, axis: int, ring_size: int) -> jax.Array:
    """Permutes a whole array along `axis` to the order of "zigzag" placement.

    Permute tokens, positions, segment ids and targets once, where the batch is made, and shard the results along `axis`.

    Args:
      x: an array of any shape and dtype.
      axis: the axis of the sequence; its size must be a multiple of 2 * ring_size.
      ring_size: the number of devices over which the sequence is sharded.
    """
    return _permute_blocks(x, axis, ring_size, _zigzag)


def from_zigzag(x: ArrayLike, axis: int, ring_size: int) -> jax.Array:
    """Permutes a whole array from the order of "zigzag" placement back to that of the sequence: inverts `to_zigzag`."""
    return _permute_blocks(x, axis, ring_size, lambda ring_size: np.argsort(_zigzag(ring_size)))


def _zigzag(ring_size):
    """Returns the order of the blocks: which block of the sequence comes first, second, ..."""
    return np.stack([np.arange(ring_size), 2 * ring_size - 1 - np.arange(ring_size)], axis=1).reshape(-1)


def _permute_blocks(x, axis, ring_size, order_of):
    """Permutes the blocks along `axis` to the order that `order_of(ring_size)` is."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as e:
        raise TypeError(f"x={x!r} is a {type(x).__name__}; it must be an array. Pass one of JAX or NumPy.") from e
    ring_size = as_count("ring_size", ring_size, "Pass the number of devices over which the sequence is sharded.")
    if not is_static_int(axis) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis!r} is not an axis of an array of shape {x.shape}. Name the axis of the sequence.")
    axis = int(axis) % x.ndim
    if x.shape[axis] % (2 * ring_size):
        raise ValueError(
            f"axis={axis} of the array has size {x.shape[axis]}, not a multiple of 2 * ring_size = {2 * ring_size}: zigzag"
            " gives each device two blocks of one size. Pad the sequence, and say its length in key_value_seq_lengths."
        )
    split = *x.shape[:axis], 2 * ring_size, x.shape[axis] // (2 * ring_size), *x.shape[axis + 1 :]
    permute = lambda x: jnp.take(x.reshape(split), order_of(ring_size), axis=axis).reshape(x.shape)
    return keeping_shardings(permute)(x)
