"""Finds the mesh axes over which each dim of an array is sharded."""

import math
from collections.abc import Iterable

import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

Axes = tuple[str, ...]  # names of mesh axes, the major one first


class SubAxes(tuple):
    """Mesh axes of which only sub-axes shard a dim, in a way that no PartitionSpec can express.

    Example: 8 devices shard the columns of q [B, T, N * H] with N = 4. A sub-axis of size 4 then shards the heads, and one
    of size 2 the head dim.
    """


def complete_mesh(mesh: Mesh, context: AbstractMesh, sharding: Sharding, ndim: int) -> Mesh:
    """Returns a mesh that names the axes of a program.

    Args:
      mesh: that of the program's arguments, returned unless it is empty, as where no argument has a mesh.
      context: the mesh of `jax.set_mesh`, whose axes are the second choice. If it is empty, too, one axis has all devices.
      sharding: that of an array of the program; gives the devices in their order.
      ndim: the number of dims of that array.
    """
    if not mesh.empty:
        return mesh
    devices = list(_device_indices(sharding, ndim))
    axes = dict(context.shape) or {"devices": len(devices)}
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def axes_by_dim(mesh: Mesh, sharding: Sharding, ndim: int) -> list[Axes]:
    """Returns the mesh axes that shard each of `ndim` dims; `SubAxes` where only a part of an axis does."""
    starts = np.array([[dim.start or 0 for dim in index] for index in _device_indices(sharding, ndim).values()])
    return [_axes_of_dim(mesh, starts[:, dim].reshape(mesh.devices.shape)) for dim in range(ndim)]


def _device_indices(sharding, ndim):
    """Returns what each device holds, in the order of the mesh, of an array whose dims any sharding divides evenly."""
    return sharding.devices_indices_map((len(sharding.device_set),) * ndim)


def _axes_of_dim(mesh, starts) -> Axes:
    """Returns the axes that shard a dim whose shard starts at `starts` on each device of the mesh."""
    steps = {
        axis: np.moveaxis(starts, i, 0)[1].flat[0]
        for i, axis in enumerate(mesh.axis_names)
        if np.ptp(starts, axis=i).any()
    }
    axes = sorted(steps, key=lambda axis: -steps[axis])
    return tuple(axes) if len(np.unique(starts)) == shard_count(mesh, axes) else SubAxes(axes)


def shard_count(mesh: Mesh, axes: Iterable[str]) -> int:
    """Returns the number of shards over these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def dividing_axes(mesh: Mesh, axes: Axes, size: int) -> Axes:
    """Returns the longest prefix of `axes` (major first) that divides `size` evenly; no axes for `SubAxes`."""
    if isinstance(axes, SubAxes):
        return ()
    return next(axes[:n] for n in range(len(axes), -1, -1) if size % shard_count(mesh, axes[:n]) == 0)
