"""The functions from which `autodiff` builds differentiable attention."""

from typing import Any, Protocol

from pallas_fa.problem import Operands, Residuals


class Rules(Protocol):
    """Attention and its backward. Hashable: programs that differ in it compile separately."""

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """Returns (out [B, T, N, Hv], lse [B, T, N])."""
        ...

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """Returns the gradients of `operands.differentiable`; d_out and d_lse are the cotangents of out and lse."""
        ...

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """Returns what `forward` does, by operations that JAX can differentiate any number of times."""
        ...


class ForwardModeRules(Protocol):
    """Attention and its tangents. Hashable."""

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """Returns (out [B, T, N, Hv], lse [B, T, N])."""
        ...

    def tangents(self, operands: Operands, lse: Any, operand_tangents: Any) -> tuple[Any, Any]:
        """Returns the tangents of out and lse from those of `operands.differentiable`, where None means zero."""
        ...
