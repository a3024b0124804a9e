"""The table of tiles for few queries."""

from typing import Any, NamedTuple

from pallas_fa.backends.gpu.tables import Row, Table, at_least, up_to
from pallas_fa.backends.mma.config import DecodeConfig


class DecodeFacts(NamedTuple):
    """What the choice of tiles depends on.

    rows: queries of all heads of a key head, at most 64.
    head_dim: of q, k and v, the largest, rounded up to a multiple of 64.
    shared_memory: KB that a CTA may have.
    heads: key heads of all batch entries for each multiprocessor.
    kv_bits: of an element of keys and values, 8 or 16.
    """

    rows: int
    head_dim: int
    shared_memory: int
    heads: float = 0.0
    kv_bits: int = 16


_16: dict[str, Any] = dict(rows=up_to(16))
_32: dict[str, Any] = dict(rows=up_to(32))
_H128: dict[str, Any] = dict(head_dim=up_to(128))
_8_BITS: dict[str, Any] = dict(kv_bits=up_to(8))
_NARROW = "decode/narrow-keys"
_TWO_CTAS: dict[str, Any] = dict(shared_memory=at_least(227))  # with three stages at H=128 on a multiprocessor


def _tiles(rows: int, *sizes: tuple[int, int]) -> tuple[DecodeConfig, ...]:
    return tuple(DecodeConfig(rows, block_kv, stages) for block_kv, stages in sizes)


# The tiles to try, the best first; the later ones where arrays of masks and scores need the memory.
TILES = Table(
    "decode/mma-tiles",
    # Keys of 8 bits: twice as many in a step.
    Row(_tiles(16, (64, 2)), _NARROW, **_8_BITS, **_16, **_TWO_CTAS, head_dim=up_to(64), heads=at_least(3)),
    Row(_tiles(16, (128, 2), (64, 2)), _NARROW, **_8_BITS, **_16, **_H128, **_TWO_CTAS, heads=at_least(2)),
    Row(_tiles(16, (128, 3), (128, 2), (64, 2)), _NARROW, **_8_BITS, **_16, **_H128, **_TWO_CTAS),
    Row(_tiles(16, (128, 2), (64, 2)), _NARROW, **_8_BITS, **_16, **_TWO_CTAS),
    Row(_tiles(32, (128, 2), (64, 2)), _NARROW, **_8_BITS, **_32, **_TWO_CTAS),
    # Three CTAs on a multiprocessor where there are as many.
    Row(
        (*_tiles(16, (64, 2)), *_tiles(32, (32, 2))),
        "decode/mma-on-hopper",
        **_16,
        **_H128,
        **_TWO_CTAS,
        heads=at_least(3),
    ),
    Row((*_tiles(16, (64, 3), (64, 2)), *_tiles(32, (32, 2))), **_16, **_H128, **_TWO_CTAS),
    Row((*_tiles(16, (64, 2)), *_tiles(32, (32, 2))), **_16),
    Row(_tiles(32, (64, 3), (64, 2), (32, 2)), **_32, **_H128, **_TWO_CTAS),
    Row(_tiles(32, (64, 2), (32, 2)), **_32),
    Row(_tiles(64, (64, 3), (64, 2), (32, 2), (16, 2)), **_H128, **_TWO_CTAS),
    Row(_tiles(64, (64, 2), (32, 2), (16, 2))),
)


def decode_configs(facts: DecodeFacts) -> tuple[DecodeConfig, ...]:
    """Returns the tiles to try, the best first."""
    return TILES.find(facts)
