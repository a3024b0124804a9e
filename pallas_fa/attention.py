"""Composes a problem, the backend chosen for it, its derivatives, and the devices of a mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
from jax.typing import ArrayLike

from pallas_fa.arguments import Arguments
from pallas_fa.autodiff import forward_mode, recompute_by_rows, vjp
from pallas_fa.backends import reference
from pallas_fa.backends.choice import Choice, choose
from pallas_fa.backends.xla import tangents
from pallas_fa.masks import Mask
from pallas_fa.problem import Operands, Problem, Residuals, normalise
from pallas_fa.sharding import partitioned, platforms


@dataclasses.dataclass(frozen=True)
class Attention:
    """A problem and the backend chosen for it: the rules from which `autodiff` builds a function. Hashable."""

    problem: Problem
    choice: Choice

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """Returns (out [B, T, N, Hv], lse [B, T, N])."""
        return self._run(self.choice.backend, lambda backend: backend.forward, partitioned.forward, operands)

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """Returns the gradients of `operands.differentiable`."""
        run = lambda backend: backend.backward
        return self._run(self.choice.gradients, run, partitioned.backward, residuals, d_out, d_lse)

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """Returns what `forward` does, in plain JAX and O(T) memory; differentiable any number of times."""
        return recompute_by_rows.attention(reference.attention, self.problem, operands)

    def tangents(self, operands: Operands, lse: Any, operand_tangents: Any) -> tuple[Any, Any]:
        """Returns the tangents of out and lse from those of `operands.differentiable`, where None means zero."""
        return tangents.attention(self.problem, operands, lse, operand_tangents)

    def _run(self, backend, direction, partition, *args):
        """Runs one direction of `backend`; a kernel is partitioned over devices, and another backend runs elsewhere.

        Args:
          backend: a `Backend`.
          direction: maps a backend to its forward or its backward.
          partition: `partitioned.forward` or `partitioned.backward`.
          *args: the arguments of the direction, after the problem.
        """
        if backend.platform is None:
            return direction(backend)(self.problem, *args)
        kernel = functools.partial(partition(direction(backend)), self.problem)
        other = self.choice.elsewhere
        elsewhere = other and functools.partial(direction(other), self.problem)
        message = (
            f"implementation={backend.name!r} was named, but the program is lowered for a platform that it does not run on."
            f" It needs {backend.needs}. Run it there, name ({backend.name!r}, 'xla') to use XLA elsewhere, or leave"
            " implementation=None."
        )
        return platforms.only_on(backend.platform, kernel, elsewhere, message)(*args)


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    implementation: str | Sequence[str] | None = None,
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [*B, T, N, Hv], lse [*B, T, N]) for the arguments of `dot_product_attention`."""
    problem, operands = normalise(query, key, value, bias, mask, **arguments)
    return run(problem, operands, implementation)


def run(
    problem: Problem, operands: Operands, implementation: str | Sequence[str] | None
) -> tuple[jax.Array, jax.Array]:
    """Returns what `attend` does, for arguments that `normalise` has checked; `implementation` as there."""
    attention = Attention(problem, choose(problem, implementation))
    if attention.choice.backend.plain:
        out, lse = attention.forward(operands)
    elif problem.forward_mode:
        out, lse = forward_mode.attention(attention, operands)
    else:
        out, lse = vjp.attention(attention, operands)
    out, lse = (x.reshape(problem.dims.batch + x.shape[1:]) for x in (out, lse))
    return out, lse
