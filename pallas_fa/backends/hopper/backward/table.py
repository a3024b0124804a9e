"""The table of the backward kernel's tiles."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.grid import Grid, nearest_divisor, persistent_ctas
from pallas_fa.backends.gpu.tables import Row, Span, Table, at_least, up_to
from pallas_fa.backends.hopper.config import BackwardConfig


class BackwardFacts(NamedTuple):
    """What the choice of tiles depends on.

    gives: the gradients of the pass.
    head_dim, value_dim: of q and k, and of v, rounded up to multiples of 64.
    columns: the head dim of q and k, rounded up to a multiple of 16.
    length: keys.
    queries: queries of a head.
    heads: key heads of all batch entries.
    group: query heads of a key head.
    masked: there is a mask.
    visit_table: it has arrays, so CTAs read from a table which tiles they visit.
    tests_arrays: elements are tested against some of them: they are not sequence lengths alone.
    split: operands are in two parts.
    blocks: it has a block mask.
    only_lengths: it is sequence lengths alone.
    windowed: without arrays, it rules out keys before the last queries.
    band: it is a causal mask or a window.
    dropout: there is dropout.
    scored: logits are scored in registers, see `is_scored`.
    score_arrays: the score has arrays.
    """

    gives: tuple[str, ...]
    head_dim: int
    value_dim: int
    columns: int
    length: int
    queries: int
    heads: int
    group: int
    masked: bool
    visit_table: bool
    tests_arrays: bool
    split: bool
    blocks: bool = False
    only_lengths: bool = False
    windowed: bool = False
    band: bool = False
    dropout: bool = False
    scored: bool = False
    score_arrays: bool = False


class Choice(NamedTuple):
    """Tiles to try, the best first: `tuned` ones, whose `options` have tables of their own, then `others` as they are.

    `persistent`: whether the tuned ones are tried with persistent CTAs first, where `PERSISTENT` says so.
    """

    tuned: tuple[BackwardConfig, ...]
    options: Mapping[str, Table]
    others: tuple[BackwardConfig, ...]
    persistent: bool = False


_FUSED, _KEYS, _QUERIES, _WITHOUT_DV = ("dk", "dv", "dq"), ("dk", "dv"), ("dq",), ("dk", "dq")
_H64: dict[str, Any] = dict(head_dim=up_to(64), value_dim=up_to(64))
_H128: dict[str, Any] = dict(head_dim=up_to(128), value_dim=up_to(128))
_H256: dict[str, Any] = dict(head_dim=up_to(256), value_dim=up_to(256))

_UNGROUPED: dict[str, Any] = dict(group=1, visit_table=False)
_LONG: dict[str, Any] = dict(length=at_least(8193), **_UNGROUPED)

FIRST_STORE = Table(
    "backward/first-store",
    Row(True, visit_table=True),
    Row(True, masked=False, length=up_to(2048)),
    Row(True, masked=True),
    Row(False),
)
STORE_WARPS = Table("backward/dq-store-warps", Row(2, blocks=True), Row(1, visit_table=True), Row(2))
STAGGER = Table(
    "backward/stagger",
    Row(0, "backward/padding-by-rows", visit_table=True),
    Row(2, length=up_to(8192)),
    Row(7),
)
BY_TILE = Table(
    "backward/query-heads-by-tile",
    Row(True, group=at_least(8)),
    Row(True, group=at_least(4), length=at_least(2049)),
    Row(False),
)
L2_HEAD_GROUP = Table(
    "backward/l2-head-grouping",
    Row(16, group=at_least(2)),
    Row(16, masked=True, visit_table=False, length=Span(2049, 4096)),
    Row(4, windowed=True, length=at_least(4097), **_UNGROUPED),
    Row(1, **_LONG),
    Row(2, length=at_least(4097), **_UNGROUPED),
    Row(8),
)
# Of passes past 128 that add no dQ up.
LARGE_L2_HEAD_GROUP = Table(
    "backward/l2-head-grouping",
    Row(1, windowed=False, **_LONG),
    Row(4, visit_table=False, length=at_least(4097)),
    Row(8),
)
# Of passes past 128.
PING_PONG = Table("backward/score-derivative", Row(True, gives=_QUERIES, scored=True, score_arrays=False), Row(False))
STATISTICS_LAST = Table(
    "backward/instructions-and-waits",
    Row(False, tests_arrays=True),
    Row(False, score_arrays=True),
    Row(False, scored=True, **_H128),
    Row(False, gives=_KEYS, **_H128),
    Row(False, "library/dropout-by-philox", **_H64, dropout=True),
    Row(True, "library/dropout-by-philox", **_H128, dropout=True),
    Row(False, dropout=True),
    Row(False, **_H64, masked=False, length=at_least(2049)),
    Row(False, columns=Span(97, 128), value_dim=up_to(128), group=1, masked=True),
    Row(False, "backward/two-passes-at-192", head_dim=192, value_dim=up_to(128)),
    Row(True),
)
# Of the fused pass at H=64.
WIDE_L2_HEAD_GROUP = Table(
    "backward/l2-head-grouping",
    Row(1, **_LONG),
    Row(2, windowed=False, length=at_least(4097), **_UNGROUPED),
    Row(4, windowed=False, visit_table=False, length=at_least(8193)),
    Row(32),
)
WIDE_STAGGER = Table("backward/stagger", Row(7, masked=False, **_LONG), Row(0))

_PLAIN: dict[str, Any] = dict(group=1, scored=False, dropout=False)
# Of the fused pass at H=64: how persistent CTAs get their blocks. Their second slots for keys and values may not fit beside
# arrays: then a CTA for each block.
PERSISTENT = Table(
    "backward/persistent-ctas",
    Row("in turn", length=up_to(64), queries=up_to(128)),
    Row("in turn", length=up_to(640), queries=up_to(640), masked=False),
    Row("in turn", length=up_to(1536), queries=up_to(1536), masked=False, dropout=False, score_arrays=False),
    Row("in turn", "backward/padding-by-rows", length=up_to(640), queries=up_to(640), only_lengths=True),
    Row("by tickets", length=up_to(8192), queries=up_to(8192), only_lengths=True, **_PLAIN),
    Row("by tickets", band=True, visit_table=False, queries=at_least(129), **_PLAIN),
    Row(None),
)
# Each CTA is to take more than so many: XLA fills the memory of tickets with zeros before, some microseconds.
_BLOCKS_BY_TICKETS = 7
_HEADS_BY_TICKETS = 32  # at once, or nearly; in windows as many as the table of groups says

_SMALL = BackwardConfig(1, 64), BackwardConfig(1, 64, ds_stages=1), BackwardConfig(1, 64, (1, 1), 1)
_WIDE_OPTIONS = dict(first_store=FIRST_STORE, by_tile=BY_TILE)
_WIDE_FUSED_OPTIONS = _WIDE_OPTIONS | dict(
    l2_head_group=WIDE_L2_HEAD_GROUP, stagger=WIDE_STAGGER, statistics_last=STATISTICS_LAST
)


def _wide(l2_head_group: int) -> tuple[BackwardConfig, ...]:
    return (BackwardConfig(2, 128, l2_head_group=l2_head_group, store_warps=1, dk_last=True),)


# With less memory for tiles of arrays and their gradients (evidence: backward/bias-gradient).
_WIDE_FUSED = (
    *_wide(32),
    BackwardConfig(2, 64, store_warps=1),
    BackwardConfig(2, 128, ds_stages=1, store_warps=1, dk_last=True),
)
_WIDE_OTHERS = BackwardConfig(2, 128, (2, 1), 1, l2_head_group=32, store_warps=1, dk_last=True), *_SMALL
_NARROW_OPTIONS = dict(
    l2_head_group=L2_HEAD_GROUP,
    store_warps=STORE_WARPS,
    stagger=STAGGER,
    by_tile=BY_TILE,
    statistics_last=STATISTICS_LAST,
)
_NARROW = Choice(
    (
        BackwardConfig(2, 64),
        BackwardConfig(2, 64, ds_stages=1),
        BackwardConfig(2, 64, (2, 1), 1),
        BackwardConfig(2, 64, (1, 1), 1),
    ),
    _NARROW_OPTIONS,
    _SMALL,
)
_SUMS_AT_192 = Choice(
    (
        BackwardConfig(2, 64, (2, 1)),
        BackwardConfig(2, 64, ds_stages=1),
        BackwardConfig(2, 64, (2, 1), 1),
        BackwardConfig(2, 64, (1, 1), 1),
    ),
    _NARROW_OPTIONS,
    (),
)
_ONE_AT_192 = _SUMS_AT_192._replace(
    tuned=tuple(dataclasses.replace(config, p_before_dp=True) for config in _SUMS_AT_192.tuned)
)
_SHORT = BackwardConfig(1, 64), BackwardConfig(1, 64, (1, 1), 1)
_SPLIT_OPTIONS = dict(l2_head_group=L2_HEAD_GROUP, store_warps=STORE_WARPS, stagger=STAGGER)
_SPLIT_FUSED = BackwardConfig(1, 64, ds_stages=1), BackwardConfig(1, 64, (2, 1), 1), BackwardConfig(1, 64, (1, 1), 1)
_SPLIT_PAIR = BackwardConfig(2, 64), BackwardConfig(2, 64, (1, 1)), BackwardConfig(1, 64, (1, 1))
_LARGE = (
    BackwardConfig(2, 64),
    BackwardConfig(2, 64, (2, 1)),
    BackwardConfig(1, 64, (2, 1)),
    BackwardConfig(1, 64, (1, 1)),
)

_LARGE_OPTIONS = dict(statistics_last=STATISTICS_LAST, l2_head_group=LARGE_L2_HEAD_GROUP, ping_pong=PING_PONG)
_BY_GRADIENT = Choice((BackwardConfig(2, 64, by_gradient=True),), _LARGE_OPTIONS, ())
_CHUNKED = tuple(
    BackwardConfig(2, 64, (stages, stages), chunk_slots=slots) for stages, slots in ((2, 4), (1, 4), (1, 2))
)

TILES = Table(
    "backward/tiles",
    Row(
        Choice(_SHORT, {}, _SMALL, persistent=True),
        "backward/persistent-ctas",
        **_H64,
        gives=_FUSED,
        length=up_to(64),
        queries=up_to(128),
    ),
    *(
        Row(choice, "library/float32-products", split=True, **where)
        for choice, where in (
            (Choice(_SPLIT_FUSED, _SPLIT_OPTIONS, ()), dict(**_H64, gives=_FUSED)),
            (Choice(_SPLIT_FUSED[1:], _SPLIT_OPTIONS, ()), dict(gives=_FUSED)),
            (Choice((), {}, _SPLIT_PAIR), _H64),
            (Choice((), {}, _SPLIT_PAIR[1:]), {}),
        )
    ),
    Row(
        Choice((BackwardConfig(2, 64, store_warps=1),), dict(by_tile=BY_TILE), _SMALL, persistent=True),
        "library/dropout-by-philox",
        **_H64,
        gives=_FUSED,
        masked=False,
        dropout=True,
    ),
    Row(Choice(_WIDE_FUSED, _WIDE_FUSED_OPTIONS, _WIDE_OTHERS, persistent=True), **_H64, gives=_FUSED),
    Row(Choice(_wide(32), _WIDE_OPTIONS, (BackwardConfig(2, 64), *_SMALL)), **_H64),
    Row(Choice(_wide(8), _WIDE_OPTIONS, (BackwardConfig(2, 64), *_SMALL)), **_H128, gives=_QUERIES),
    Row(_NARROW, **_H128, gives=_KEYS),
    Row(_NARROW, head_dim=128, value_dim=up_to(128), gives=_FUSED),
    Row(Choice((), {}, _SMALL), **_H128, gives=_FUSED),
    Row(_ONE_AT_192, "backward/one-pass-at-192", gives=_FUSED),
    Row(_SUMS_AT_192, "backward/two-passes-at-192", gives=_WITHOUT_DV),
    Row(_BY_GRADIENT, "backward/by-gradient", **_H256, gives=_KEYS),
    Row(Choice(_LARGE, _LARGE_OPTIONS, ()), **_H256),
    Row(Choice((), {}, _CHUNKED), "backward/wide-heads"),
)


def backward_configs(facts: BackwardFacts, gpu: Gpu) -> tuple[BackwardConfig, ...]:
    """Returns the tiles to try, the best first; none where the gradients don't fit a warpgroup's registers."""
    choice = TILES.find(facts)
    options = {name: table.find(facts) for name, table in choice.options.items()}
    tuned = [dataclasses.replace(config, **options) for config in choice.tuned]
    dealt = PERSISTENT.find(facts) if choice.persistent else None
    persistent = [_persistent(config, dealt, facts, gpu) for config in tuned] if dealt else []
    return *persistent, *tuned, *choice.others


def _persistent(config, dealt, facts, gpu):
    grid = Grid(1, facts.heads, -(-facts.length // config.block), 1)
    if dealt == "in turn":
        return dataclasses.replace(config, persistent_ctas=persistent_ctas(grid, gpu.multiprocessors), store_warps=1)
    if grid.ctas <= _BLOCKS_BY_TICKETS * gpu.multiprocessors:
        return config
    wanted = config.l2_head_group if facts.windowed else _HEADS_BY_TICKETS
    ctas = dict(persistent_ctas=gpu.multiprocessors, l2_head_group=nearest_divisor(facts.heads, wanted))
    return dataclasses.replace(config, by_tickets=True, store_warps=1, **ctas)
