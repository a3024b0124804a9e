"""The benchmarks: the workloads are what they say, their truth is the library's, and a run makes complete rows."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

import pallas_fa
from benchmarks import cudnn, decode, flash_attn3, measure, processes, ragged, rows, run, tune
from benchmarks.decode_steps import Step, attend
from benchmarks.implementations import parse
from benchmarks.suites import suites
from benchmarks.truth import truth
from benchmarks.workloads import Workload, self_attention
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import scratch_bytes
from pallas_fa.backends.mma.backward.choose import plans
from pallas_fa.backends.mma.backward.scratch import on_gpu
from pallas_fa.backends.mma.forward import scratch as forward
from pallas_fa.backends.mma.forward.choose import choose
from pallas_fa.problem import normalise

pytestmark = pytest.mark.usefixtures("quick_compilation")
_SMALL = [
    self_attention("causal", 2, 24, 4, 8, K=2, causal=True, dtype="float32"),
    self_attention("window", 2, 24, 4, 8, K=2, window=(3, 2), dtype="float32"),
    self_attention("documents", 2, 24, 4, 8, K=2, causal=True, documents=8, dtype="float32"),
    self_attention("padding", 3, 24, 2, 8, padding=0.5, soft_cap=2.0, dtype="float32"),
    self_attention("bias", 3, 24, 2, 8, padding=0.25, bias="NTS", dtype="float32"),
    Workload("cross", 2, 5, 24, 4, 2, 8, 16, "float32", sinks=True, dropout=0.3, layout="BNTH"),
    self_attention("relative", 2, 24, 4, 8, K=2, causal=True, relative=True, dtype="float32"),
    self_attention("neighbours", 2, 24, 4, 8, K=2, causal=True, pattern="neighbours", dtype="float32"),
]
_by_name = pytest.mark.parametrize("workload", _SMALL, ids=lambda w: w.name)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(workload, implementation, arrays, d_out):
    attend = lambda arrays: implementation.attend(workload, arrays, implementation.masks(workload))
    out, pullback = jax.vjp(attend, arrays)
    return {"out": out, **pullback(d_out)[0]}


@_by_name
def test_pairs_are_those_of_the_mask(workload):
    dense = np.broadcast_to(workload.dense(), (workload.B, 1, workload.T, workload.S))
    assert workload.pairs() == dense.sum()
    assert workload.flops("forward") == 2 * (workload.H + workload.Hv) * workload.N * dense.sum()
    assert workload.flops("fwdbwd") == workload.flops("forward") + workload.flops("backward")


@pytest.mark.parametrize(
    "name",
    [
        "pallas_fa:xla",
        "pallas_fa:xla+dense",
        "pallas_fa:xla+intervals",
        "pallas_fa:xla+blocks",
        "jax.nn:xla",
        "jax.nn:xla+dense",
        "jax.nn:xla+bias",
    ],
)
@_by_name
def test_every_form_agrees_with_truth(workload, name):
    """So the masks in each form, the truth and the library are three ways to say the same."""
    implementation = parse(name)
    arrays, d_out = workload.inputs()
    results = functools.partial(_gradients, workload, implementation, arrays, d_out)
    if (workload.name, name) in _LACKS:
        error, words = _LACKS[workload.name, name]
        with pytest.raises(error, match=words):
            results()
        return
    true = truth(workload, arrays, d_out, affordable=2**20)
    errors = true.errors(results())
    assert set(errors) == {"out", *arrays}
    assert max(e["max"] for e in errors.values()) < 1e-5


# Pairs that a library can't compute, and what it says; all others agree with the truth.
_LACKS = {
    **{
        ("padding", f"jax.nn:xla{form}"): (NotImplementedError, "jax.nn has no soft cap")
        for form in ("", "+dense", "+bias")
    },
    **{
        ("cross", f"jax.nn:xla{form}"): (NotImplementedError, "jax.nn has no sinks") for form in ("", "+dense", "+bias")
    },
    ("bias", "jax.nn:xla+bias"): (NotImplementedError, "takes the place of a mask"),
    ("relative", "jax.nn:xla+bias"): (NotImplementedError, "takes the place of a mask"),
    ("neighbours", "pallas_fa:xla+intervals"): (NotImplementedError, "no interval of keys"),
}


def test_forms_of_masks_are_run_where_there_is_a_mask():
    """Elsewhere they would repeat what the form without one says."""
    for name in ("jax.nn:xla+dense", "jax.nn:xla+bias", "pallas_fa:xla+blocks"):
        applies = {workload.name for workload in _SMALL if parse(name).applies(workload)}
        assert applies == {"causal", "window", "documents", "relative", "neighbours"}
    assert all(parse(name).applies(w) for w in _SMALL for name in ("jax.nn:xla", "pallas_fa:xla+deterministic"))
    groups = run.programs_of(_SMALL, ["forward", "backward"], [parse("jax.nn:xla+bias"), parse("pallas_fa:xla")])
    assert [len(group) for group in groups] == [2] * 6 + [1] * 6 + [2] * 4
    assert not run.programs_of(_SMALL[3:6], ["forward"], [parse("jax.nn:xla+bias")])


def test_truth_of_a_few_rows_is_part_of_the_truth_of_all():
    workload = self_attention("long", 1, 300, 2, 8, causal=True, dtype="float32")
    arrays, d_out = workload.inputs()
    few, whole = (truth(workload, arrays, d_out, affordable) for affordable in (1, 2**20))
    assert set(few.values) == {"out", "query"} and len(few.rows) == 64
    for name, value in few.values.items():
        np.testing.assert_allclose(value, whole.values[name][:, few.rows], rtol=1e-12, atol=1e-12)


def test_errors_are_found():
    workload = _SMALL[0]
    arrays, d_out = workload.inputs()
    true = truth(workload, arrays, d_out, affordable=2**20)
    out = pallas_fa.dot_product_attention(*(arrays[n] for n in ("query", "key", "value")), is_causal=True)
    assert true.errors({"out": out})["out"]["max"] < 1e-5
    assert true.errors({"out": out.at[-1, 0, -1, 0].add(1)})["out"]["max"] > 0.1
    broken = true.errors({"out": out.at[-1, 0, -1, 0].set(np.nan)})
    assert rows.accuracy(broken, 24)["max_error"] is None


@pytest.mark.parametrize("direction", ("forward", "backward", "fwdbwd"))
def test_a_program_computes_its_direction(direction):
    workload, implementation = _SMALL[4], parse("pallas_fa:xla")
    program = measure.Program(implementation, workload, direction)
    program.compile()
    assert program.error is None and program.memory["temp"] > 0
    inputs = measure.input_sets(workload)
    bound = program.bind(inputs)
    got = program.results(bound.first()[0])
    want = _gradients(workload, implementation, *inputs[0])
    names = {"forward": {"out"}, "backward": set(want) - {"out"}, "fwdbwd": set(want)}[direction]
    assert set(got) == names
    for name in names:
        np.testing.assert_allclose(got[name], want[name], atol=1e-5)


def test_turns_pair_every_sample_with_one_of_the_baseline():
    class Fake:
        def __init__(self, name, seconds):
            self.program = measure.Program(parse(name), _SMALL[0], "forward")
            self.seconds, self.taken = seconds, 0

        def sample(self):
            self.taken += 1
            return self.seconds

    base, fast, slow = Fake("jax.nn:xla", 2.0), Fake("pallas_fa:xla", 1.0), Fake("pallas_fa:reference", 4.0)
    far = (math.inf, math.inf)
    ratios = measure.take_turns([fast, slow], base, 5, far, after=lambda: None)  # type: ignore[arg-type]
    assert ratios == {"pallas_fa:xla": [2.0] * 5, "pallas_fa:reference": [0.5] * 5}
    assert (base.taken, fast.taken, slow.taken) == (10, 5, 5)
    measure.take_turns([fast], None, 5, (-math.inf, -math.inf), after=lambda: None)  # type: ignore[arg-type]
    assert fast.taken == 6, "one round even where there is no time"


def test_a_run_makes_complete_rows_and_a_plot(tmp_path, monkeypatch, capsys):
    suite = dataclasses.replace(
        suites()["cpu"],
        workloads=tuple(dataclasses.replace(w, series=s) for w, s in zip(_SMALL[:3], ("", "s", ""), strict=True)),
    )
    monkeypatch.setattr(run, "suites", lambda: {"cpu": suite})
    out = tmp_path / "rows.jsonl"
    names = ["jax.nn:xla", "pallas_fa:xla", "jax.nn:cudnn", "pallas_fa:mosaic_gpu"]
    run.main(["--suite", "cpu", "--implementations", *names, "--rounds", "3", "--target-ms", "0", "--out", str(out)])

    found = rows.read([out])
    assert len(found) == 3 * 2 * len(names)
    assert len({(row["workload"], row["implementation"], row["direction"]) for row in found}) == len(found)
    for row in found:
        assert {"run", "device", "versions", "shape", "dtype", "mask", "config", "provenance", "error"} <= set(row)
        if row["implementation"] in names[:2]:
            assert row["error"] is None and row["max_error"] < 1e-5 and row["temp_bytes"] > 0
            assert row["p90_ms"] >= row["p50_ms"] >= row["min_ms"] > 0 and row["tflops"] > 0 and row["ratio"] > 0
        else:
            assert row["error"] and "p50_ms" not in row
    json.dumps(found, allow_nan=False)
    printed = capsys.readouterr().out
    assert "pallas_fa:xla" in printed and "cuDNN" in printed
    assert out.with_suffix(".png").stat().st_size > 1000


def test_what_the_budget_does_not_reach_is_a_row(tmp_path):
    argv = ["--suite", "cpu", "--workloads", "small-128", "--directions", "forward", "--budget-seconds", "0"]
    found = run.main([*argv, "--out", str(tmp_path / "rows.jsonl"), "--no-plot"])
    assert len(found) == 3 and all("budget" in row["error"] for row in found)


def test_a_part_or_an_interrupt_leaves_the_kept_rows_alone(tmp_path, monkeypatch, capsys):
    """Of two workloads that are kept, one is measured again; then a run of both is interrupted after the first."""
    small = dataclasses.replace(suites()["cpu"], workloads=_SMALL[:2], directions=("forward",))
    monkeypatch.setattr(run, "suites", lambda: {"cpu": small})
    out = tmp_path / "rows.jsonl"
    argv = ["--implementations", "jax.nn:xla", "--rounds", "1", "--target-ms", "0", "--no-plot", "--out", str(out)]
    run.main(argv)
    kept = out.read_text()
    assert [row["workload"] for row in rows.read([out])] == ["causal", "window"]
    found = run.main([*argv, "--workloads", "window"])
    (part,) = tmp_path.glob("*.partial-*")
    assert out.read_text() == kept and rows.read([part]) == found and len(found) == 1
    part.unlink()

    turns, taken = measure.take_turns, []

    def interrupted(*args, **kwargs):
        taken.append(args)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return turns(*args, **kwargs)

    monkeypatch.setattr(measure, "take_turns", interrupted)
    with pytest.raises(SystemExit) as end:
        run.main(argv)
    (part,) = tmp_path.glob("*.partial-*")
    assert end.value.code == 130 and out.read_text() == kept
    assert [row["workload"] for row in rows.read([part])] == ["causal"]
    assert "rows.jsonl stays: the run was interrupted" in capsys.readouterr().out


def test_workloads_are_divided_in_their_order():
    assert processes.divide("abcde", 2) == [["a", "b"], ["c", "d", "e"]]
    assert processes.divide("ab", 5) == [["a"], ["b"]]


@pytest.mark.full
def test_processes_make_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = "--workloads small-128 ragged-1000 --implementations jax.nn:xla --rounds 1 --directions forward --no-plot"
    found = run.main(["--suite", "cpu", *options.split(), "--processes", "2", "--out", str(tmp_path / "rows.jsonl")])
    assert [row["workload"] for row in found] == ["small-128", "ragged-1000"] and all(row["p50_ms"] for row in found)
    assert len({row["run"] for row in found}) == 1 and all(row["processes"] == 2 for row in found)


def test_processes_need_memory_that_they_can_share(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    with pytest.raises(SystemExit, match="XLA_PYTHON_CLIENT_PREALLOCATE=false"):
        run.main(["--suite", "cpu", "--processes", "2", "--out", str(tmp_path / "rows.jsonl")])


def test_what_flash_attention_3_lacks_is_named():
    with pytest.raises(NotImplementedError, match="^dew_flash_attn has no soft cap$"):
        flash_attn3.attend(self_attention("capped", 1, 24, 2, 8, soft_cap=2.0), {})


def test_what_pytorch_is_not_here_for_is_named():
    program = run.programs_of(
        [self_attention("capped", 1, 24, 2, 8, soft_cap=2.0)], ["forward"], [parse("torch:flash")]
    )
    program[0][0].compile()
    assert program[0][0].error == "NotImplementedError: torch:flash has no soft cap"


def test_cudnn_is_there_for_dropout_alone():
    with pytest.raises(NotImplementedError, match="^cudnn:jax is here for dropout alone"):
        cudnn.attend(self_attention("plain", 1, 24, 2, 8), {})


def test_wrong_names_are_explained():
    with pytest.raises(ValueError, match=r"library:backend\[\+form\]"):
        parse("cudnn")


def test_suites_are_those_of_the_tables():
    table = suites()["hopper-forward"].workloads
    lines = [w for w in table if w.series]
    assert {(w.H, w.causal, w.S) for w in lines} == {
        (H, causal, S) for H in (64, 128, 256) for causal in (False, True) for S in (1024, 4096, 16384)
    }
    assert all(w.B * w.S == 16384 and w.N * w.H == 2048 and w.dtype == "bfloat16" for w in lines)
    for name, suite in suites().items():
        assert len({w.name for w in suite.workloads}) == len(suite.workloads), name
        assert suite.baseline in suite.implementations and all(parse(i).name == i for i in suite.implementations)
    windowed = next(w for w in suites()["hopper-forward-masks"].workloads if w.window)
    assert windowed.pairs() == 2 * (1024 * 8192 - 1024 * 1023 // 2), "each query sees at most 1024 keys"


def test_a_variant_changes_the_tiles_of_the_table():
    causal = {w.name: w for w in suites()["hopper-backward"].workloads}["h64-causal-4096"]
    for direction, change in (("forward", "l2_head_group=2"), ("backward", "l2_head_group=2, ds_stages=1")):
        table = tune.table_config(causal, direction)
        changed = tune.variant(causal, direction, change, "label")
        found = getattr(changed.config, direction)
        assert found.l2_head_group == 2 != table.l2_head_group and found.compute_wgs == table.compute_wgs
        assert changed.name == "label"
        assert changed.keywords(causal, {}, {})["config"] is changed.config


def test_the_first_pass_is_that_of_the_gradients():
    wide = {w.name: w for w in suites()["hopper-backward"].workloads}["h256-causal-4096"]
    assert tune.table_config(wide, "backward").by_gradient


def test_tiles_for_99_kb_take_that_much():
    workload = {w.name: w for w in suites()["mma-99KB"].workloads}["h256-causal-1024"]
    needed = []

    def note(q):
        arrays = dict.fromkeys(("query", "key", "value"), q)
        for name in ("pallas_fa:mma", "pallas_fa:mma+99KB"):
            problem, _ = normalise(**parse(name).keywords(workload, arrays, {}))
            gpu = Gpu("9.0", 132, 227 * 1024)
            (plan,) = plans(problem, gpu)
            needed.append([scratch_bytes(on_gpu(plan)), scratch_bytes(forward.on_gpu(choose(problem, gpu)))])

    jax.eval_shape(note, jax.ShapeDtypeStruct((workload.B, workload.T, workload.N, workload.H), workload.dtype))
    assert min(needed[0]) > 99 * 1024 >= max(needed[1])


def test_variants_alike_have_names_of_their_own():
    assert tune.labels(["a=1", "b=2", "a=1", "a=1"]) == ["a=1", "b=2", "a=1 again", "a=1 again again"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block_q=3", ["'block_q=3'", "unexpected keyword argument", "ForwardConfig("]),
        ("stages=0", ["stages=0 must be at least 1", "whose fields may be changed"]),
        ("3", ["'3': it must be field=value"]),
        ("stages=", ["'stages='", "The table's choice"]),
    ],
)
def test_a_variant_that_cannot_be(text, words):
    with pytest.raises(SystemExit) as error:
        tune.main(["window-8192", text])
    assert all(word in str(error.value) for word in words), error.value


def test_variants_are_compared_with_the_first():
    labels = "table", "other", "wrong"
    xla = [dataclasses.replace(tune.TABLE, backend="xla", label=label) for label in labels]
    programs = [measure.Program(implementation, _SMALL[0], "backward") for implementation in xla]
    measure.compile_all(programs[:2], 1, math.inf)
    programs[2].error = "said so"
    head, table, other, wrong = tune.compare(programs, rounds=3, target_s=1e-3)
    assert head[0] == "tiles" and [line[0] for line in (table, other, wrong)] == ["table", "other", "wrong"]
    assert table[3] == "" and float(other[3]) > 0 and wrong[1] == "-" and wrong[-1] == "said so"
    assert float(table[-1]) < 1e-5 and float(other[-1]) < 1e-5


DECODING = {
    "plain": Step(2, 40, N=4, K=2, H=16),
    "lengths": Step(2, 40, N=4, K=2, H=16, length=24),
    "window, sinks": Step(2, 40, N=4, K=2, H=16, length=40, window=8, sinks=True),
    "drafts": Step(2, 40, N=4, K=2, H=16, T=3),
    "pages": Step(2, 64, N=4, K=2, H=16, length=64, page=16),
    "latent": Step(2, 40, N=4, K=1, H=24, Hv=16),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding_steps_are_attention(name, monkeypatch):
    monkeypatch.setattr(decode, "_CACHE_BYTES", 1)
    step = DECODING[name]
    q, [cache] = decode.caches_of(step)
    fn = attend(parse("pallas_fa:xla"), step)
    assert decode.error_of(jax.jit(fn), step, q, *cache) < 1e-2
    assert jax.eval_shape(decode.chained(fn, 2), q, [cache]).shape == q.shape


def test_calls_of_ragged_batches_are_attention():
    batch = ragged.Batch(((3, 20), (130, 140), (1, 50)), 140, N=4, K=2, H=16)
    q, pages, _, table, *_ = given = batch.arguments()
    fn = ragged.call(batch, implementation="xla")
    out = jax.jit(fn)(*given)
    for last in (1, 2, 3):  # the sequences up to each, whose last one is looked at
        some = dataclasses.replace(batch, sequences=batch.sequences[:last])
        assert ragged.error_of(some, out, q, pages, table[:last]) < 1e-2
    np.testing.assert_array_equal(ragged.repeated(fn, 1)(*given), out)
    assert batch.flops == 4 * 4 * 16 * sum(S - t for T, S in batch.sequences for t in range(T))


def test_what_decoding_steps_read_and_compute():
    assert DECODING["lengths"].bytes == 2 * (2 * 24 * 2) * 2 * 16  # B, keys and values, heads, H
    assert DECODING["window, sinks"].bytes == 2 * (2 * 8 * 2) * 2 * 16
    assert DECODING["latent"].bytes == 2 * (2 * 40) * 24
    assert DECODING["latent"].flops == 2 * (2 * 4 * 40) * (24 + 16)
