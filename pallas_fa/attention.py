"""Composes a problem, the backend chosen for it, its derivatives, and the devices of a mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
from jax.typing import ArrayLike

from pallas_fa.arguments.keywords import Arguments
from pallas_fa.autodiff import vjp
from pallas_fa.backends.choice import Choice, choose
from pallas_fa.backends.record import forward_in_btnh, no_gradients
from pallas_fa.masks import Mask
from pallas_fa.operands.layout import transpose
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import Operands, Problem, Residuals, normalise


@dataclasses.dataclass(frozen=True)
class Attention:
    """A problem and the backend chosen for it: the rules from which `autodiff` builds a function. Hashable."""

    problem: Problem
    choice: Choice

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """Returns (out, [B, T, N, Hv] in the problem's layout, lse [B, T, N])."""
        return self._run(self.choice.backend, "forward", operands)

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """Returns the gradients of `operands.differentiable`."""
        if reason := no_gradients(self.problem):
            raise NotImplementedError(
                f"no gradients: {reason}. For gradients use dot_product_attention on whole sequences, of the queries' dtype;"
                " where the result is a constant, jax.lax.stop_gradient on the query says so."
            )
        if self.choice.gradients is None:
            raise NotImplementedError(
                f"no gradients with config.backward={self.problem.config.backward!r}: {self.choice.no_gradients}. Name"
                " other tiles, or leave config.backward None for the library's."
            )
        return self._of(residuals.operands)._run(self.choice.gradients, "backward", residuals, d_out, d_lse)

    # What few calls need is imported where it is needed: `import pallas_fa` stays fast.

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """Returns what `forward` does, in plain JAX and O(T) memory; differentiable any number of times."""
        from pallas_fa.autodiff import recompute_by_rows
        from pallas_fa.backends import reference

        by_rows = functools.partial(recompute_by_rows.attention, reference.attention)
        return forward_in_btnh(by_rows)(self.problem, operands)

    def tangents(self, operands: Operands, lse: Any, operand_tangents: Any) -> tuple[Any, Any]:
        """Returns the tangents of out and lse from those of `operands.differentiable`, where None means zero."""
        from pallas_fa.backends.xla import tangents

        q, k, v, *rest = operand_tangents
        dots = *(transpose(self.problem.layout, x) for x in (q, k, v)), *rest
        out_dot, lse_dot = tangents.attention(*self.problem.in_btnh(operands), lse, dots)
        return transpose(self.problem.layout, out_dot), lse_dot

    def _of(self, operands):
        """This attention of operands some of whose arrays may be fixed."""
        score = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands.score)
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, score=score))

    def _run(self, backend, direction, *args):
        """Runs one direction of `backend`; a kernel is partitioned over devices, and another backend runs elsewhere."""
        if backend.platform is None:
            return getattr(backend, direction)(self.problem, *args)
        from pallas_fa.sharding import partitioned, platforms

        kernel = functools.partial(getattr(partitioned, direction)(getattr(backend, direction)), self.problem)
        other = self.choice.elsewhere
        elsewhere = None if other is None else functools.partial(getattr(other, direction), self.problem)
        message = (
            f"implementation={backend.name!r} was named, but the program is lowered for a platform that it does not run on."
            f" It needs {backend.needs}. Run it there, name ({backend.name!r}, 'xla') to use XLA elsewhere, or leave"
            " implementation=None."
        )
        return platforms.only_on(backend.platform, kernel, elsewhere, message)(*args)


def attend(
    query: ArrayLike,
    key: ArrayLike | Paged,
    value: ArrayLike | Paged,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    implementation: str | Sequence[str] | None = None,
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [*B, T, N, Hv], lse [*B, T, N]) for the arguments of `dot_product_attention`, or keys in pages."""
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
        from pallas_fa.autodiff import forward_mode

        out, lse = forward_mode.attention(attention, operands)
    else:
        out, lse = vjp.attention(attention, operands)
    if len(problem.dims.batch) != 1:
        out, lse = (x.reshape(problem.dims.batch + x.shape[1:]) for x in (out, lse))
    return out, lse
