"""Measurements over several devices make complete rows, and the model that reads them counts what is really sent."""

import json
import math
import re

import numpy as np
import pytest

from benchmarks import measure, rows, training_program
from benchmarks.distributed import comms_model, scaling, tune_training
from benchmarks.distributed.comms_model import Curve, Network, Rates
from benchmarks.distributed.scaling_programs import Attention, Link
from benchmarks.training_program import SideBySide, Training
from models.step import make_train_step

pytestmark = pytest.mark.usefixtures("quick_compilation")
RUN = ["--suite", "tiny", "--devices", "2", "--rounds", "2", "--target-ms", "0"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The rows of a run on two devices."""
    out = tmp_path_factory.mktemp("scaling") / "rows.jsonl"
    scaling.main([*RUN, "--out", str(out)])
    return out


def test_a_run_makes_complete_rows(path):
    found = rows.read([path])
    groups = scaling.programs(scaling.SIZES["tiny"], 2, scaling._KINDS)
    assert len(found) == sum(map(len, groups)) == 4 + 4 + 6 + 3
    figure = {"link": "gb_per_s", "kernel": "tflops", "attention": "tflops", "training": "tokens_per_s"}
    for row in found:
        assert {"run", "device", "versions", "commit", "devices", "compile_s", "temp_bytes", "xla_flags"} <= set(row)
        assert row["error"] is None and row["p90_ms"] >= row["p50_ms"] >= row["min_ms"] > 0 and row["samples"] >= 2
        assert row[figure[row["kind"]]] > 0
    shared = [row for row in found if row.get("way") in ("ring", "all_to_all")]
    assert len(shared) == 4 and all(row["max_error"] < 1e-5 and row["devices"] == 2 for row in shared)
    alone, ring = (next(row for row in found if row.get("way") == way) for way in ("plain", "ring"))
    assert ring["argument_bytes"] == alone["argument_bytes"] / 2, "each device holds half of the sequence"
    assert ring["speedup"] == pytest.approx(alone["p50_ms"] / ring["p50_ms"], rel=1e-2)
    one, linear, parallel = (row for row in found if row["kind"] == "training")
    assert (linear["way"], parallel["way"]) == ("side by side", "data parallel")
    assert parallel["speedup"] == pytest.approx(2 * one["p50_ms"] / parallel["p50_ms"], rel=1e-2)
    assert parallel["of_linear"] == pytest.approx(linear["p50_ms"] / parallel["p50_ms"], rel=1e-2)
    json.dumps(found, allow_nan=False)


def test_training_is_measured_on_all_devices_that_were_asked_for():
    (group,) = scaling.programs(scaling.SIZES["tiny"], 3, ["training"])
    assert [program.devices for program in group] == [1, 2, 2, 3, 3]


def test_side_by_side_each_device_takes_the_step_of_one():
    one, several = (kind(n, "nano", 2, 32, "float32") for kind, n in ((Training, 1), (SideBySide, 2)))
    losses = []
    for program in (one, several):
        program.compile()
        assert program.error is None and program.run is not None
        (batch,) = program.arguments()
        losses.append([np.asarray(program.run(batch)["loss"]) for _ in range(3)])
    assert several.memory["argument"] == one.memory["argument"], "nothing is shared"
    np.testing.assert_allclose(np.stack(losses[1]), np.stack([losses[0]] * 2, axis=1), rtol=1e-5)


def test_variants_of_the_step_are_timed_beside_it(capsys):
    variant = "xla_gpu_all_gather_combine_threshold_bytes=2**20"
    tune_training.main(["--devices", "2", "--rounds", "2", "--seconds", "0", variant])
    head, *lines = (re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:])
    found = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    assert list(found) == ["one device", "side by side", "data parallel", variant]
    for name, line in found.items():
        assert float(line["ms"]) > 0 and line["samples"] == "2 x 1"
        for reference in ("one device", "side by side"):
            ratio = float(found[reference]["ms"]) / float(line["ms"])
            assert float(line[f"of {reference.removesuffix(' device')}"]) == pytest.approx(ratio, rel=0.02)
        assert (line["all-gather"] == "0") == (name in ("one device", "side by side"))


@pytest.mark.parametrize("text", ("option", "4", "option=x", "option=2**'a'", "**{}", "a=1, a=2"))
def test_options_that_cannot_be_read_say_what_can_be_written(text):
    with pytest.raises(SystemExit, match="Write for example 'xla_gpu_enable_nccl_user_buffers=True'"):
        tune_training.options(text)


def test_options_are_literals_or_powers():
    assert tune_training.options("a=True, b=2**27, c='d'") == {"a": True, "b": 2**27, "c": "d"}


@pytest.mark.parametrize("limit", (None, 2**20))
def test_a_variant_takes_the_place_of_the_step_s_own_options(limit, monkeypatch):
    given = {} if limit is None else {"xla_gpu_all_gather_combine_threshold_bytes": limit}
    used = []
    make = lambda *arguments: used.append(arguments[-1]) or make_train_step(*arguments)
    monkeypatch.setattr(training_program, "make_train_step", make)
    monkeypatch.setattr(Training, "_finish", lambda self, function, *shapes: None)
    Training(2, "nano", 2, 32, "float32", options=given).compile()
    (found,) = used
    assert found["xla_gpu_all_gather_combine_threshold_bytes"] == (2**40 if limit is None else limit)
    assert found["xla_gpu_enable_latency_hiding_scheduler"]


def test_what_the_budget_does_not_reach_is_a_row(tmp_path, capsys):
    found = scaling.main([*RUN, "--only", "link", "--budget-seconds", "0", "--out", str(tmp_path / "rows.jsonl")])
    assert len(found) == 4 and all("budget" in row["error"] for row in found)
    assert "budget" in capsys.readouterr().out


def test_wrong_results_are_found():
    x = np.ones((1, 4, 1, 2), np.float32)
    assert scaling.max_error({"out": 1.5 * x}, {"out": x}) == 0.5
    with pytest.raises(FloatingPointError, match="not finite"):
        scaling.max_error({"out": np.nan * x}, {"out": x})


def permuted_bytes(program, monkeypatch):
    """What a device sends in all collective-permutes of a program without loops, before what is not used is left out."""
    texts = []
    finish = lambda self, function, *shapes: texts.append(function.lower(*shapes).as_text())
    monkeypatch.setattr(measure.Compiled, "_finish", finish)
    program.compile()
    assert program.error is None
    types = re.findall(r"stablehlo.collective_permute.*: \(tensor<([\dx]+)x(f32|bf16|ui8|ui16|ui32)>\)", texts[0])
    widths = {"f32": 4, "bf16": 2, "ui32": 4, "ui16": 2, "ui8": 1}
    return sum(math.prod(map(int, shape.split("x"))) * widths[kind] for shape, kind in types)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_the_model_counts_the_bytes_of_a_hop(dtype, monkeypatch):
    workload = scaling.self_attention("ring", 1, 64, 4, 8, K=2, causal=True, dtype=dtype)
    rates = rates_of(N=4, K=2, H=8, itemsize=4 if dtype == "float32" else 2)
    forward, backward = (comms_model.hop_bytes(rates, 64, 4, direction) for direction in ("forward", "backward"))
    assert permuted_bytes(Attention(4, "ring", workload, "forward"), monkeypatch) == 3 * forward
    assert (
        permuted_bytes(Attention(4, "ring", workload, "fwdbwd"), monkeypatch)
        == 3 * forward + 2 * backward + 2 * forward
    )
    link = Link(4, "ppermute", 2**10)
    assert permuted_bytes(link, monkeypatch) == link.what()["sent_bytes"] == 2**10


def rates_of(bytes_per_s=1e30, latency=0.0, pairs_per_s=1e12, **heads):
    """Devices whose kernels take the same time for each pair at any size, and the backward 2.5 times as long."""
    heads = {"N": 16, "K": 16, "H": 128, "itemsize": 2, **heads}
    pair = {name: Curve((1,), (t / pairs_per_s,), 2) for name, t in (("forward", 1), ("backward", 2.5))}
    whole = {name: Curve((1,), (curve.seconds[0] / 2,), 2) for name, curve in pair.items()}
    link = Curve((1, 2**40), (latency + 1 / bytes_per_s, latency + 2**40 / bytes_per_s), 1)
    return Rates(**heads, pair=pair, whole=whole, ring=link, exchange=link)


def test_the_work_is_shared_and_what_is_sent_hides_or_not():
    S, R = 2**17, 8
    alone = 3.5 * S**2 / 2 / 1e12
    for way in comms_model.WAYS:  # with links of no cost
        np.testing.assert_allclose(comms_model.both(rates_of(), way, S, R), alone / R)
    hop = comms_model.hop_bytes(rates_of(), S, R, "forward")
    compute = S**2 / 2 / 1e12 / R
    for share in (0.5, 4.0):  # links that need this share of the time of the compute
        estimate = comms_model.ring(rates_of(bytes_per_s=(R - 1) * hop / (share * compute)), S, R, "forward")
        np.testing.assert_allclose([estimate.compute, estimate.communication], [compute, share * compute])
        np.testing.assert_allclose([estimate.best, estimate.worst], [max(1, share) * compute, (1 + share) * compute])
    slow = Network(devices=4, bytes_per_s=(R - 1) * hop / (4 * compute), latency_s=0)
    assert comms_model.ring(rates_of(), S, R, "forward", slow).best == pytest.approx(4 * compute)
    assert comms_model.ring(rates_of(), S, 4, "forward", slow).best == pytest.approx(2 * compute), "on one host"
    half_leaves = comms_model.all_to_all(rates_of(), S, R, "forward", slow)
    assert half_leaves.communication == pytest.approx(2 * hop / 2 / slow.bytes_per_s), "q, k, v, out; half of it leaves"
    assert half_leaves.best == half_leaves.worst == compute + half_leaves.communication


def test_all_to_all_needs_heads():
    assert comms_model.both(rates_of(N=16), "all_to_all", 2**16, 32) is None
    repeated, few = (comms_model.all_to_all(rates_of(bytes_per_s=1e9, K=K), 2**16, 8, "forward") for K in (8, 2))
    assert few.communication == pytest.approx(repeated.communication), "2 key heads, repeated to one for each device"


def test_curves():
    curve = Curve((10, 1000), (1.0, 100.0), order=2)
    np.testing.assert_allclose([curve(1), curve(10), curve(100), curve(1000), curve(2000)], [1, 1, 10, 100, 400])


def test_the_model_prints_its_check_and_its_table(path, capsys):
    comms_model.main([str(path)])
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ *(ring|all_to_all) +64 +2 +(forward|fwdbwd) ", printed, re.MULTILINE)) == 4
    assert re.search(r"^ *1048576 +1024 +512 ", printed, re.MULTILINE)
    assert path.with_suffix(".model.png").stat().st_size > 1000
    comms_model.main([str(path), "--no-plot", "--host-devices=8", "--network-gb-per-s=50", "--network-us=10"])
    assert "Network(devices=8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        comms_model.main([str(path), "--host-devices", "8"])
    assert "give all three" in capsys.readouterr().err


def test_rows_that_are_missing_are_named(path, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows.read([path]) if row["kind"] != "link"))
    with pytest.raises(SystemExit, match="no times of kind link"):
        comms_model.main([str(few)])


def test_noise_does_not_make_a_backward_that_takes_no_time():
    times = {("forward", 8): 2.0, ("fwdbwd", 8): 1.5, ("forward", 16): 3.0, ("fwdbwd", 16): 10.0}
    found = [{"direction": d, "shape": {"S": S}, "p50_ms": t} for (d, S), t in times.items()]
    np.testing.assert_allclose(comms_model._directions(found)["backward"].seconds, [2e-3, 7e-3])
