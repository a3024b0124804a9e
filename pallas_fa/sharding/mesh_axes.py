"""Over which axes of a mesh the dims of an array are sharded."""

import math
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

Axes = tuple[str, ...]  # names of mesh axes, the major one first


class PartOfAnAxis(tuple):
    """Mesh axes over which a dim is sharded in a way that no PartitionSpec can say.

    XLA has such shardings: where 8 devices hold the columns of q [B, T, N * H] with N = 4, four of them hold heads, and
    two each a half of a head.
    """


def known_mesh(mesh: Mesh, context: AbstractMesh, sharding: Sharding, ndim: int) -> Mesh:
    """`mesh`; where it is empty, since no argument of the program names one, that of `jax.set_mesh`."""
    if not mesh.empty:
        return mesh
    devices = list(_cut(sharding, ndim))
    axes = dict(context.shape) or {"devices": len(devices)}
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def axes_by_dim(mesh: Mesh, sharding: Sharding, ndim: int) -> list[Axes]:
    """The mesh axes that shard each of `ndim` dims; a `PartOfAnAxis` where they do not do so as a whole."""
    starts = np.array([[dim.start or 0 for dim in index] for index in _cut(sharding, ndim).values()])
    return [_axes_of(mesh, starts[:, dim].reshape(mesh.devices.shape)) for dim in range(ndim)]


def _cut(sharding, ndim):
    """What each device holds, in the order of the mesh, of an array that is large enough to be cut evenly."""
    return sharding.devices_indices_map((len(sharding.device_set),) * ndim)


def _axes_of(mesh, starts) -> Axes:
    """Of one dim, by where it starts on each device of the mesh."""
    steps = {
        axis: np.moveaxis(starts, i, 0)[1].flat[0]
        for i, axis in enumerate(mesh.axis_names)
        if np.ptp(starts, axis=i).any()
    }
    axes = sorted(steps, key=lambda axis: -steps[axis])
    return tuple(axes) if len(np.unique(starts)) == count(mesh, axes) else PartOfAnAxis(axes)


def count(mesh: Mesh, axes: Any) -> int:
    """The number of shards over these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def dividing(mesh: Mesh, axes: Axes, size: int) -> Axes:
    """As many of `axes`, from the major one on, as share `size` evenly; none of a `PartOfAnAxis`."""
    if isinstance(axes, PartOfAnAxis):
        return ()
    return next(axes[:n] for n in range(len(axes), -1, -1) if size % count(mesh, axes[:n]) == 0)
