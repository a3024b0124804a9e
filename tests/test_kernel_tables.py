"""What a GPU has, and the tables of tiles that depend on it; no kernel is traced."""

import pathlib
import re
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import masks
from pallas_fa.backends.gpu import device as gpu_device
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import fits
from pallas_fa.backends.gpu.tables import Row, Span, Table, at_least, up_to
from pallas_fa.backends.hopper import narrow
from pallas_fa.backends.hopper.backward import choose as choose_backward
from pallas_fa.backends.hopper.backward import scratch as backward_scratch
from pallas_fa.backends.hopper.backward import table as backward_table
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward import choose as choose_forward
from pallas_fa.backends.hopper.forward import scratch as forward_scratch
from pallas_fa.backends.hopper.forward import table as forward_table
from pallas_fa.operands.layout import ordered
from tests.abstract import problem_of_types

ROOT = pathlib.Path(__file__).parent.parent
H200 = Gpu("9.0", 132, 227 * 1024)


def device_like(capability, multiprocessors):
    return types.SimpleNamespace(compute_capability=capability, core_count=multiprocessors)


@pytest.mark.parametrize(
    ("capability", "kilobytes"), [("8.0", 163), ("8.9", 99), ("9.0", 227), ("12.0", 99), ("7.0", 48)]
)
def test_a_gpu_is_read_from_its_device(capability, kilobytes):
    assert Gpu.of(device_like(capability, 84)) == Gpu(capability, 84, kilobytes * 1024)


def test_the_visible_gpu_is_that_of_all_devices_or_a_hopper(monkeypatch):
    visible = lambda: Gpu.visible.__wrapped__(Gpu)  # it remembers its answer
    monkeypatch.setattr(gpu_device, "cuda_devices", lambda: [])
    assert visible() == H200
    monkeypatch.setattr(gpu_device, "cuda_devices", lambda: [device_like("9.0", 132), device_like("9.0", 114)])
    assert visible() == Gpu("9.0", 114, 227 * 1024)
    monkeypatch.setattr(gpu_device, "cuda_devices", lambda: [device_like("9.0", 132), device_like("8.0", 108)])
    assert visible().compute_capability == "8.0, 9.0"


class Facts(NamedTuple):
    length: int
    masked: bool


def test_the_first_row_that_applies_has_the_value():
    table = Table(
        "group/record",
        Row("short", length=up_to(64)),
        Row("middle", length=Span(65, 128), masked=True),
        Row("long", length=at_least(129)),
        Row("other"),
    )
    found = [table.find(Facts(length, masked)) for length in (64, 65, 128, 129) for masked in (True, False)]
    assert found == ["short", "short", "middle", "other", "middle", "other", "long", "long"]
    assert Table("", Row("either", length={1, 3}), Row("other")).find(Facts(3, True)) == "either"
    with pytest.raises(AssertionError, match="everywhere"):
        Table("group/record", Row("short", length=up_to(64)))


def test_evidence_has_a_record():
    tables = [x for module in (forward_table, backward_table) for x in vars(module).values() if isinstance(x, Table)]
    cited = {row.evidence or table.evidence for table in tables for row in table.rows}
    for file in (ROOT / "pallas_fa").rglob("*.py"):
        cited |= set(re.findall(r"[Ee]vidence: ([a-z-]+/[a-z0-9-]+)", file.read_text(encoding="utf-8")))
    assert len(tables) == 17 and len(cited) > 20
    folder = ROOT / "docs" / "decisions"
    records = {str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.md")}
    assert cited <= records


def problem(T, H, N=4, K=4, S=None, B=2, Hv=None, **keywords):
    layout, sizes = keywords.get("layout", "BTNH"), ((T, N), (S or T, K))
    shapes = [ordered(layout, (B, length, heads, H)) for length, heads in sizes]
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    v = k if Hv is None else jax.ShapeDtypeStruct((*k.shape[:-1], Hv), k.dtype)
    return problem_of_types(q, k, v, **keywords)


@pytest.mark.parametrize("H", [64, 128, 192, 256])
def test_tiles_fit_the_gpu_that_is_given(H):
    """All of them a Hopper; on GPUs with less shared memory the same tables give smaller tiles, as far as they go."""
    case = problem(4096, H)
    forward = choose_forward.choose(case, H200)
    assert fits(forward_scratch.on_gpu(forward), H200)
    backward = [choose_backward.choose(case, kind, H200) for kind in passes(case)]
    assert all(fits(backward_scratch.on_gpu(plan), H200) for plan in backward)
    if H > 128:
        return
    small = Gpu("8.0", 108, 163 * 1024)
    less = [choose_forward.choose(case, small), *(choose_backward.choose(case, plan.kind, small) for plan in backward)]
    assert fits(forward_scratch.on_gpu(less[0]), small)
    assert fits(backward_scratch.on_gpu(less[1]), small)
    if H == 128:
        assert less[0].config != forward.config and less[1].config != backward[0].config


@pytest.mark.parametrize(
    ("heads", "key_heads", "H", "window", "keywords", "tiles"),
    [
        (64, 8, 64, 127, {}, (2, 144, True)),
        (64, 16, 64, 127, {}, (2, 160, True)),
        (8, 1, 128, 63, {}, (2, 80, True)),
        (16, 16, 64, 127, {}, (3, 64, False)),
        (64, 8, 64, 127, {"layout": "BNTH"}, (3, 64, False)),
        (24, 8, 64, 127, {}, (3, 64, False)),
        (16, 16, 128, 255, {}, (2, 64, False)),
        (16, 16, 128, 256, {}, (2, 128, False)),
        (64, 8, 64, 127, {"logits_soft_cap": 30.0}, (3, 128, False)),
    ],
)
def test_short_windows_have_tiles_of_their_own(heads, key_heads, H, window, keywords, tiles):
    case = problem(1024, H, heads, key_heads, is_causal=True, local_window_size=(window, 0), **keywords)
    config = choose_forward.choose(case, H200).config
    assert (config.compute_wgs, config.block_kv, config.grouped_rows) == tiles


@pytest.mark.parametrize(
    ("T", "H", "keywords", "split"),
    [
        (4608, 64, {}, (3, 2)),  # 192 blocks in 132 CTAs: 120 whole ones and 144 halves are 264
        (4608, 64, {"is_causal": True}, (0, 1)),
        (512, 128, {}, (0, 1)),  # the merge would take longer
        (4096, 512, {}, (0, 1)),
    ],
)
def test_keys_of_heads_are_in_parts_where_query_blocks_do_not_fill_the_gpu(T, H, keywords, split):
    config = choose_forward.choose(problem(T, H, **keywords), H200).config
    assert (config.split_heads, config.kv_splits) == split


@pytest.mark.parametrize("keywords", [{}, {"key_value_seq_lengths": np.array([8192], np.int32)}])
def test_keys_of_all_heads_are_in_parts_where_queries_are_few(keywords):
    """A chunk of a prompt: 8 heads of 4 query blocks."""
    config = choose_forward.choose(problem(512, 128, 8, 1, S=8192, B=1, **keywords), H200).config
    assert (config.split_heads, config.kv_splits) == (8, 4)


@pytest.mark.parametrize(("multiprocessors", "pairs"), [(16, 2), (32, 1), (64, 0)])
def test_pairs_of_query_blocks_depend_on_multiprocessors(multiprocessors, pairs):
    """8 heads of 8 query blocks: few multiprocessors are kept busy by CTAs of several blocks, many are not."""
    gpu = Gpu("9.0", multiprocessors, 227 * 1024)
    case = problem(1024, 128, is_causal=True)
    assert choose_forward.choose(case, gpu).config.q_block_pairs == pairs


ZERO = np.zeros((1, 1, 1, 1), np.int32)
CAUSAL, LENGTHS = dict(is_causal=True), dict(key_value_seq_lengths=np.full(4, 9, np.int32))
DOCUMENTS = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), np.zeros((4, 4096), np.int32))
# Queries, head dim, heads, keywords: heads at once by tickets, chunks of the output in memory; None: not by tickets.
# Then the batch, 4 unless said, and the keys, as many as queries.
TICKETS = {
    "causal": (4096, 64, 32, CAUSAL, (16, 0)),
    "causal, too few blocks": (4096, 64, 4, CAUSAL, None),
    "causal, pairs are faster": (1024, 64, 64, CAUSAL, None),
    "causal, few queries": (512, 64, 64, CAUSAL, None),
    "a prime number of heads": (4096, 128, 127, CAUSAL, None, 1),
    "no divisor of all heads is 16": (4096, 128, 11, CAUSAL, (22, 2)),
    "lengths": (4096, 128, 16, LENGTHS, (16, 2)),
    "lengths and causal": (1024, 192, 32, LENGTHS | CAUSAL, (16, 1)),
    "causal, latent attention": (4096, 192, 16, CAUSAL, None),
    "wide": (4096, 256, 8, CAUSAL, (32, 2)),
    "wide and long": (16384, 256, 8, CAUSAL, None),
    "wide, lengths": (4096, 256, 8, LENGTHS, (16, 2)),
    "a window": (4096, 128, 16, CAUSAL | dict(local_window_size=(1023, 0)), (16, 2)),
    "a short window": (4096, 128, 16, CAUSAL | dict(local_window_size=(127, 0)), None),
    "a short window past H=128": (4096, 256, 16, CAUSAL | dict(local_window_size=(127, 0)), None),
    "few keys": (4096, 64, 32, LENGTHS, None, 4, 77),
    "documents": (4096, 64, 16, CAUSAL | DOCUMENTS, (16, 0)),
    "documents past H=64": (4096, 128, 16, CAUSAL | DOCUMENTS, None),
    "a key mask": (4096, 64, 16, dict(mask=np.ones((4, 1, 1, 4096), bool)), (16, 0)),
    "no mask": (4096, 64, 32, {}, None),
    "ranges that are not known": (4096, 64, 32, dict(mask=masks.Custom(lambda b, n, t, s: s <= t)), None),
    "a function of an array": (4096, 64, 32, dict(mask=masks.Custom(lambda b, n, t, s, x: s <= t + x, ZERO)), None),
}


@pytest.mark.parametrize("name", TICKETS)
def test_where_query_blocks_go_by_tickets(name):
    T, H, heads, keywords, expected, *sizes = TICKETS[name]
    B, S = (*sizes, *(4, None)[len(sizes) :])
    case = problem(T, H, heads, heads, S, B=B, Hv=min(H, 128) if H < 256 else H, **keywords)
    plan = choose_forward.choose(case, H200)
    chosen = (plan.grid.l2_head_group, plan.config.out_chunks) if plan.by_tickets else None
    assert chosen == expected
    assert fits(forward_scratch.on_gpu(plan), H200)
    assert not choose_forward.choose(case, H200, may_take_tickets=False).by_tickets


def test_keys_of_8_bits_are_not_read_by_tickets():
    """They are converted by the whole load warpgroup, of which no warp is left to pass numbers on."""
    assert narrow.may_convert(ForwardConfig(by_tickets=True))  # which says nothing without persistent CTAs
    assert not narrow.may_convert(ForwardConfig(persistent_ctas=9, by_tickets=True))
