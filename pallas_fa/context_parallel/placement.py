"""Where the shards of a sequence lie on the devices of a ring.

"contiguous": device i holds the i-th of R pieces. "zigzag": the sequence is cut into 2R blocks and device i holds blocks i
and 2R - 1 - i, so that each device has as much to do under a causal mask as any other.
"""

from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

Placement = Literal["contiguous", "zigzag"]


def checked(placement: Any) -> Placement:
    """`placement`, if it is one."""
    if placement not in get_args(Placement):
        raise ValueError(
            f"placement={placement!r} is not a way to place a sequence. Use 'zigzag' (balanced under causal masks; arrays go"
            " through to_zigzag) or 'contiguous' (shards in their order, as jax.shard_map cuts them)."
        )
    return placement


def blocks_of(placement: Placement) -> int:
    """How many contiguous blocks a device holds."""
    return 2 if placement == "zigzag" else 1


def starts(placement: Placement, device: Any, ring_size: int, block: int) -> tuple[Any, ...]:
    """The global positions at which the blocks of `device` start, where each has `block` positions."""
    if placement == "contiguous":
        return (device * block,)
    return device * block, (2 * ring_size - 1 - device) * block


def to_zigzag(x: Any, axis: int, ring_size: int) -> Any:
    """A whole array with `axis` in the order in which "zigzag" places it on `ring_size` devices.

    Its size must be a multiple of 2 * ring_size. Permute tokens, positions, segment ids and targets once, where the batch
    is made; shard the result along `axis` as usual.
    """
    return _permuted(x, axis, ring_size, _zigzag(ring_size))


def from_zigzag(x: Any, axis: int, ring_size: int) -> Any:
    """The inverse of `to_zigzag`."""
    return _permuted(x, axis, ring_size, np.argsort(_zigzag(ring_size)))


def _zigzag(ring_size):
    """Which block of the sequence comes first, second, ..."""
    return np.stack([np.arange(ring_size), 2 * ring_size - 1 - np.arange(ring_size)], axis=1).reshape(-1)


def _permuted(x, axis, ring_size, order):
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} is not an axis of an array of shape {x.shape}. Name the axis of the sequence.")
    axis = axis % x.ndim
    if ring_size < 1 or x.shape[axis] % (2 * ring_size):
        raise ValueError(
            f"axis={axis} of the array has size {x.shape[axis]}, not a multiple of 2 * ring_size = {2 * ring_size}: zigzag"
            " gives each device two blocks of one size. Pad the sequence, and say its length in key_value_seq_lengths."
        )
    blocks = x.reshape(*x.shape[:axis], 2 * ring_size, x.shape[axis] // (2 * ring_size), *x.shape[axis + 1 :])
    return jnp.take(blocks, order, axis=axis).reshape(x.shape)
