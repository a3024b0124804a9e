"""The table of the forward kernel's tiles."""

from typing import Any, NamedTuple

from pallas_fa.backends.gpu.tables import Row, Table, at_least, up_to
from pallas_fa.backends.mma.config import ForwardConfig


class ForwardFacts(NamedTuple):
    """What the choice of tiles depends on.

    head_dim: of q, k and v, the largest, rounded up to a multiple of 64.
    keys: of a head.
    shared_memory: KB that a CTA may have.
    """

    head_dim: int
    keys: int
    shared_memory: int


_H64: dict[str, Any] = dict(head_dim=up_to(64))
_H128: dict[str, Any] = dict(head_dim=up_to(128))
_LARGE: dict[str, Any] = dict(shared_memory=at_least(160))
_SMALL = ForwardConfig(1, 64, 64), ForwardConfig(1, 64, 32), ForwardConfig(1, 64, 16)

# The tiles to try, the best first.
TILES = Table(
    "forward/mma-tiles",
    Row((ForwardConfig(1, 128, 64, stages=2), *_SMALL), **_H64),
    Row((ForwardConfig(1, 128, 64), ForwardConfig(1, 128, 32), *_SMALL), **_H128, **_LARGE),
    Row((ForwardConfig(1, 128, 32), *_SMALL), **_H128),
    # With few CTAs of a head, those of more heads are to run concurrently: the last ones would else be of few.
    Row((ForwardConfig(2, 64, 64, l2_head_group=16), *_SMALL), keys=up_to(1024), **_LARGE),
    Row((ForwardConfig(2, 64, 64), *_SMALL), **_LARGE),
    Row(_SMALL),
)


def forward_configs(facts: ForwardFacts) -> tuple[ForwardConfig, ...]:
    """Returns the tiles to try, the best first."""
    return TILES.find(facts)
