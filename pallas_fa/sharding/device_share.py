"""What one device computes of attention whose arrays are sharded: its batch entries, query heads and queries, with all keys.

The dims of an array have a letter each: B, T, S, N, K as everywhere, H and V the head dims of keys and of values; "_" is a
dim that is sharded over nothing, such as a broadcast one. Lower-case letters are dims that `jax.vmap` maps.
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

from pallas_fa.operands.part import Part
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.sharding.mesh_axes import Axes, PartOfAnAxis, count, dividing

QUERY, KEY, VALUE, OUT, LSE = "BTNH", "BSKH", "BSKV", "BTNV", "BTN"
WHOLE = "HSV"  # dims of which every device needs all, in the order in which they come in the arguments


def letters_of(x: Any) -> str:
    """The letters of an array of a mask or a score, [B|1, N|1, T|1, S|1]."""
    return "".join(letter if size > 1 else "_" for letter, size in zip("BNTS", x.shape, strict=True))


def letters_of_operands(operands: Operands) -> Operands:
    """The letters of each array, in its place."""
    letters = jax.tree.map(letters_of, operands._replace(q=None, k=None, v=None))
    return letters._replace(q=QUERY, k=KEY, v=VALUE)


@dataclasses.dataclass(frozen=True)
class DeviceShare:
    """The mesh axes over which each dim, by its letter, is shared out."""

    mesh: Mesh
    axes: dict[str, Axes]

    @classmethod
    def of(cls, mesh: Mesh, problem: Problem, queries: dict[str, Axes], keys: dict[str, Axes], maps: dict[str, int]):
        """The share where the result lies as `queries` and the keys as `keys` say; `maps`: sizes of dims that vmap maps."""
        sizes = {**maps, "B": problem.dims.B, "T": problem.dims.T, "N": problem.dims.N}
        axes = {letter: dividing(mesh, queries[letter], size) for letter, size in sizes.items()}
        if not axes["N"] and not set(keys["K"]) & set(itertools.chain(*axes.values())):
            axes["N"] = dividing(mesh, keys["K"], problem.K)  # rather than gather keys whose heads alone are sharded
        axes["K"] = dividing(mesh, axes["N"], problem.K)
        return cls(mesh, axes)

    def of_dims(self, letters: str) -> list[Axes | None]:
        """The axes that shard the dims of an array, as a PartitionSpec has them."""
        return [self.axes.get(letter) or None for letter in letters]

    def run(self, kernel: Callable[..., Any], problem: Problem, arguments: Any, results: tuple[str, ...]) -> list[Any]:
        """This device's shards of `kernel(problem, *arguments)`, of its shards of the arguments.

        The first argument is `Operands`, or `Residuals` with these. `results`: the letters of each.
        """
        first, *rest = arguments
        operands = first.operands if isinstance(first, Residuals) else first
        dims, axes = problem.dims, self.axes
        whole = {"B": dims.B, "T": dims.T, "N": dims.N, "K": problem.K}
        size = {letter: whole[letter] // count(self.mesh, axes[letter]) for letter in whole}
        # An int where it is known: masks and scores stay without arrays then.
        start = {x: lax.axis_index(axes[x]) * size[x] if axes[x] else 0 for x in whole}

        part = Part((start["B"], start["N"], start["T"], 0), (size["B"], size["N"], size["T"], dims.S))
        score, mask = (x if x is None else x.moved(part) for x in (operands.score, operands.mask))
        k, v, heads = operands.k, operands.v, None
        if axes["K"] != axes["N"]:  # key heads of several devices are here: take those that these query heads read
            together = math.gcd(problem.group, size["N"])  # as many query heads in a row read one key head
            heads = (start["N"] + together * jnp.arange(size["N"] // together)) // problem.group - start["K"]
            k, v = (jnp.take(x, heads, axis=2, mode="clip") for x in (k, v))  # all are in range
        local = operands._replace(k=k, v=v, score=score, mask=mask)
        first = first._replace(operands=local) if isinstance(first, Residuals) else local
        found = kernel(problem.with_operands(local), first, *rest)
        return [self._sum(problem, letters, x, heads, size["K"]) for letters, x in zip(results, found, strict=True)]

    def _sum(self, problem, letters, x, heads, K):
        """A result, summed over the axes that share out the work, but not this result."""
        own = itertools.chain(*(self.axes.get(letter, ()) for letter in letters))
        others = set(itertools.chain(*self.axes.values())).difference(own)
        if not others:
            return x
        total = x.astype(problem.acc_dtype)
        if "K" in letters and heads is not None:
            total = jnp.zeros((*x.shape[:2], K, x.shape[3]), total.dtype).at[:, :, heads].add(total)
        return lax.psum(total, tuple(sorted(others))).astype(x.dtype)


def check(q: dict[str, Axes], k: dict[str, Axes], v: dict[str, Axes], share: DeviceShare) -> None:
    """Raises where the arguments are sharded along a dim that every device needs all of."""
    for letter, axes in q.items():
        if isinstance(axes, PartOfAnAxis) and letter in "BTN":
            raise ValueError(
                f"query is sharded over parts of the mesh axes {tuple(axes)} along dim {letter} of [B, T, N, H], which they"
                " do not share evenly (as when heads and head dim are sharded as one dim, and the axis has more devices than"
                f" there are heads). {_CONSTRAIN.format(name='query')}"
            )
    for name, axes_of, letter in (("query", q, "H"), ("key", k, "H"), ("value", v, "V")):
        if axes_of[letter] and not isinstance(axes_of[letter], PartOfAnAxis):
            raise ValueError(
                f"{name} is sharded over the mesh axes {axes_of[letter]} along its head dim, of which a kernel needs all."
                f" {_CONSTRAIN.format(name=name)}"
            )
    for name, axes_of in (("key", k), ("value", v)):
        alone = set(axes_of["S"]).difference(share.axes["T"])
        if alone:
            raise ValueError(
                f"{name} is sharded over the mesh axes {tuple(sorted(alone))} along its length S, and the query's length T"
                " is not: every device would gather all keys, only to compute what the others compute. Shard T of the"
                " query over them as well (keys and values are then gathered, queries are not), or use"
                " pallas_fa.context_parallel.ring_attention inside jax.shard_map, which gathers nothing."
            )


_CONSTRAIN = (
    "Shard its batch or its heads, with jax.lax.with_sharding_constraint({name}, ...); or name implementation='xla', which"
    " takes any sharding."
)
