"""The table of the forward kernel's tiles."""

import dataclasses
from typing import Any, NamedTuple

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.grid import Grid, nearest_divisor, persistent_ctas
from pallas_fa.backends.gpu.tables import Row, Span, Table, at_least, up_to
from pallas_fa.backends.hopper.config import ForwardConfig

# A CTA takes this long to start, in query blocks (evidence: forward/q-blocks-per-cta).
_CTA_START = 0.25
# `l2_head_group` of pairs in persistent CTAs (evidence: forward/persistent-ctas).
_HEADS_OF_PAIRS = 4


class ForwardFacts(NamedTuple):
    """What the choice of tiles depends on.

    head_dim, value_dim: of q and k, and of v, rounded up to multiples of 64.
    length: queries.
    keys: keys of a head.
    heads: query heads of all batch entries.
    uniform: all queries visit the same keys, and there is no score.
    visit_table: the mask has arrays, so CTAs read from a table which keys they visit.
    scalar_ranges: there is a mask whose arrays, if it has any, are scalars to a CTA, such as lengths.
    custom: a part of it is computed by a function of the user's.
    packed: it has segment ids or blocks, so these keys may be few.
    blocks: it has blocks.
    split: operands are in two parts.
    windowed: the mask, without arrays, rules out keys before the last queries.
    window: keys that a query sees at most, where the mask is a window of ints on both sides and there is no score; else 0.
    window_keys: keys that a block of 128 grouped rows sees in a window; 0 where rows may not be grouped.
    dropout: there is dropout.
    group: query heads of a key head.
    """

    head_dim: int
    value_dim: int
    length: int
    keys: int
    heads: int
    uniform: bool
    visit_table: bool
    packed: bool
    split: bool
    blocks: bool = False
    windowed: bool = False
    window: int = 0
    window_keys: int = 0
    dropout: bool = False
    group: int = 1
    scalar_ranges: bool = False
    custom: bool = False


_H64: dict[str, Any] = dict(head_dim=up_to(64), value_dim=up_to(64))
_H128: dict[str, Any] = dict(head_dim=up_to(128), value_dim=up_to(128))
_H192: dict[str, Any] = dict(head_dim=up_to(192), value_dim=up_to(128))
_H192_ALONE: dict[str, Any] = dict(head_dim=Span(129, 192), value_dim=up_to(128))
_H256: dict[str, Any] = dict(head_dim=up_to(256), value_dim=up_to(256))
_H256_ALONE: dict[str, Any] = dict(head_dim=Span(129, 256), value_dim=up_to(256))
# Several query blocks a CTA past H=128.
_IN_TURNS: dict[str, Any] = dict(split=False, visit_table=False, windowed=False)
_IN_TURNS_192: dict[str, Any] = dict(**_H192_ALONE, **_IN_TURNS, length=Span(257, 8192))
_IN_TURNS_256: dict[str, Any] = dict(**_H256_ALONE, **_IN_TURNS, length=Span(257, 2048))
# Cross attention on few keys, and nothing that tells them apart: one to four steps for each query block.
_FEW_KEYS: dict[str, Any] = dict(uniform=True, visit_table=False, split=False, dropout=False)
_FEW_KEYS_64: dict[str, Any] = dict(**_H64, **_FEW_KEYS, length=at_least(513))
_FEW_KEYS_128: dict[str, Any] = dict(**_H128, **_FEW_KEYS, length=at_least(2048))
# Masks with arrays, but no segments or blocks.
_SAME_KEYS: dict[str, Any] = dict(**_H128, uniform=True, visit_table=True, packed=False)
_LONG_ARRAYS: dict[str, Any] = dict(**_H128, keys=at_least(2049), visit_table=True, packed=False)
_LATE: dict[str, Any] = dict(ping_pong=True, rescale_under_qk=True)
_LATE_OF_64: dict[str, Any] = dict(pin_softmax=False, l2_head_group=16, **_LATE)
_SHORT_WINDOW_64: dict[str, Any] = dict(**_H64, window=Span(1, 512), split=False)
_SHORT_WINDOW_128: dict[str, Any] = dict(**_H128, window=Span(1, 256), split=False)
_SMALL = ForwardConfig(2, 64), ForwardConfig(1, 64)
_SHORT = ForwardConfig(2, q_in_registers=True, l2_head_group=1), ForwardConfig(2, ping_pong=True), *_SMALL
_LATE_64 = (
    ForwardConfig(2, 64, rescale_under_qk=True, out_chunks=2),
    ForwardConfig(2, 64, rescale_under_qk=True),
    *_SMALL,
)
_WIDE = tuple(ForwardConfig(wgs, 64, stages, pin_softmax=False) for wgs in (2, 1) for stages in (2, 1))


def _two_warpgroups(**options) -> tuple[ForwardConfig, ...]:
    # The best comes twice: its pairs of query blocks take shared memory of their own, which arrays may need.
    best = ForwardConfig(2, **options)
    return best, best, ForwardConfig(2, pin_softmax=False), *_SMALL


def _grouped(*stages: int) -> tuple[ForwardConfig, ...]:
    # `forward_configs` gives their key blocks as many keys as the query blocks see: a query block is one step.
    return *(ForwardConfig(2, stages=n, pin_softmax=False, grouped_rows=True) for n in stages), *_SMALL


# The tiles to try, the best first. The first of them takes as many pairs of query blocks as the next table says.
TILES = Table(
    "forward/tiles",
    Row(_grouped(2), "forward/grouped-rows", **_H64, window_keys=Span(1, 160)),
    Row(_grouped(2, 1), "forward/grouped-rows", **_H128, window_keys=Span(1, 144)),
    Row(_grouped(1), "forward/grouped-rows", **_H128, window_keys=Span(145, 160)),
    Row((ForwardConfig(3, 64, 4, pin_softmax=False), *_SMALL), "forward/short-windows", **_SHORT_WINDOW_64),
    Row((ForwardConfig(2, 64, 3, pin_softmax=False), *_SMALL), "forward/short-windows", **_SHORT_WINDOW_128),
    Row(
        (ForwardConfig(1, 64, q_in_registers=True, pin_softmax=False), *_SMALL),
        "forward/persistent-ctas",
        **_H64,
        length=up_to(64),
        keys=up_to(64),
    ),
    Row((ForwardConfig(2, 128, ping_pong=True), *_SMALL), "library/float32-products", **_H64, split=True),
    Row((ForwardConfig(2, 64, ping_pong=True), *_SMALL), "library/float32-products", split=True),
    Row((ForwardConfig(3, 80, pin_softmax=False), *_SMALL), "forward/few-keys", **_FEW_KEYS_64, keys=up_to(80)),
    Row((ForwardConfig(3, pin_softmax=False), *_SMALL), "forward/few-keys", **_FEW_KEYS_64, keys=Span(81, 128)),
    Row((ForwardConfig(2, 256, 1), *_SMALL), "forward/few-keys", **_FEW_KEYS_64, keys=Span(129, 256)),
    Row((ForwardConfig(2, 80, **_LATE), *_SMALL), "forward/few-keys", **_FEW_KEYS_128, keys=up_to(80)),
    Row((ForwardConfig(2, 256, 1, ping_pong=True), *_SMALL), "forward/few-keys", **_FEW_KEYS_128, keys=Span(129, 256)),
    Row((ForwardConfig(2, **_LATE), *_SMALL), "forward/few-keys", **_FEW_KEYS_128, keys=up_to(512)),
    Row((ForwardConfig(2, ping_pong=True, l2_head_group=16), *_SMALL), **_H64, packed=True),
    Row(
        (ForwardConfig(2, 256, 1, ping_pong=True), ForwardConfig(2, ping_pong=True), *_SMALL),
        "forward/persistent-ctas",
        **_H64,
        uniform=True,
        length=up_to(256),
        keys=Span(129, 256),
    ),
    Row(
        _SHORT,
        "forward/persistent-ctas",
        **_H64,
        uniform=True,
        length=up_to(512),
        keys=up_to(512),
    ),
    Row(
        _SHORT,
        "forward/persistent-ctas",
        **_H64,
        visit_table=True,
        length=up_to(512),
        keys=up_to(512),
    ),
    *(  # three warpgroups have 192 queries
        Row((ForwardConfig(2, **_LATE_OF_64), *_SMALL), "forward/prompts", **_H64, length=length)
        for length in (up_to(128), Span(193, 256))
    ),
    Row(
        (ForwardConfig(3, **_LATE_OF_64), ForwardConfig(2, ping_pong=True), *_SMALL), "forward/lagging-maximum", **_H64
    ),
    Row(_two_warpgroups(**_LATE), "forward/lagging-maximum", **_H128, uniform=True, visit_table=False),
    Row(_two_warpgroups(pin_softmax=False, **_LATE), "forward/lagging-maximum", **_H128, visit_table=False),
    Row(_two_warpgroups(**_LATE, l2_head_group=1), "forward/visit-lists", **_H128, blocks=True),
    Row(_two_warpgroups(pin_softmax=False, **_LATE), "forward/arrays-of-masks", **_SAME_KEYS),
    Row(_two_warpgroups(pin_softmax=False, **_LATE), "forward/prompts", **_LONG_ARRAYS),
    Row(_two_warpgroups(ping_pong=True, l2_head_group=1), "forward/l2-head-grouping", **_H192, visit_table=True),
    # Where the few steps are unrolled, key blocks of 128 spill 264 bytes.
    Row(_SMALL, "forward/output-over-queries", **_H192_ALONE, uniform=False, length=up_to(256)),
    Row(_two_warpgroups(**_LATE, out_chunks=1), "forward/output-over-queries", **_H192),
    Row(_LATE_64, "forward/rescale-under-qk", **_H256),
    Row(_WIDE, "forward/wide-heads"),
)

# Whether CTAs are persistent; "pairs": those that take pairs of query blocks.
PERSISTENT = Table(
    "forward/persistent-ctas",
    Row(True, "forward/short-windows", **_SHORT_WINDOW_64),
    Row(True, "forward/short-windows", **_SHORT_WINDOW_128),
    Row(True, "forward/few-keys", **_FEW_KEYS_64, keys=up_to(256)),
    Row(True, "forward/few-keys", **_FEW_KEYS_128, keys=up_to(512)),
    Row(True, **_H64, split=True, length=up_to(64), keys=up_to(64)),
    Row(True, **_H64, split=False, packed=False, length=up_to(512), keys=up_to(512)),
    Row(True, **_H128, split=False, uniform=True, visit_table=False, length=up_to(8192)),
    Row(False, **_H64),
    Row("pairs", **_H128, split=False, visit_table=False, windowed=False, length=up_to(8192)),
    Row("pairs", "forward/output-in-turns", **_IN_TURNS_192),
    Row(True, "forward/output-in-turns", **_H256_ALONE, **_IN_TURNS, uniform=True, length=Span(257, 1024)),
    Row("pairs", "forward/output-in-turns", **_IN_TURNS_256),
    Row(False),
)

# What tiles change where CTAs take blocks by tickets; `l2_head_group` is how many heads are wanted. None: they don't.
BY_TICKETS = Table(
    "forward/by-tickets",
    Row(None, length=up_to(512)),
    Row(None, keys=up_to(512)),
    Row(None, split=True),
    Row(None, blocks=True),
    Row(None, visit_table=False, scalar_ranges=False),  # all blocks may be the same work,
    Row(None, custom=True),  # and here too
    Row(None, **_SHORT_WINDOW_64),
    Row(None, window=Span(1, 511)),
    Row(None, **_H64, length=Span(961, 1024), visit_table=False),
    Row(dict(l2_head_group=16), **_H64),
    Row(None, visit_table=True, scalar_ranges=False),
    Row(dict(l2_head_group=16, out_chunks=2), **_H128),
    Row(dict(l2_head_group=16, out_chunks=1, rescale_under_qk=True), **_H192, visit_table=True),
    Row(None, **_H192),
    Row(dict(l2_head_group=16), **_H256, visit_table=True),
    Row(dict(l2_head_group=32), **_H256, length=Span(1025, 8192)),
    Row(None),
)
# Each CTA is to take more than so many: one more kernel, for the counter, and the wait for the first numbers.
_BLOCKS_BY_TICKETS = 5
# So many heads may run at once: of fewer, blocks of unequal work are too few, and more do not stay in the L2 cache.
_HEADS_BY_TICKETS = Span(4, 64)

# Where it is not what the tiles say.
L2_HEAD_GROUP = Table(
    "forward/l2-head-grouping",
    Row(1, visit_table=False, windowed=False, group=1, length=at_least(8193)),
    Row(None),
)

# How many pairs of query blocks a CTA may process: the one of these that takes least time is chosen.
PAIRS = Table(
    "forward/q-blocks-per-cta",
    Row((0,), "forward/short-windows", **_SHORT_WINDOW_64),
    Row((0,), "forward/short-windows", **_SHORT_WINDOW_128),
    Row((0,), "forward/few-keys", **_FEW_KEYS_128, keys=up_to(512)),
    Row((0,), "library/float32-products", split=True),  # two query blocks don't fit shared memory
    Row((4, 2, 1, 0), **_H64, packed=True),
    Row((3, 0), **_H64, length=Span(961, 1024), uniform=False, visit_table=False),
    Row((0,), **_H64),
    Row((1, 0), "forward/output-in-turns", **_IN_TURNS_192),
    Row((1, 0), "forward/output-in-turns", **_IN_TURNS_256, uniform=False),
    Row((0,), "forward/output-over-queries", **_H192_ALONE),  # whole outputs leave no room for pairs
    Row((0,), "forward/arrays-of-masks", **_SAME_KEYS),
    Row((0,), "forward/prompts", **_LONG_ARRAYS),
    Row((4, 2, 1, 0), **_H192, visit_table=True),
    Row((1, 0), **_H192, uniform=True, length=up_to(8192)),
    Row((2, 1, 0), **_H128, uniform=False, windowed=True, length=up_to(2048)),
    Row((2, 1, 0), "forward/persistent-ctas", **_H128, uniform=False, length=Span(769, 1024)),
    Row((1, 0), "forward/persistent-ctas", **_H128, uniform=False, windowed=False, length=up_to(8192)),
    Row((0,)),
)


def forward_configs(facts: ForwardFacts, gpu: Gpu) -> tuple[ForwardConfig, ...]:
    """Returns the tiles to try, the best first."""
    best, *others = TILES.find(facts)
    if best.grouped_rows:
        return tuple(_for_window(x, facts, gpu) for x in (best, *others))
    dealt_out = _dealt_out(best, facts, gpu)
    options = BY_TICKETS.find(facts)
    if not options or facts.heads * _blocks(best, facts) <= _BLOCKS_BY_TICKETS * gpu.multiprocessors:
        return *dealt_out, *others
    heads = nearest_divisor(facts.heads, options["l2_head_group"])
    if heads not in _HEADS_BY_TICKETS:
        return *dealt_out, *others
    options = options | dict(by_tickets=True, persistent_ctas=gpu.multiprocessors, l2_head_group=heads)
    return dataclasses.replace(best, **options), *dealt_out, *others


def _blocks(tiles, facts):
    return -(-facts.length // tiles.block_q)


def _dealt_out(best, facts, gpu):
    """Returns `best` with the pairs and persistent CTAs of the tables, and without persistent CTAs."""
    blocks = _blocks(best, facts)

    def time(pairs):
        """In query blocks, if all take the same time and CTAs run in rounds that fill the GPU."""
        of_each = max(1, min(2 * pairs, blocks))
        rounds = -(-facts.heads * -(-blocks // of_each) // gpu.multiprocessors)
        return rounds * (of_each + _CTA_START)

    heads = L2_HEAD_GROUP.find(facts) or best.l2_head_group
    best = dataclasses.replace(best, q_block_pairs=min(PAIRS.find(facts), key=time), l2_head_group=heads)
    persistent = PERSISTENT.find(facts)
    if not persistent or (persistent == "pairs" and not best.q_block_pairs):
        return (best,)
    of_each = max(1, 2 * best.q_block_pairs)
    grid = Grid(1, facts.heads, -(-blocks // of_each), 1)
    # Whether no warpgroup of the last query block is past the end, and no block is left without another.
    is_whole = -facts.length % best.block_q < 64 and blocks % of_each == 0
    alike = is_whole and (best.q_block_pairs > 0 or (facts.uniform and not facts.visit_table))
    count = persistent_ctas(grid, gpu.multiprocessors, alike=alike)
    heads = _HEADS_OF_PAIRS if count and best.q_block_pairs else best.l2_head_group
    return dataclasses.replace(best, persistent_ctas=count, l2_head_group=heads), best


def _for_window(tiles, facts, gpu):
    if not tiles.grouped_rows:
        return tiles
    block_kv = max(64, -(-facts.window_keys // 16) * 16)
    return dataclasses.replace(tiles, block_kv=block_kv, persistent_ctas=gpu.multiprocessors)
