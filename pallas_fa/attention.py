"""Where a problem, a backend, its derivatives and the devices of a mesh come together."""

import dataclasses
import functools
from typing import Any, Unpack

from pallas_fa.arguments import Arguments
from pallas_fa.autodiff import by_rows, forward_mode, vjp
from pallas_fa.backends import reference
from pallas_fa.backends.choice import Choice, choose
from pallas_fa.backends.xla import tangents
from pallas_fa.problem import Operands, Problem, Residuals, normalise
from pallas_fa.sharding import partitioned, platforms


@dataclasses.dataclass(frozen=True)
class Attention:
    """A problem on the backend that was chosen for it: what `autodiff` makes a differentiable function of. Hashable."""

    problem: Problem
    choice: Choice

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """(out [B, T, N, Hv], lse [B, T, N])."""
        return self._run(self.choice.backend, lambda backend: backend.forward, partitioned.forward, operands)

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """The gradients of `operands.differentiable`."""
        run = lambda backend: backend.backward
        return self._run(self.choice.gradients, run, partitioned.backward, residuals, d_out, d_lse)

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """As `forward`, in plain JAX and O(T) memory, which may be differentiated any number of times."""
        return by_rows.attention(reference.attention, self.problem, operands)

    def tangents(self, operands: Operands, lse: Any, dots: Any) -> tuple[Any, Any]:
        """The tangents of out and lse; `dots`: those of `operands.differentiable`, None for one that does not move."""
        return tangents.attention(self.problem, operands, lse, dots)

    def _run(self, backend, direction, shared_out, *args):
        """`direction` of `backend`; where that runs on one platform only, shared out to devices, and another elsewhere."""
        if backend.platform is None:
            return direction(backend)(self.problem, *args)
        kernel = functools.partial(shared_out(direction(backend)), self.problem)
        other = self.choice.elsewhere
        elsewhere = other and functools.partial(direction(other), self.problem)
        message = (
            f"implementation={backend.name!r} was named, but the program is lowered for a platform that it does not run on."
            f" It needs {backend.needs}. Run it there, name ({backend.name!r}, 'xla') to use XLA elsewhere, or leave"
            " implementation=None."
        )
        return platforms.only_on(backend.platform, kernel, elsewhere, message)(*args)


def attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: Any = None,
    **arguments: Unpack[Arguments],
) -> tuple[Any, Any]:
    """(out [*B, T, N, Hv], lse [*B, T, N]) of the arguments of `dot_product_attention`."""
    problem, operands = normalise(query, key, value, bias, mask, **arguments)
    return run(problem, operands, implementation)


def run(problem: Problem, operands: Operands, implementation: Any) -> tuple[Any, Any]:
    """As `attend`, of arguments that `normalise` has checked."""
    attention = Attention(problem, choose(problem, implementation))
    if attention.choice.backend.plain:
        out, lse = attention.forward(operands)
    elif problem.forward_mode:
        out, lse = forward_mode.attention(attention, operands)
    else:
        out, lse = vjp.attention(attention, operands)
    out, lse = (x.reshape(problem.dims.batch + x.shape[1:]) for x in (out, lse))
    return out, lse
