"""The table of the backward kernels' tiles."""

from typing import Any, NamedTuple

from pallas_fa.backends.gpu.tables import Row, Table, at_least, up_to
from pallas_fa.backends.mma.config import BackwardConfig, FusedBackwardConfig


class BackwardFacts(NamedTuple):
    """What the choice of tiles depends on.

    gives: the gradients of the pass.
    head_dim: of q, k and v, the largest, rounded up to a multiple of 64.
    shared_memory: KB that a CTA may have.
    """

    gives: tuple[str, ...]
    head_dim: int
    shared_memory: int


_ALL, _KEYS, _QUERIES = ("dk", "dv", "dq"), ("dk", "dv"), ("dq",)
_H64: dict[str, Any] = dict(head_dim=up_to(64))
_H128: dict[str, Any] = dict(head_dim=up_to(128))
_LARGE: dict[str, Any] = dict(shared_memory=at_least(160))
_SMALL = BackwardConfig(1, 64, 32, stages=1), BackwardConfig(1, 64, 16, stages=1)
_IN_REGISTERS = tuple(FusedBackwardConfig(2, 128, 16, stages, values_in_registers=True) for stages in (2, 1))

# The tiles to try, the best first.
TILES = Table(
    "backward/mma-tiles",
    # None for some: then there are passes for the gradients of keys and for those of queries.
    Row((FusedBackwardConfig(1, 128, 32, stages=1),), **_H64, gives=_ALL, **_LARGE),
    Row((FusedBackwardConfig(1, 128, 32), FusedBackwardConfig(1, 128, 32, stages=1)), **_H64, gives=_ALL),
    Row(
        (FusedBackwardConfig(2, 128, 32), FusedBackwardConfig(2, 128, 32, stages=1), *_IN_REGISTERS),
        **_H128,
        gives=_ALL,
        **_LARGE,
    ),
    Row(_IN_REGISTERS, **_H128, gives=_ALL),
    Row(
        (
            FusedBackwardConfig(2, 64, 32),
            FusedBackwardConfig(2, 64, 32, stages=1),
            FusedBackwardConfig(2, 64, 16, stages=1, values_in_registers=True),
        ),
        head_dim=up_to(256),
        gives=_ALL,
    ),
    Row((), gives=_ALL),
    Row((BackwardConfig(1, 128, 32), BackwardConfig(1, 64, 64, stages=1), *_SMALL), **_H64),
    Row((BackwardConfig(2, 64, 64), BackwardConfig(2, 64, 32), *_SMALL), **_H128, gives=_KEYS, **_LARGE),
    Row((BackwardConfig(1, 128, 32, stages=1), *_SMALL), **_H128, gives=_QUERIES, **_LARGE),
    Row((BackwardConfig(2, 64, 32), *_SMALL), **_H128),
    Row(_SMALL),
)


def backward_configs(facts: BackwardFacts) -> tuple[BackwardConfig | FusedBackwardConfig, ...]:
    """Returns the tiles to try, the best first."""
    return TILES.find(facts)
