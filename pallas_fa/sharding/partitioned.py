"""Partitions kernels over automatic mesh axes, whose shards `jit` chooses: each device runs the kernel on its shard.

XLA cannot look into a kernel and would gather its arguments on every device. `custom_partitioning` tells XLA which dims
are sharded together, and `DeviceShard` computes the shard of one device. Inside `jax.shard_map` arrays are shards already,
and the kernel is called directly.
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
from pallas_fa.sharding import device_shard, exporting
from pallas_fa.sharding.device_shard import (
    KEY,
    LSE,
    OUT,
    QUERY,
    UNSHARDED,
    VALUE,
    DeviceShard,
    in_layout,
    letters_of,
    letters_of_operands,
)
from pallas_fa.sharding.hide_effects import hide_effects
from pallas_fa.sharding.mesh_axes import axes_by_dim, complete_mesh


def forward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Partitions `kernel(problem, operands) -> (out, lse)` over the devices that hold the operands."""

    def run(problem, operands):
        letters = (letters_of_operands(operands, problem.layout),)
        return _run(kernel, problem, (operands,), letters, (*in_layout(problem.layout, OUT), LSE))

    return run


def backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Partitions `kernel(problem, residuals, d_out, d_lse) -> gradients` over the devices that hold the arguments."""

    def run(problem, residuals, d_out, d_lse):
        operands = residuals.operands
        (out,) = in_layout(problem.layout, OUT)
        letters = Residuals(letters_of_operands(operands, problem.layout), out, LSE), out, LSE
        results = *in_layout(problem.layout, QUERY, KEY, VALUE), *map(letters_of, operands.differentiable[3:])
        return _run(kernel, problem, (residuals, d_out, d_lse), letters, results)

    return run


def _run(kernel, problem, arguments, letters, results):
    context = jax.sharding.get_abstract_mesh()
    # Keys in pages are not partitioned: which pages a device should have, the table says, and not their sharding.
    if context.manual_axes or jax.device_count() == 1 or problem.pages:
        return kernel(problem, *arguments)
    leaves, structure = jax.tree.flatten(arguments)
    call = _Call(kernel, problem, context, structure, tuple(jax.tree.leaves(letters)), results)
    return tuple(_run_with_vmap_rule(call, *leaves))


def _run_with_vmap_rule(call, *leaves):
    """Runs `call`, with the vmap rule that custom_partitioning lacks: each device maps the kernel over its shard."""
    run = custom_vmap(functools.partial(_partitionable, call))

    @run.def_vmap
    def rule(axis_size, is_mapped, *leaves):
        results = _run_with_vmap_rule(call.mapped(axis_size, is_mapped), *leaves)
        return results, [True] * len(results)

    return run(*leaves)


def _partitionable(call, *leaves):
    """Runs `call` with the rules by which XLA partitions it."""
    traced = jax.make_jaxpr(call.on_one_device)(*leaves)
    # custom_partitioning takes no closed-over arrays, so they become arguments.
    constants = exporting.refuse_export(_fingerprint(traced)), *traced.consts

    def on_one_device(constants, *leaves):
        return eval_jaxpr(traced.jaxpr, constants[1:], *leaves)

    run = custom_partitioning(on_one_device)
    run.def_partition(
        call.partition,
        decode_shardings=False,  # JAX's decoding raises for `SubAxes`
        sharding_rule=call.sharding_rule(constants),
        need_replication_factors=tuple(x for x in UNSHARDED if any(x in letters for letters in call.arguments)),
    )
    return run(constants, *leaves)


def _fingerprint(traced) -> np.ndarray:
    """Returns int32 [8] that differ between different computations, to tell programs apart in the compilation cache.

    A program for several devices holds only a pointer to the partitioning rule, no kernel. The cache finds such programs
    again only with `jax_remove_custom_partitioning_ptr_from_cache_key`, which ignores that pointer. Without the fingerprint,
    two programs that differ in the mask alone would then be the same entry.
    """
    return np.frombuffer(hashlib.sha256(str(traced).encode()).digest(), np.int32)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a kernel that XLA partitions.

    Attributes:
      kernel: kernel(problem, *arguments) -> results.
      problem: the whole problem.
      context: the mesh of `jax.set_mesh`.
      structure: the tree structure of the arguments.
      arguments: the letters of each array in the arguments.
      results: the letters of each result.
      maps: (letter, size) of each dim that `vmap` maps, the innermost first.
    """

    kernel: Callable[..., Any]
    problem: Problem
    context: AbstractMesh
    structure: Any
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    maps: tuple[tuple[str, int], ...] = ()

    def mapped(self, axis_size, is_mapped) -> "_Call":
        """Returns this call under one more `vmap`."""
        letter = string.ascii_lowercase[len(self.maps)]
        return dataclasses.replace(
            self,
            arguments=tuple(letter * bool(m) + x for m, x in zip(is_mapped, self.arguments, strict=True)),
            results=tuple(letter + x for x in self.results),
            maps=(*self.maps, (letter, axis_size)),
        )

    def _vmapped(self, run):
        """Returns `run(arguments)` as a function of leaves, whose leading dims `vmap` maps."""
        fn = lambda *leaves: run(jax.tree.unflatten(self.structure, leaves))
        for letter, _ in self.maps:
            fn = jax.vmap(fn, [0 if letter in letters else None for letters in self.arguments])
        return fn

    def on_one_device(self, *leaves):
        """Computes the results of unsharded arguments."""
        return self._vmapped(lambda arguments: list(self.kernel(self.problem, *arguments)))(*leaves)

    def sharding_rule(self, constants) -> str:
        """Returns the rule by which XLA propagates shardings: dims of one letter are sharded together."""
        unsharded = itertools.count()

        def factors(letters):
            # Grouped key heads keep a letter of their own: there may be fewer of them than shards of query heads.
            letters = letters.replace("K", "N") if self.problem.group == 1 else letters
            return " ".join(f"u{next(unsharded)}" if letter == "_" else letter for letter in letters)

        arguments = *("_" * x.ndim for x in constants), *self.arguments
        return " -> ".join(", ".join(map(factors, arrays)) for arrays in (arguments, self.results))

    def partition(self, mesh, arguments, results):
        """Tells XLA what a device computes: (mesh, the function, shardings of its results, of its arguments)."""
        mesh = complete_mesh(mesh, self.context, results[0].sharding, results[0].ndim)
        by_letter = lambda letters, x: dict(zip(letters, axes_by_dim(mesh, x.sharding, x.ndim), strict=True))
        constants, *arguments = arguments
        q, k, v = map(by_letter, self.arguments[:3], arguments[:3])
        shard = DeviceShard.of(mesh, self.problem, by_letter(self.results[0], results[0]), k, dict(self.maps))
        if "V" in self.results[0]:  # of the output: in the forward pass, which comes first
            device_shard.check(q, k, v, shard)

        def on_this_device(constants, *leaves):
            run = lambda arguments: shard.run(self.kernel, self.problem, arguments, self.results)
            return hide_effects(self._vmapped(run))(*leaves)

        shardings = lambda arrays: [NamedSharding(mesh, PartitionSpec(*shard.spec(letters))) for letters in arrays]
        replicated = (NamedSharding(mesh, PartitionSpec()),) * len(constants)
        return mesh, on_this_device, shardings(self.results), (replicated, *shardings(self.arguments))
