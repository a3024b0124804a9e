"""One training step: a pure function from (state, batch) to (state, metrics), jitted, its state donated."""

from __future__ import annotations

import collections
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec as P

Params = Any  # a nested dict of float32 arrays
Batch = Any  # what a task's `batch` gives: arrays
LARGEST_NORM = 1.0  # of gradients: longer ones are shortened to it


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    step: jax.Array  # int32 []: steps done
    params: Params
    opt_state: optax.OptState


def schedule(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """Linear from 0 over `warmup` steps, then half a cosine down to 0 after the last one."""

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        rising = (count + 1) / (warmup + 1)  # not 0 at the first step, which would be lost
        falling = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((count - warmup) / (steps - warmup), 0, 1)))
        return peak * jnp.minimum(rising, falling)

    return rate


def make_optimizer(name: str, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """ "adamw", or "muon" (Jordan et al., 2024) for the matrices with Adam for the rest.

    `rate` means the same to both: Muon's updates are scaled to AdamW's usual size. Norms and biases do not decay.
    """

    def is_matrix(path: tuple[Any, ...], param: jax.Array) -> bool:
        # An embedding is a table of vectors: orthogonal updates make no sense for it.
        return param.ndim == 2 and "embedding" not in jax.tree_util.keystr(path)

    def matrices(params: Params) -> Params:
        chosen = optax.contrib.MuonDimensionNumbers()
        return jax.tree_util.tree_map_with_path(lambda *leaf: chosen if is_matrix(*leaf) else None, params)

    def decays(params: Params) -> Params:
        return jax.tree.map(lambda param: param.ndim > 1, params)

    if name == "muon":
        return optax.contrib.muon(
            rate, weight_decay=0.1, adam_b2=0.95, consistent_rms=0.2, muon_weight_dimension_numbers=matrices
        )
    return optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=decays)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    loss: Callable[[Params, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    shardings: Any = None,
    options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The step for `loss`, with gradients whose norm is at most LARGEST_NORM.

    The state passed in is donated: its arrays are gone once the step has been called.

    `shardings`: those of the state, which the step keeps; None on one device. `options`: XLA's.
    """

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        norm = _norm(gradients, None if shardings is None else shardings.params)
        excess = jnp.maximum(norm / LARGEST_NORM, 1.0)
        gradients = jax.tree.map(lambda x: x / excess, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), {"loss": value, "gradient_norm": norm}

    return train_step


def _norm(tree: Params, shardings: Any) -> jax.Array:
    """The root of the sum of the squares of all arrays.

    On a mesh each device adds up its own parts, and one number travels. XLA by itself sums over devices for each array.
    """
    if shardings is None:
        return jnp.sqrt(_sum_of_squares(tree, jax.tree.map(lambda _: 1, tree)))
    specs = jax.tree.map(lambda x: x.spec, shardings)
    mesh, axes = jax.tree.leaves(shardings)[0].mesh, frozenset().union(*map(_axes, jax.tree.leaves(specs)))
    copies = jax.tree.map(lambda spec: math.prod(mesh.shape[axis] for axis in axes - _axes(spec)), specs)

    def of_parts(parts: Params) -> jax.Array:
        total = _sum_of_squares(parts, copies)
        # In the mesh's order: that of a set differs between processes, and the order of the sum with it.
        ordered = tuple(axis for axis in mesh.axis_names if axis in axes)
        return jax.lax.psum(total, ordered) if ordered else total

    return jnp.sqrt(jax.shard_map(of_parts, mesh=mesh, in_specs=(specs,), out_specs=P())(tree))


def _sum_of_squares(tree: Params, copies: Any) -> jax.Array:
    """That of all arrays, where as many devices as `copies` says have the same array and add it up too.

    Arrays of one shape are added before they are summed, so that XLA makes a few kernels of it, not two for each array.
    """
    alike = collections.defaultdict(list)
    for x, count in zip(jax.tree.leaves(tree), jax.tree.leaves(copies), strict=True):
        alike[x.shape, count].append(x * x)
    sums = [functools.reduce(operator.add, squares).sum() / count for (_, count), squares in alike.items()]
    return functools.reduce(operator.add, sums)


def _axes(spec: P) -> frozenset[str]:
    """The axes of a mesh that cut an array."""
    return frozenset(axis for cut in spec if cut is not None for axis in (cut if isinstance(cut, tuple) else (cut,)))
