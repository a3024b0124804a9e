"""Kernels on arrays that `jit` shards over automatic mesh axes: each device runs the kernel on its own shard.

To XLA a kernel is a black box, whose arguments it would gather on every device. `custom_partitioning` tells it which dims
belong together, and `device_share` what a device computes. Inside `jax.shard_map` arrays are shards already, and the kernel
is called as it is.
"""

import dataclasses
import functools
import hashlib
import itertools
import string
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pallas_fa.problem import Problem, Residuals
from pallas_fa.sharding import device_share, exporting, own_refs
from pallas_fa.sharding.device_share import (
    KEY,
    LSE,
    OUT,
    QUERY,
    VALUE,
    WHOLE,
    DeviceShare,
    letters_of,
    letters_of_operands,
)
from pallas_fa.sharding.mesh_axes import axes_by_dim, known_mesh


def forward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(problem, operands) -> (out, lse)`, shared out to the devices that hold the arguments."""

    def run(problem, operands):
        return _run(kernel, problem, (operands,), (letters_of_operands(operands),), (OUT, LSE))

    return run


def backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(problem, residuals, d_out, d_lse) -> gradients of `operands.differentiable``, shared out likewise."""

    def run(problem, residuals, d_out, d_lse):
        operands = residuals.operands
        letters = Residuals(letters_of_operands(operands), OUT, LSE), OUT, LSE
        results = QUERY, KEY, VALUE, *map(letters_of, operands.differentiable[3:])
        return _run(kernel, problem, (residuals, d_out, d_lse), letters, results)

    return run


def _run(kernel, problem, arguments, letters, results):
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes or jax.device_count() == 1:
        return kernel(problem, *arguments)
    leaves, structure = jax.tree.flatten(arguments)
    call = _Call(kernel, problem, context, structure, tuple(jax.tree.leaves(letters)), results)
    return tuple(_mappable(call, *leaves))


def _mappable(call, *leaves):
    """`call` with a rule for `vmap`, which custom_partitioning has not: every device maps its own kernel."""
    run = custom_vmap(functools.partial(_partitionable, call))

    @run.def_vmap
    def rule(axis_size, is_mapped, *leaves):
        results = _mappable(call.mapped(axis_size, is_mapped), *leaves)
        return results, [True] * len(results)

    return run(*leaves)


def _partitionable(call, *leaves):
    """`call` with what XLA has to know in order to share it out."""
    traced = jax.make_jaxpr(call.on_one_device)(*leaves)
    # As arguments: custom_partitioning takes no others.
    constants = exporting.needs_process(_fingerprint(traced)), *traced.consts

    def on_one_device(constants, *leaves):
        return eval_jaxpr(traced.jaxpr, constants[1:], *leaves)

    run = custom_partitioning(on_one_device)
    run.def_partition(
        call.partition,
        decode_shardings=False,  # it raises where it can't, and `axes_by_dim` does not
        sharding_rule=call.sharding_rule(constants),
        need_replication_factors=tuple(WHOLE),
    )
    return run(constants, *leaves)


def _fingerprint(traced) -> np.ndarray:
    """int32 [8], different for different computations.

    A program for several devices has nothing of the kernel in it until XLA asks for it. A compilation cache that ignores
    whom to ask (`jax_remove_custom_partitioning_ptr_from_cache_key`, without which it never finds such programs again) would
    take the program with another mask for the same one: an argument that differs tells them apart.
    """
    return np.frombuffer(hashlib.sha256(str(traced).encode()).digest(), np.int32)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel and its problem, and what is known of its arguments and results: structure, and letters (flattened).

    `context`: the mesh of `jax.set_mesh`. `maps`: a letter and a size for each `vmap`, the innermost first.
    """

    kernel: Callable[..., Any]
    problem: Problem
    context: AbstractMesh
    structure: Any
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    maps: tuple[tuple[str, int], ...] = ()

    def mapped(self, axis_size, is_mapped) -> "_Call":
        """This call under one more `vmap`."""
        letter = string.ascii_lowercase[len(self.maps)]
        return dataclasses.replace(
            self,
            arguments=tuple(letter * bool(m) + x for m, x in zip(is_mapped, self.arguments, strict=True)),
            results=tuple(letter + x for x in self.results),
            maps=(*self.maps, (letter, axis_size)),
        )

    def _under_maps(self, run):
        """`run(arguments)` as a function of leaves with the mapped dims in front."""
        fn = lambda *leaves: run(jax.tree.unflatten(self.structure, leaves))
        for letter, _ in self.maps:
            fn = jax.vmap(fn, [0 if letter in letters else None for letters in self.arguments])
        return fn

    def on_one_device(self, *leaves):
        """The results of whole arguments."""
        return self._under_maps(lambda arguments: list(self.kernel(self.problem, *arguments)))(*leaves)

    def sharding_rule(self, constants) -> str:
        """Which dims are sharded alike: along these, shardings go from arguments to results and back."""
        unshared = itertools.count()

        def factors(letters):
            # Key heads apart from query heads: there may be fewer of them than shards.
            letters = letters.replace("K", "N") if self.problem.group == 1 else letters
            return " ".join(f"u{next(unshared)}" if letter == "_" else letter for letter in letters)

        arguments = *("_" * x.ndim for x in constants), *self.arguments
        return " -> ".join(", ".join(map(factors, arrays)) for arrays in (arguments, self.results))

    def partition(self, mesh, arguments, results):
        """Called by XLA: (mesh, what a device computes, shardings of the results, shardings of the arguments)."""
        mesh = known_mesh(mesh, self.context, results[0].sharding, results[0].ndim)
        by_letter = lambda letters, x: dict(zip(letters, axes_by_dim(mesh, x.sharding, x.ndim), strict=True))
        constants, *arguments = arguments
        q, k, v = map(by_letter, self.arguments[:3], arguments[:3])
        share = DeviceShare.of(mesh, self.problem, by_letter(self.results[0], results[0]), k, dict(self.maps))
        if OUT in self.results[0]:  # in the forward pass, which comes first
            device_share.check(q, k, v, share)

        def on_this_device(constants, *leaves):
            run = lambda arguments: share.run(self.kernel, self.problem, arguments, self.results)
            return own_refs.hidden(self._under_maps(run))(*leaves)

        shardings = lambda arrays: [NamedSharding(mesh, PartitionSpec(*share.of_dims(letters))) for letters in arrays]
        everywhere = (NamedSharding(mesh, PartitionSpec()),) * len(constants)
        return mesh, on_this_device, shardings(self.results), (everywhere, *shardings(self.arguments))
