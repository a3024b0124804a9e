"""Where a problem, a backend, its derivatives and the devices of a mesh come together."""

import dataclasses
import functools
from typing import Any, Unpack

from pallas_fa.arguments import Arguments
from pallas_fa.autodiff import vjp
from pallas_fa.backends.choice import Choice, choose
from pallas_fa.problem import Operands, Problem, Residuals, normalise


@dataclasses.dataclass(frozen=True)
class Attention:
    """A problem on the backend that was chosen for it: what `autodiff` makes a differentiable function of. Hashable."""

    problem: Problem
    choice: Choice

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """(out [B, T, N, Hv], lse [B, T, N])."""
        return self._run(self.choice.backend, "forward", operands)

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """The gradients of `operands.differentiable`."""
        return self._run(self.choice.gradients, "backward", residuals, d_out, d_lse)

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """As `forward`, in plain JAX and O(T) memory, which may be differentiated any number of times."""
        from pallas_fa.autodiff import by_rows
        from pallas_fa.backends import reference

        return by_rows.attention(reference.attention, self.problem, operands)

    def tangents(self, operands: Operands, lse: Any, dots: Any) -> tuple[Any, Any]:
        """The tangents of out and lse; `dots`: those of `operands.differentiable`, None for one that does not move."""
        from pallas_fa.backends.xla import tangents

        return tangents.attention(self.problem, operands, lse, dots)

    def _run(self, backend, direction, *args):
        """Runs `backend`; one that runs on one platform only is partitioned, and another runs elsewhere."""
        if backend.platform is None:
            return getattr(backend, direction)(self.problem, *args)
        from pallas_fa.sharding import partitioned, platforms  # only kernels need them: `import pallas_fa` stays fast

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
        from pallas_fa.autodiff import forward_mode

        out, lse = forward_mode.attention(attention, operands)
    else:
        out, lse = vjp.attention(attention, operands)
    if len(problem.dims.batch) != 1:
        out, lse = (x.reshape(problem.dims.batch + x.shape[1:]) for x in (out, lse))
    return out, lse
