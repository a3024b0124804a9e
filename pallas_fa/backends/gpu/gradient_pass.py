"""Which gradients one backward kernel gives, and the roles of its operands."""

import dataclasses
from typing import Any, NamedTuple


class ByRole(NamedTuple):
    """Something of each operand (an array, its tiles), by the roles that `GradientPass` describes."""

    stationary_qk: Any
    stationary_pv: Any
    streamed_qk: Any
    streamed_pv: Any


@dataclasses.dataclass(frozen=True)
class GradientPass:
    """One kernel that computes all logits again, and the gradients that it gives, among "dq", "dk" and "dv".

    A CTA holds a block of one sequence, the stationary one, and loops over tiles of the other, the streamed one. Keys are
    stationary for dK and dV, queries for dQ alone. The products of queries and keys are those of the operands
    `stationary_qk` and `streamed_qk` (K and Q, or Q and K); dP = dO V^T is that of `stationary_pv` and `streamed_pv` (V
    and dO, or dO and V). Logits are held as [stationary, streamed].
    """

    gives: tuple[str, ...]

    @property
    def keys_stationary(self) -> bool:
        """Whether CTAs hold keys."""
        return self.gives != ("dq",)

    @property
    def fused(self) -> bool:
        """Whether dQ is added up in device memory, by a kernel that holds keys."""
        return self.keys_stationary and "dq" in self.gives

    @property
    def stored(self) -> tuple[str, ...]:
        """The gradients that each CTA stores for its block."""
        return tuple(name for name in self.gives if not (self.fused and name == "dq"))

    @property
    def accumulates_qk(self) -> bool:
        """Whether the gradient of `stationary_qk`, dS times `streamed_qk`, accumulates in registers."""
        return self.gives != ("dv",)

    @property
    def accumulates_pv(self) -> bool:
        """Whether that of `stationary_pv`, P times `streamed_pv`, does."""
        return "dv" in self.gives

    def by_role(self, q: Any, k: Any, v: Any, d_out: Any) -> ByRole:
        """Returns these by role."""
        return ByRole(k, v, q, d_out) if self.keys_stationary else ByRole(q, d_out, k, v)
