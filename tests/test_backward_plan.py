"""What is static in a backward kernel: its passes, the order of its tiles, its configurations."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import masks
from pallas_fa.backends.hopper.backward.choose import candidates, choose, choose_passes
from pallas_fa.backends.hopper.backward.choose_order import with_best_order
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.config import BackwardConfig, Config, ForwardConfig
from tests.abstract import problem_of_types
from tests.interpreted_backward import CASES, GPU, WIDE, problem_of


def test_by_tile_only_where_visits_are_known_and_heads_have_nothing_of_their_own():
    def goes(S, **changes):
        case = dataclasses.replace(WIDE, T=S, S=S, **(dict(batch=(2,), N=64, K=8, mask="causal") | changes))
        problem, _ = problem_of(case, {})
        return choose(problem, passes(problem)[0], GPU).order.by_tile

    assert goes(1024)
    assert goes(4096)
    assert not goes(4096, N=16), "two query heads of a key head"
    assert not goes(4096, mask="full")
    assert not goes(4096, mask="segments")
    assert not goes(4096, score="alibi"), "a slope would have to be read in each step"


def problem_of_shapes(B, T, N, K, H, **keywords):
    return problem_of_types(*(jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K, K)), **keywords)


CAUSAL: dict[str, Any] = dict(is_causal=True)
# (batch, T, N, K, H), mask, parts of the query heads of a key head, heads that run at once.
ORDERS = {
    "few key heads": ((1, 4096, 8, 1, 128), CAUSAL, 8, 8),
    "no mask": ((2, 2048, 8, 1, 128), {}, 4, 1),
    "a short batch of one": ((1, 1024, 32, 8, 128), CAUSAL, 4, 32),
    "blocks of a head fill the GPU": ((1, 16384, 32, 4, 128), CAUSAL, 1, 1),
    "blocks of four heads do": ((1, 4096, 32, 8, 128), CAUSAL, 1, 4),
    "blocks of no number of heads do": ((1, 6144, 32, 8, 128), CAUSAL, 1, 4),
    "parts where blocks of eight heads end together": ((1, 6144, 64, 8, 128), CAUSAL, 4, 4),
    "as many heads at once as memory can stream": ((4, 2048, 14, 2, 64), CAUSAL, 7, 14),
    "a large batch": ((16, 4096, 32, 8, 128), CAUSAL, 1, 4),
    "lengths are not known": ((1, 2048, 32, 8, 128), dict(key_value_seq_lengths=np.array([9]), **CAUSAL), 2, 16),
    "heads of their own keys": ((1, 6144, 16, 16, 128), CAUSAL, 1, 8),
    "many of them": ((4, 6144, 16, 16, 128), CAUSAL, 1, 2),
    "a prime number of query heads": ((1, 8192, 71, 1, 64), CAUSAL, 71, 1),
    "parts of a long sequence would take much memory": ((1, 65536, 8, 1, 128), CAUSAL, 1, 1),
    "a window": ((1, 8192, 8, 1, 128), dict(local_window_size=(1023, 0), **CAUSAL), 2, 2),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order_of_grouped_heads(name):
    dims, mask, parts, at_once = ORDERS[name]
    problem = problem_of_shapes(*dims, **mask)
    (kind,) = choose_passes(problem, GPU)
    plan = choose(problem, kind, GPU)
    assert (plan.head_parts, plan.order.grid.l2_head_group) == (parts, at_once)
    named = dataclasses.replace(problem, config=Config(backward=BackwardConfig()))
    assert choose(named, kind, GPU).config == BackwardConfig()


CUSTOM = masks.Custom(lambda b, n, t, s: s <= t)
# (batch, T, heads) at H=64, mask, whether CTAs take key blocks by tickets, heads that run at once.
TICKETS = {
    "causal": ((4, 4096, 32), CAUSAL, True, 32),
    "long": ((1, 16384, 8), CAUSAL, True, 8),
    "a prime number of heads": ((1, 3328, 37), CAUSAL, True, 37),
    "no divisor of all heads is 32": ((3, 4096, 16), CAUSAL, True, 24),
    "a long window": ((1, 16384, 32), dict(local_window_size=(1023, 0), **CAUSAL), True, 1),
    "lengths": ((4, 4096, 32), dict(key_value_seq_lengths=np.full(4, 9)), True, 32),
    "few key blocks": ((1, 4096, 16), CAUSAL, False, 16),
    "long with lengths": ((1, 16384, 32), dict(key_value_seq_lengths=np.array([9])), False, 32),
    "no full tiles are known": ((4, 4096, 32), dict(mask=CUSTOM), False, 32),
}


@pytest.mark.parametrize("name", TICKETS)
def test_where_blocks_go_by_tickets(name):
    (B, T, N), keywords, by_tickets, heads_at_once = TICKETS[name]
    problem = problem_of_shapes(B, T, N, N, 64, **keywords)
    order = choose(problem, passes(problem)[0], GPU).order
    assert (order.by_tickets, order.grid.l2_head_group) == (by_tickets, heads_at_once)


@pytest.mark.parametrize("keywords", [CAUSAL, dict(local_window_size=(100, 0)), {}], ids=str)
@pytest.mark.parametrize("H", [64, 128, 256])
def test_calls_of_any_size_have_an_order(H, keywords):
    sizes = itertools.product((1, 3, 64), (1, 100, 5000, 140000), ((1, 1), (6, 2), (32, 32), (128, 1)))
    for B, T, (N, K) in sizes:
        problem = problem_of_shapes(B, T, N, K, H, **keywords)
        for kind in choose_passes(problem, GPU):
            for plan in candidates(problem, kind, GPU):
                plan = with_best_order(plan)
                grid = plan.order.grid
                assert grid.batch * grid.heads % grid.l2_head_group == 0
                assert (N // K) % plan.head_parts == 0


def test_passes_that_hold_queries_have_no_parts():
    problem = problem_of_shapes(1, 4096, 8, 1, 128, deterministic_gradients=True, **CAUSAL)
    parts = {kind.gives: choose(problem, kind, GPU).head_parts for kind in choose_passes(problem, GPU)}
    assert parts == {("dk", "dv"): 8, ("dq",): 1}


TWO, THREE = [("dk", "dv"), ("dq",)], [("dv",), ("dk",), ("dq",)]


@pytest.mark.parametrize(
    ("expected", "case", "keywords"),
    [
        (TWO, dict(), {}),
        (TWO, dict(mask="window_causal", score="soft_cap"), {}),
        (TWO, dict(mask="lengths", batch=(2,)), {}),
        (TWO, dict(mask="segments"), {}),
        (TWO, dict(mask="dense"), {}),
        (TWO, dict(H=72, Hv=136, dtype="float16"), {}),
        (TWO, dict(H=192, Hv=128, mask="causal"), {"deterministic_gradients": True}),
        ([("dk", "dv", "dq")], dict(T=200, S=200, H=192, Hv=128, mask="causal"), {}),
        (TWO, dict(H=192, Hv=128, mask="causal"), {}),  # keys in three chunks, of which two warpgroups can't share dQ
        (THREE, dict(mask="lengths", batch=(2,), score="soft_cap"), {}),  # elements are tested for padding
        (THREE, dict(dropout=0.1), {}),
        (THREE, dict(score="bias"), {}),
        (THREE, dict(score="alibi"), {}),
        (THREE, dict(H=264), {}),
        (THREE, dict(), {"config": Config(backward=BackwardConfig(2, 64, (2, 1)))}),
        # Whose rings do not fit the second pass.
        (TWO, dict(), {"config": Config(backward=BackwardConfig(by_gradient=True))}),
        (THREE, dict(H=320, Hv=64), {"config": Config(backward=BackwardConfig(stages=(1, 1), by_gradient=True))}),
    ],
    ids=str,
)
def test_passes_past_128(expected, case, keywords):
    problem, _ = problem_of(dataclasses.replace(WIDE, **dict(H=256, Hv=256) | case), keywords)
    kinds = choose_passes(problem, GPU)
    assert [list(kind.gives) for kind in kinds] == [list(gives) for gives in expected]
    assert choose(problem, kinds[0], GPU).by_gradient == (expected == TWO)
    assert choose(problem, kinds[-1], GPU).ping_pong == (case.get("score") == "soft_cap")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "lengths", "window_causal", "segments", "dense", "blocks"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (128, 128), (192, 128), (256, 256), (320, 320)])
def test_passes_share_their_row_statistics(dims, mask, deterministic):
    width = 128 if dims == (64, 64) else 64
    named = Config(backward=BackwardConfig(2, width, (1, 1), 1, statistics_last=True))
    for config in (None, named):
        case = dataclasses.replace(WIDE, H=dims[0], Hv=dims[1], batch=(2,), mask=mask)
        problem, _ = problem_of(case, {"deterministic_gradients": deterministic, "config": config})
        plans = [choose(problem, kind, GPU) for kind in choose_passes(problem, GPU)]
        assert len({plan.lse_factor for plan in plans}) == 1


@pytest.mark.parametrize("score", ["plain", "bias_shared"])
@pytest.mark.parametrize("dims", [(96, 80), (128, 128), (192, 128), (256, 256), (320, 320), (512, 512)])
def test_memory_that_dropout_shares_costs_no_tile(dims, score):
    """Calls of the generator are shared where the tiles leave room for what threads hand on."""
    tiles, shares = [], []
    case = dataclasses.replace(WIDE, T=2048, S=2048, H=dims[0], Hv=dims[1], batch=(2,), score=score)
    problems = [problem_of(dataclasses.replace(case, dropout=dropout), {})[0] for dropout in (0.0, 0.1)]
    kinds = choose_passes(problems[1], GPU)  # without dropout one pass may do
    for problem in problems:
        plans = [choose(problem, kind, GPU) for kind in kinds]
        tiles.append([dataclasses.replace(plan.config, statistics_last=False) for plan in plans])
        shares.append([plan.shares_draws for plan in plans])
    assert tiles[0] == tiles[1]
    assert not any(shares[0])
    if score == "plain":
        assert any(shares[1]) == (dims[0] <= 128)


@pytest.mark.parametrize(("mask", "N", "warps"), [("full", 1, 1), ("causal", 1, 2), ("causal", 8, 1)])
def test_one_warp_stores_where_blocks_differ_in_the_order_of_tiles(mask, N, warps):
    problem = problem_of_shapes(1, 16384, N, 1, 128, is_causal=mask == "causal")
    plan = choose(problem, passes(problem)[0], GPU)
    assert plan.config.store_warps == 2
    assert plan.order.store_warps == warps


@pytest.mark.parametrize("name", [name for name in CASES if "sits out" in name])
def test_a_warpgroup_sits_out_what_only_the_other_visits(name):
    problem, operands = problem_of(*CASES[name])
    plan = choose(problem, passes(problem)[0], GPU, interpret=True)
    table = np.asarray(plan.visits.table(operands.mask))
    first, last = (table[..., i].reshape(*table.shape[:2], plan.visits.blocks, -1) for i in (0, 3))
    assert first.shape[-1] == 2
    assert ((first.max(-1) > first.min(-1)) | (last.max(-1) > last.min(-1))).any()


def test_a_share_without_visits_does_not_stretch_its_blocks():
    """A dense band of keys of which every second 64 are nobody's."""
    T = 1024
    t, s = np.arange(T)[:, None], np.arange(T)
    band = (abs(t - s) < 128) & (s // 64 % 2 == 0)
    problem, operands = problem_of(dataclasses.replace(WIDE, T=T, S=T), {"mask": band})
    plan = choose(problem, passes(problem)[0], GPU, interpret=True)
    table = np.asarray(plan.visits.table(operands.mask)).reshape(plan.visits.blocks, 2, 4)
    assert (table[:, 1, 0] == table[:, 1, 3]).all()
    visited = table[..., 3].max(1) - table[..., 0].min(1)
    assert (visited == table[:, 0, 3] - table[:, 0, 0]).all()
    assert (visited > 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [*((name, 0) for name in ("compute_wgs", "width", "ds_stages", "l2_head_group", "store_warps")), ("stagger", -1)],
)
def test_a_wrong_configuration_says_why(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        BackwardConfig(**{field: value})


@pytest.mark.parametrize("config", [ForwardConfig(n) for n in (1, 2, 3)] + [BackwardConfig(n) for n in (1, 2)], ids=str)
def test_every_number_of_warpgroups_has_registers(config):
    """What the warpgroups set for themselves fits what a CTA has at its launch: 64K registers, alike for all threads."""
    compute, other = config.registers
    assert compute % 8 == other % 8 == 0 and 24 <= other <= compute <= 255
    at_launch = min(65536 // (128 * (config.compute_wgs + 1)) // 8 * 8, 248)
    assert config.compute_wgs * compute + other <= (config.compute_wgs + 1) * at_launch
