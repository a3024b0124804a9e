"""Ping-pong scheduling: compute warpgroups issue their matmuls in turn, so that one's softmax overlaps another's matmuls."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.named_barriers import WARPGROUP, NamedBarrier, Parties

_NAME = "ping_pong"


def parties(wgs: int) -> dict[str, Parties]:
    """Returns barriers of `wgs` warpgroups: at barrier i, warpgroup i waits until the one before has issued its matmuls."""
    return {_NAME: Parties(wgs, arrivals=1, arriving=WARPGROUP, waiting=WARPGROUP)}


class PingPong(NamedTuple):
    """The turns of warpgroup `wg`; without `barrier` it issues matmuls at any time."""

    barrier: NamedBarrier | None
    wg: Any

    @classmethod
    def of(cls, barriers: Mapping[str, NamedBarrier], wg: Any) -> "PingPong":
        """Returns those by `barriers`, among which are `parties` where ping-pong scheduling is on."""
        return cls(barriers.get(_NAME), wg)

    def run(self, body: Callable[[], Any]) -> None:
        """Calls body(), in which each warpgroup has as many turns; warpgroup 0 has the first one."""
        barrier = self.barrier
        if barrier is None:
            body()
            return
        pl.when(self.wg == barrier.parties.count - 1)(lambda: barrier.arrive(0))
        body()
        pl.when(self.wg == 0)(lambda: barrier.wait(0))  # for the last arrival, which no turn waited for

    def wait_to_issue(self) -> None:
        """Waits for this warpgroup's turn."""
        if self.barrier is not None:
            self.barrier.wait(self.wg)

    def let_next_issue(self) -> None:
        """Ends it: all matmuls of the turn are issued."""
        if self.barrier is not None:
            self.barrier.arrive(lax.rem(self.wg + 1, self.barrier.parties.count))
