"""What the derivatives of attention are made of."""

from typing import Any, Protocol

from pallas_fa.problem import Operands, Residuals


class Rules(Protocol):
    """Attention and its backward. Hashable, since programs that differ in it are compiled apart."""

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """(out [B, T, N, Hv], lse [B, T, N])."""
        ...

    def backward(self, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """The gradients of `operands.differentiable`."""
        ...

    def recompute(self, operands: Operands) -> tuple[Any, Any]:
        """As `forward`, by operations that JAX can differentiate any number of times."""
        ...


class ForwardModeRules(Protocol):
    """Attention and its tangents. Hashable."""

    def forward(self, operands: Operands) -> tuple[Any, Any]:
        """(out [B, T, N, Hv], lse [B, T, N])."""
        ...

    def tangents(self, operands: Operands, lse: Any, dots: Any) -> tuple[Any, Any]:
        """The tangents of out and lse; `dots`: those of `operands.differentiable`, None for one that does not move."""
        ...
