"""Kernels on arrays that `jit` shards over automatic mesh axes: each device runs the kernel on its own shard.

To XLA a kernel is a black box, whose arguments it would gather on every device. Here it learns which dims of the arguments
and results belong together, and what a device computes: the attention of its batch entries, query heads and queries to all
keys of these, at their indices in the whole problem. What several devices add to is summed over them: the gradients of
keys and values over the axes that shard queries, those of a bias over the axes that shard its broadcast dims.

Inside `jax.shard_map` arrays are shards already, and the kernel is called as it is.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_fa.dims import Dims
from pallas_fa.part import Part
from pallas_fa.problem import Problem, abstract
from pallas_fa.scores import float_arrays

# The dims of an array, a letter each: B, T, S, N, K as everywhere, H and V head dims of keys and of values; "_" is a dim that
# no other array shares, such as a broadcast one; lower-case letters are axes that `jax.vmap` maps, the innermost map last.
_QUERY, _KEY, _VALUE, _OUT, _LSE = "BTNH", "BSKH", "BSKV", "BTNV", "BTN"
_WHOLE = "HSV"  # dims that every device needs all of, in the order in which they first appear in the arguments

Axes = tuple[str, ...]  # names of mesh axes, the major one first


def forward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(problem, q, k, v, score, mask) -> (out, lse)`, shared out to the devices that hold the arguments."""

    def run(problem, *operands):
        return _run_shared(kernel, problem, operands, (_OUT, _LSE))

    return run


def backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(problem, q, k, v, score, mask, out, lse, d_out, d_lse) -> (dq, dk, dv, d_arrays)`, shared out likewise."""

    def run(problem, *operands):
        score = operands[3]
        return _run_shared(kernel, problem, operands, (_QUERY, _KEY, _VALUE, tuple(map(_letters, float_arrays(score)))))

    return run


def _run_shared(kernel, problem, operands, results):
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or jax.device_count() == 1:
        return kernel(problem, *operands)
    q, k, v, score, mask, *residuals = operands
    arguments = _QUERY, _KEY, _VALUE, *jax.tree.map(_letters, (score, mask)), *(_OUT, _LSE, _OUT, _LSE)[: len(residuals)]
    leaves, structure = jax.tree.flatten(operands)
    call = _Call(kernel, problem, tuple(jax.tree.leaves(arguments)), tuple(jax.tree.leaves(results)), structure)
    return jax.tree.unflatten(jax.tree.structure(results), _mappable(call, *leaves))


def _letters(x):
    """The letters of an array of a mask or a score, [B|1, N|1, T|1, S|1]."""
    return "".join(letter if size > 1 else "_" for letter, size in zip("BNTS", x.shape, strict=True))


def _mappable(call, *leaves):
    """`call` with a rule for `vmap`, which custom_partitioning has not: every device maps its own kernel."""
    run = custom_vmap(functools.partial(_partitionable, call))

    @run.def_vmap
    def rule(axis_size, is_mapped, *leaves):
        results = _mappable(call.mapped(is_mapped), *leaves)
        return results, [True] * len(results)

    return run(*leaves)


def _partitionable(call, *leaves):
    """`call` with what XLA has to know to share it out."""
    traced = jax.make_jaxpr(call.alone)(*leaves)
    constants = _fingerprint(traced), *traced.consts

    def alone(constants, *leaves):
        return jax.core.eval_jaxpr(traced.jaxpr, constants[1:], *leaves)

    run = custom_partitioning(alone)
    rule = call.sharding_rule(constants)
    run.def_partition(call.partition, sharding_rule=rule, need_replication_factors=tuple(_WHOLE))
    return run(constants, *leaves)


def _fingerprint(traced) -> np.ndarray:
    """int32 [8], different for different computations.

    In a program for several devices there is nothing of the kernel until XLA asks for it. JAX's compilation cache on disk
    would take a program with another mask for the same one; an argument that differs tells them apart.
    """
    return np.frombuffer(hashlib.sha256(str(traced).encode()).digest(), np.int32)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel, its problem, and the letters of its arguments and results, flattened."""

    kernel: Callable[..., Any]
    problem: Problem
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    structure: Any
    maps: str = ""

    def mapped(self, is_mapped) -> "_Call":
        """This call under one more `vmap`."""
        letter = string.ascii_lowercase[len(self.maps)]
        arguments = (letter * bool(m) + letters for m, letters in zip(is_mapped, self.arguments, strict=True))
        results = (letter + letters for letters in self.results)
        return dataclasses.replace(
            self, arguments=tuple(arguments), results=tuple(results), maps=self.maps + letter
        )

    def _under_maps(self, fn):
        for letter in self.maps:
            fn = jax.vmap(fn, [0 if letter in letters else None for letters in self.arguments])
        return fn

    # ---- on one device ----

    def alone(self, *leaves):
        """The results, computed by one device."""

        def one(*leaves):
            return jax.tree.leaves(self.kernel(self.problem, *jax.tree.unflatten(self.structure, leaves)))

        return self._under_maps(one)(*leaves)

    # ---- on several ----

    def sharding_rule(self, constants) -> str:
        """Which dims are sharded alike, for Shardy."""
        unshared = itertools.count()
        arguments = *("_" * x.ndim for x in constants), *self.arguments

        def factors(letters):
            return " ".join(f"u{next(unshared)}" if letter == "_" else letter for letter in letters)

        rule = " -> ".join(", ".join(map(factors, x)) for x in (arguments, self.results))
        return rule.replace("K", "N") if self.problem.group == 1 else rule

    def partition(self, mesh, arguments, results):
        """Called by XLA: (mesh, what a device computes, shardings of the results, shardings of the arguments)."""
        constants, *arguments = arguments
        where = self._where(mesh, arguments, results)

        def shardings(layouts):
            return [
                NamedSharding(mesh, PartitionSpec(*(where.get(letter) or None for letter in letters)))
                for letters in layouts
            ]

        def shard(constants, *leaves):
            return self._under_maps(functools.partial(self._shard, mesh, where))(*leaves)

        everywhere = tuple(NamedSharding(mesh, PartitionSpec()) for _ in constants)
        return mesh, shard, shardings(self.results), (everywhere, *shardings(self.arguments))

    def _where(self, mesh, arguments, results) -> dict[str, Axes]:
        """Over which mesh axes each dim is sharded: as the first result is, out or dq, which lies as the queries do."""
        dims = self.problem.dims
        found = _axes_of(self.results[0], results[0])
        q, k, v = (_axes_of(letters, x) for letters, x in zip(self.arguments[:3], arguments[:3], strict=True))
        sizes = dict(zip(self.results[0], results[0].shape, strict=True))
        where = {x: _dividing(mesh, axes, sizes[x]) for x, axes in found.items() if x not in _WHOLE}
        taken = set(itertools.chain(*where.values()))
        if not where["N"] and not taken & set(k["K"]):  # only the keys' heads are sharded: share the work as they are
            where["N"] = _dividing(mesh, k["K"], dims.N)
        where["K"] = _dividing(mesh, where["N"], self.problem.K)
        if "V" in self.results[0]:  # forward: what goes wrong is said once
            for name, found, letter in (("query", q, "H"), ("key", k, "H"), ("value", v, "V")):
                _check_whole(name, found, letter)
            for name, found in (("key", k), ("value", v)):
                _check_whole(name, found, "S", allowed=where["T"])
        return where

    def _shard(self, mesh, where, *leaves):
        """The results of one device, from its shards of the arguments."""
        problem, dims = self.problem, self.problem.dims
        sizes = {"B": dims.B, "T": dims.T, "N": dims.N, "K": problem.K}
        size = {x: whole // _count(mesh, where[x]) for x, whole in sizes.items()}
        start = {x: lax.axis_index(where[x]) * size[x] if where[x] else 0 for x in sizes}
        # Of the key heads at hand, those that the query heads read: `together` of these, one after the other, read one.
        together = math.gcd(problem.group, size["N"])
        heads = (start["N"] + together * jnp.arange(size["N"] // together)) // problem.group - start["K"]
        read_all = where["K"] == where["N"]

        q, k, v, score, mask, *residuals = jax.tree.unflatten(self.structure, leaves)
        part = Part((start["B"], start["N"], start["T"], 0), (size["B"], size["N"], size["T"], dims.S))
        score, mask = (tree and tree.moved(part) for tree in (score, mask))
        if not read_all:
            k, v = (jnp.take(x, heads, axis=2) for x in (k, v))
        problem = dataclasses.replace(
            problem,
            dims=Dims((size["B"],), size["T"], dims.S, size["N"]),
            K=k.shape[2],
            mask=abstract(mask),
            score=abstract(score),
        )
        results = jax.tree.leaves(self.kernel(problem, q, k, v, score, mask, *residuals))

        def complete(letters, x):
            others = set(itertools.chain(*where.values())) - set(itertools.chain(*(where.get(i, ()) for i in letters)))
            if not others:
                return x
            total = x.astype(problem.acc_dtype)
            if "K" in letters and not read_all:
                shape = (*x.shape[:2], size["K"], x.shape[3])
                total = jnp.zeros(shape, total.dtype).at[:, :, heads].add(total)
            return lax.psum(total, tuple(sorted(others))).astype(x.dtype)

        return [complete(letters, x) for letters, x in zip(self.results, results, strict=True)]


def _axes_of(letters, x) -> dict[str, Axes]:
    """Over which mesh axes each dim of an array is sharded."""
    as_tuple = lambda axes: () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    return {letter: as_tuple(axes) for letter, axes in zip(letters, x.sharding.spec, strict=True)}


def _count(mesh, axes):
    """The number of shards over these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _dividing(mesh, axes, size):
    """As many of `axes`, from the first on, as share `size` evenly."""
    for n in range(len(axes), -1, -1):
        if size % _count(mesh, axes[:n]) == 0:
            return axes[:n]


def _check_whole(name, axes_of, letter, allowed=()):
    """Raises where `name` is sharded along a dim that every device needs all of, over an axis that is not `allowed`."""
    for axis in axes_of[letter]:
        if axis in allowed:
            continue
        if letter == "S":
            raise ValueError(
                f"{name} is sharded over mesh axis {axis!r} along its length S, and the query's length T is not: every device"
                " would gather all keys and values, only to compute what the others compute. Shard T of the query over"
                f" {axis!r} too (keys and values are then gathered, queries are not), or use"
                " pallas_fa.context_parallel.ring_attention inside jax.shard_map, which gathers nothing."
            )
        raise ValueError(
            f"{name} is sharded over mesh axis {axis!r} along its head dim, of which a kernel needs all. Shard its heads"
            f" instead, or its batch, with jax.lax.with_sharding_constraint({name}, PartitionSpec(...)); or name"
            " implementation='xla', which XLA partitions along any dim."
        )
