"""`DeviceShard`: the batch entries, query heads and queries of sharded attention that one device computes, with all keys.

Each dim of an array has a letter: B, T, S, N, K as everywhere, H and V the head dims of keys and values, D the diagonals
of an array that spans them. "_" is a dim that is never sharded, such as a broadcast one. Lower-case letters are dims that
`jax.vmap` maps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from pallas_fa.operands import diagonals
from pallas_fa.operands.layout import Layout, ordered
from pallas_fa.operands.part import Part
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.sharding.mesh_axes import Axes, SubAxes, dividing_axes, shard_count

QUERY, KEY, VALUE, OUT, LSE = "BTNH", "BSKH", "BSKV", "BTNV", "BTN"
UNSHARDED = "HSVD"  # dims that every device needs whole, in their order in the arguments


def letters_of(x: Any) -> str:
    """Returns the letters of an array of a mask or a score.

    It is [B|1, N|1, T|1, S|1] and dims of its own, or [B|1, N|1, T + S - 1].
    """
    letters = "BND" if diagonals.spans(x) else "BNTS".ljust(x.ndim, "_")
    return "".join(letter if size > 1 else "_" for letter, size in zip(letters, x.shape, strict=True))


def letters_of_operands(operands: Operands, layout: Layout = "BTNH") -> Operands:
    """Returns `operands` with each array replaced by its letters."""
    letters = jax.tree.map(letters_of, operands._replace(q=None, k=None, v=None))
    q, k, v = in_layout(layout, QUERY, KEY, VALUE)
    return letters._replace(q=q, k=k, v=v)


def in_layout(layout: Layout, *letters: str) -> tuple[str, ...]:
    """Returns letters such as `QUERY` in the order of `layout`."""
    return tuple("".join(ordered(layout, x)) for x in letters)


@dataclasses.dataclass(frozen=True)
class DeviceShard:
    """The shard of a problem that each device of a mesh computes.

    Attributes:
      mesh: the devices.
      axes: the mesh axes over which each dim, by its letter, is sharded.
    """

    mesh: Mesh
    axes: dict[str, Axes]

    @classmethod
    def of(
        cls, mesh: Mesh, problem: Problem, queries: dict[str, Axes], keys: dict[str, Axes], maps: dict[str, int]
    ) -> "DeviceShard":
        """Chooses the shards, which follow the sharding of the result.

        Args:
          mesh: the devices.
          problem: the whole problem.
          queries: mesh axes that shard each dim of the result, by letter.
          keys: mesh axes that shard each dim of the keys, by letter.
          maps: sizes of the dims that `jax.vmap` maps, by letter.
        """
        sizes = {**maps, "B": problem.dims.B, "T": problem.dims.T, "N": problem.dims.N}
        axes = {letter: dividing_axes(mesh, queries[letter], size) for letter, size in sizes.items()}
        if not axes["N"] and not set(keys["K"]) & set(itertools.chain(*axes.values())):
            # Only the heads of the keys are sharded: follow them rather than gather the keys.
            axes["N"] = dividing_axes(mesh, keys["K"], problem.K)
        axes["K"] = dividing_axes(mesh, axes["N"], problem.K)
        return cls(mesh, axes)

    def spec(self, letters: str) -> list[Axes | None]:
        """Returns the axes that shard each dim of an array, as PartitionSpec takes them."""
        return [self.axes.get(letter) or None for letter in letters]

    def run(self, kernel: Callable[..., Any], problem: Problem, arguments: Any, results: tuple[str, ...]) -> list[Any]:
        """Computes this device's shards of the results of `kernel(problem, *arguments)`.

        Args:
          kernel: the forward or backward of a backend.
          problem: the whole problem.
          arguments: this device's shards of the arguments; the first is `Operands` or `Residuals`.
          results: the letters of each result.
        """
        first, *rest = arguments
        operands = first.operands if isinstance(first, Residuals) else first
        dims, axes = problem.dims, self.axes
        whole = {"B": dims.B, "T": dims.T, "N": dims.N, "K": problem.K}
        size = {letter: whole[letter] // shard_count(self.mesh, axes[letter]) for letter in whole}
        # Ints where the start is static, so that masks and scores need no arrays.
        start = {x: lax.axis_index(axes[x]) * size[x] if axes[x] else 0 for x in whole}

        part = Part((start["B"], start["N"], start["T"], 0), (size["B"], size["N"], size["T"], dims.S))
        bound = operands.score, operands.mask, operands.dropout
        score, mask, dropout = (x if x is None else x.moved(part) for x in bound)
        # Shards of arrays come as such, but for those that span the diagonals, which come whole.
        first_diagonal = diagonals.first(dims.T, start["T"], size["T"], 0)
        of_diagonals = dataclasses.replace(part, start=(0, 0, start["T"], 0), diagonal=first_diagonal)
        score = diagonals.replace(score, of_diagonals.cut)
        k, v, heads = operands.k, operands.v, None
        if axes["K"] != axes["N"]:  # this device holds key heads that its query heads do not read
            run_length = math.gcd(problem.group, size["N"])  # consecutive query heads that read one key head
            runs = jnp.arange(size["N"] // run_length, dtype=jnp.int32)
            heads = (start["N"] + run_length * runs) // problem.group - start["K"]
            axis = ordered(problem.layout, range(4)).index(2)
            k, v = (jnp.take(x, heads, axis=axis, mode="clip") for x in (k, v))  # all are in range
        local = operands._replace(k=k, v=v, score=score, mask=mask, dropout=dropout)
        first = first._replace(operands=local) if isinstance(first, Residuals) else local
        local_results = list(kernel(problem.with_operands(local), first, *rest))
        for i, letters in enumerate(results):
            if letters.endswith("D"):  # the gradient of an array that spans the diagonals
                whole = jnp.zeros((*local_results[i].shape[:2], dims.T + dims.S - 1), local_results[i].dtype)
                local_results[i] = of_diagonals.add(whole, local_results[i])
        return [
            self._sum(problem, letters, x, heads, size["K"]) for letters, x in zip(results, local_results, strict=True)
        ]

    def _sum(self, problem, letters, x, heads, K):
        """Sums a result over the mesh axes that shard the problem but not this result.

        `heads`: the key heads, of the K on this device, that its query heads read; None for all.
        """
        result_axes = itertools.chain(*(self.axes.get(letter, ()) for letter in letters))
        summed_axes = set(itertools.chain(*self.axes.values())).difference(result_axes)
        if not summed_axes:
            return x
        total = x.astype(problem.acc_dtype)
        if "K" in letters and heads is not None:
            axis = letters.index("K") - len(letters)  # letters of mapped dims come first
            shape = (*x.shape[:axis], K, *x.shape[axis + 1 :])
            total = jnp.zeros(shape, total.dtype).at[(..., heads, *(slice(None),) * (-axis - 1))].add(total)
        return lax.psum(total, tuple(sorted(summed_axes))).astype(x.dtype)


def check(q: dict[str, Axes], k: dict[str, Axes], v: dict[str, Axes], shard: DeviceShard) -> None:
    """Raises ValueError where the arguments are sharded along a dim that every device needs whole.

    Args:
      q: mesh axes that shard each dim of the queries, by letter.
      k: those of the keys.
      v: those of the values.
      shard: what each device computes.
    """
    for letter, axes in q.items():
        if isinstance(axes, SubAxes) and letter in "BTN":
            raise ValueError(
                f"query is sharded over parts of the mesh axes {tuple(axes)} along dim {letter} of [B, T, N, H], which they"
                " do not divide evenly (as when heads and head dim are sharded as one dim, and the axis has more devices"
                f" than there are heads). {_CONSTRAIN.format(name='query')}"
            )
    for name, axes_of, letter in (("query", q, "H"), ("key", k, "H"), ("value", v, "V")):
        if axes_of[letter] and not isinstance(axes_of[letter], SubAxes):
            raise ValueError(
                f"{name} is sharded over the mesh axes {axes_of[letter]} along its head dim, of which a kernel needs all."
                f" {_CONSTRAIN.format(name=name)}"
            )
    for name, axes_of in (("key", k), ("value", v)):
        unmatched = set(axes_of["S"]).difference(shard.axes["T"])
        if unmatched:
            raise ValueError(
                f"{name} is sharded over the mesh axes {tuple(sorted(unmatched))} along its length S, and the query's length"
                " T is not: every device would gather all keys, only to compute what the others compute. Shard T of the"
                " query over them as well (keys and values are then gathered, queries are not), or use"
                " pallas_fa.context_parallel.ring_attention inside jax.shard_map, which gathers nothing."
            )


_CONSTRAIN = (
    "Shard its batch or its heads, with jax.lax.with_sharding_constraint({name}, ...); or name implementation='xla', which"
    " takes any sharding."
)
