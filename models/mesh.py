"""Training on several devices: what `--mesh` says, and how the arrays of a run are cut over the axes of a mesh.

`data` cuts the batch. `model` cuts the matrices (Shoeybi et al., arXiv 1909.08053): each device has some of the heads
and of the MLP's hidden units, and what the devices add to the residual stream is summed, once after the attention and
once after the MLP. `context` cuts the sequence, in zigzag order (`pallas_fa.context_parallel`): all but the attention
treats each token by itself. The devices of both `data` and `context` use all of a matrix, but each keeps a part
(Rajbhandari et al., arXiv 1910.02054): matrices are gathered for a step, in the dtype that it computes in, and their
gradients' sums come back in parts, so that the optimizer's work is shared too. Its state lies as the parameters do. The
rest lies on every device; an embedding of 256 bytes is not worth cutting. Only places are said here: XLA finds the
communication (jax.sharding.AxisType.Auto), except that of the attention (attention.py).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import CausalAttention, MeshAttention, causal_attention
from models.errors import UsageError
from pallas_fa.context_parallel import to_zigzag

AXES = ("data", "context", "model")  # neighbours along the last talk most

# The layers that `model` cuts, by outputs or by inputs, by the names they have in both models.
COLUMN_PARALLEL = ("query", "key", "value", "gate", "up")  # kernel [D, heads or hidden, ..], bias [heads or hidden, ..]
ROW_PARALLEL = ("out", "down")  # kernel [heads or hidden, .., D], and a bias that is added once

FSDP_AXES = ("data", "context")  # their devices keep parts of these kernels between steps


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a run lie: over the devices of `mesh`; without one, where JAX puts them."""

    mesh: Mesh | None = None

    @property
    def attention(self) -> CausalAttention:
        return causal_attention if self.mesh is None else MeshAttention(self.mesh)

    def size(self, axis: str) -> int:
        """The number of devices along an axis."""
        return 1 if self.mesh is None else self.mesh.shape[axis]

    def positions(self, length: int) -> np.ndarray:
        """int32 [T]: which position of a sequence lies at each place."""
        positions, devices = np.arange(length, dtype=np.int32), self.size("context")
        return positions if devices == 1 else np.asarray(to_zigzag(positions, 0, devices))

    def attention_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What one call of the attention gets of [B,T,heads,H]; in a ring, a pair of blocks, two to a device."""
        b, t, heads, h = shape
        context = self.size("context")
        blocks = 1 if context == 1 else 2 * context
        return b // self.size("data"), t // blocks, heads // self.size("model"), h

    def place(self, arrays: Any, *axes: str) -> Any:
        """A tree of arrays, their first dims cut over these axes of the mesh."""
        return arrays if self.mesh is None else jax.device_put(arrays, NamedSharding(self.mesh, P(*axes)))

    def state(self, tree: Any) -> Any:
        """Parameters, or a TrainState, in the parts that devices keep."""
        return tree if self.mesh is None else jax.device_put(tree, self.shardings(tree))

    def shardings(self, tree: Any) -> Any:
        """The same tree with the sharding of each array; None without a mesh."""
        mesh = self.mesh
        if mesh is None:
            return None

        def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
            return NamedSharding(mesh, self._places(path, x.shape))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def in_parts(self, params: Any, dtype: Any) -> Any:
        """Parameters whose matrices are in `dtype` where devices keep parts of them."""
        cast = lambda path, x: x.astype(dtype) if self._is_kept(path, x) else x
        return self._placed(jax.tree_util.tree_map_with_path(cast, params), whole=False)

    def gathered(self, params: Any, dtype: Any) -> Any:
        """Parameters as a step uses them: matrices that devices keep parts of are gathered, in `dtype`."""
        # Both places hold for the gradient too, on its way back: summed, and of the sums each device's part.
        return self._placed(self.in_parts(params, dtype), whole=True)

    def gather(self, x: jax.Array, first: Any, rest: Any) -> tuple[jax.Array, Any, Any]:
        """(x, parameters of the first block, of the others), gathered from their parts, where the first block takes x.

        All others travel at once, while the first block runs; so do their gradients' sums, in its backward pass. One block
        must have enough to do to hide them: many tokens, and links as fast as those inside a host. For the rest of a step
        the links are quiet. After 50 ms of that they sleep, which leaves a GPU at its power limit 2 to 3% more clock
        (docs/decisions/training/gather-in-two-messages.md).
        """

        @jax.custom_vjp
        def gather(x, first, rest):
            # Tied, or XLA makes one message of both, for which the first block would wait.
            x, first, rest = jax.lax.optimization_barrier((x, self._placed(first, whole=True), rest))
            return x, first, self._placed(rest, whole=True)

        def backward(_, gradients):
            d_x, d_first, d_rest = gradients
            # Tied, or XLA makes these sums after the whole backward pass, where nothing hides them.
            leaves, tree = jax.tree_util.tree_flatten_with_path(self._placed(d_rest, whole=False))
            sums = {i: x for i, (path, x) in enumerate(leaves) if self._is_kept(path, x)}
            d_x, sums = jax.lax.optimization_barrier((d_x, sums))
            d_rest = jax.tree.unflatten(tree, [sums.get(i, x) for i, (_, x) in enumerate(leaves)])
            return d_x, self._placed(d_first, whole=False), d_rest

        gather.defvjp(lambda *arrays: (gather(*arrays), None), backward)
        return gather(x, first, rest)

    def options(self, params: Any, dtype: Any) -> dict[str, Any]:
        """XLA's options for a step that gathers these parameters at once, in `dtype`; none without a mesh."""
        if self.mesh is None:
            return {}

        def part(path: tuple[Any, ...], x: Any, sharding: NamedSharding) -> int:
            return math.prod(sharding.shard_shape(x.shape)) if self._is_kept(path, x) else 0

        parts = sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(part, params, self.shardings(params))))
        return {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_all_gather_combine_threshold_bytes": 2**40,  # all that is not tied
            # Their sums and no others: those of a first block are made later, and all would wait for them.
            "xla_gpu_reduce_scatter_combine_threshold_bytes": parts * jnp.dtype(dtype).itemsize,
        }

    def _placed(self, params: Any, whole: bool) -> Any:
        """Matrices that devices keep parts of, in these parts or as a whole on each."""
        mesh = self.mesh
        if mesh is None:
            return params

        def placed(path: tuple[Any, ...], x: Any) -> Any:
            if not self._is_kept(path, x):
                return x
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self._places(path, x.shape, whole)))

        return jax.tree_util.tree_map_with_path(placed, params)

    @property
    def _fsdp_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in FSDP_AXES if self.size(axis) > 1)

    def _is_kept(self, path: tuple[Any, ...], x: Any) -> bool:
        """Whether devices keep parts of a parameter."""
        return self._kept_along(path, x.shape) is not None

    def _kept_along(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
        """The dim of a kernel that the FSDP axes cut into parts, or None, where each device keeps all of it.

        The first, if it divides: parts of another would be transposed to be sent, and the optimizer's arrays with them.
        """
        layer, name = _names(path)
        if name != "kernel" or not shape or not self._fsdp_axes:
            return None
        dims = (0,) if layer in COLUMN_PARALLEL else (0, len(shape) - 1) if layer in ROW_PARALLEL else ()
        for dim in dims:
            cuts = [*self._fsdp_axes, *(["model"] if dim == _cut_by_model(path) else [])]
            if shape[dim] % math.prod(map(self.size, cuts)) == 0:
                return dim
        return None

    def _places(self, path: tuple[Any, ...], shape: tuple[int, ...], whole: bool = False) -> P:
        """What cuts a parameter, or the optimizer's arrays for it. `whole`: the cuts of the FSDP axes left out."""
        kept = None if whole else self._kept_along(path, shape)

        def cut(dim: int) -> tuple[str, ...] | None:
            by_model = ("model",) if dim == _cut_by_model(path) else ()
            return by_model + (self._fsdp_axes if dim == kept else ()) or None

        return P(*map(cut, range(len(shape))))

    def after_step(self, results: Any) -> None:
        """Waits for the step on a mesh of CPU devices, and nowhere else.

        They share the threads of one pool. Where two steps are under way, each can hold threads that wait for a sum
        with devices for which no thread is left, and XLA ends the process.
        """
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(results)


ONE_DEVICE = Layout()


def _names(path: tuple[Any, ...]) -> tuple[Any, Any]:
    """(layer, parameter) at the end of a path; the optimizer's arrays for a parameter have paths that end alike."""
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return (keys[-2], keys[-1]) if len(keys) > 1 else (None, None)


def _cut_by_model(path: tuple[Any, ...]) -> int | None:
    """Which dim of the parameter at this path `model` cuts."""
    layer, name = _names(path)
    if layer in COLUMN_PARALLEL:
        return 1 if name == "kernel" else 0
    return 0 if layer in ROW_PARALLEL and name == "kernel" else None


def parse_mesh(text: str) -> dict[str, int]:
    """ "data=2,model=2" -> the size of each of AXES; 1 for what is not named."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise UsageError(
                f"--mesh={text!r}: {axis!r} is not an axis; data cuts the batch, model the heads and hidden units, "
                "context the sequence: write for example --mesh data=2,model=2."
            )
        if not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise UsageError(
                f"--mesh={text!r}: {part!r} can't be read; each axis is named once, with the number of devices along "
                "it: write for example --mesh data=2,model=2."
            )
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def make_layout(text: str | None, batch: int, sequence: int | None = None, **shared: int) -> Layout:
    """The layout that `--mesh` asks for, on the first devices if it needs fewer than there are.

    `sequence`: its length; None where there is none to cut. `shared`: what the model has of each thing that `model`
    cuts. Raises UsageError unless all cuts are equal.
    """
    if text is None:
        return ONE_DEVICE
    sizes = parse_mesh(text)
    if batch % sizes["data"]:
        raise UsageError(
            f"--mesh={text!r} with --batch={batch}: data={sizes['data']} devices get equal parts of the batch; make "
            f"--batch a multiple of {sizes['data']}, or data a divisor of {batch}."
        )
    _check_context(text, sizes["context"], sequence)
    for name, count in shared.items():
        if count % sizes["model"]:
            raise UsageError(
                f"--mesh={text!r}: model={sizes['model']} devices can't have equal parts of this --size's "
                f"{name}={count}; make model a divisor of {math.gcd(*shared.values())}, or choose another --size."
            )
    devices, needed = jax.devices(), math.prod(sizes.values())
    if needed > len(devices):
        remedy = "lower an axis; --mesh data=1 is one device"
        if devices[0].platform == "cpu":
            remedy += f"; to try a mesh on the CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise UsageError(
            f"--mesh={text!r} needs {needed} devices, the product of its sizes, and there are {len(devices)} "
            f"({devices[0].platform}): {remedy}."
        )
    types = (AxisType.Auto,) * len(sizes)
    return Layout(jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices[:needed]))


def _check_context(text: str, devices: int, sequence: int | None) -> None:
    if devices == 1:
        return
    if sequence is None:
        raise UsageError(
            f"--mesh={text!r}: context={devices} cuts the sequence, and the images of --task images are not one: leave "
            "context out, and give its devices to data."
        )
    if sequence % (2 * devices):
        raise UsageError(
            f"--mesh={text!r} with --context={sequence}: context={devices} devices get two equal pieces of the sequence "
            f"each, one from its start and one from its end; make --context a multiple of {2 * devices}, or choose other "
            "devices along context."
        )
