"""The suite `nowhere-slower`: its calls, its verdicts, and a run of it."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gate, measure, rows, run
from benchmarks.cpu_gate_workloads import cpu_gate_workloads
from benchmarks.gate_workloads import gate_workloads
from benchmarks.implementations import parse
from benchmarks.suites import suites
from pallas_fa.backends import choice


def test_the_calls_are_those_that_users_write():
    """At least 120, with every kind of call in bfloat16 and float32."""
    calls = [(w, d) for w in gate_workloads() for d in ("forward", "fwdbwd") if w.gradient or d == "forward"]
    assert len(calls) >= 120 and len({w.name for w in gate_workloads()}) == len(gate_workloads())
    kinds = collections.defaultdict(set)
    for w in gate_workloads():
        has = {
            "lengths": w.lengths is not None,
            "key mask": w.padding is not None,
            "dense mask": w.dense_mask,
            "window": w.window is not None,
            "soft cap": w.soft_cap is not None,
            "bias": w.bias is not None and w.learned,
            "bias without gradient": w.bias is not None and not w.learned,
            "grouped heads": w.K < w.N,
            "cross attention": w.T != w.S and w.gradient,
            "odd head dim": w.H % 8 != 0,
            "value head dim": w.H != w.Hv,
            "vmap": w.vmap,
            "long": w.S >= 8192,
            **{f"decoding {T}": T == w.T for T in (1, 4, 16)},
        }
        for kind, there in has.items():
            kinds[kind] |= {w.dtype} if there else set()
    assert all(found >= {"bfloat16", "float32"} for found in kinds.values()), kinds
    assert {w.dtype for w in gate_workloads()} == {"bfloat16", "float16", "float32"}


def test_the_calls_of_a_cpu_are_those_that_users_write():
    """Some forty, with every kind of call in float32."""
    workloads = cpu_gate_workloads()
    assert len({w.name for w in workloads}) == len(workloads) >= 40
    assert {w.dtype for w in workloads} == {"bfloat16", "float32"}
    w32 = [w for w in workloads if w.dtype == "float32"]
    kinds = {
        "short": any(w.T == w.S <= 128 for w in w32),
        "decoding": any(w.T == 1 for w in w32),
        "lengths of a cache": any(w.T == 1 and w.lengths is not None for w in w32),
        "cross attention": any(w.T != w.S and w.gradient for w in w32),
        "lengths": any(w.T == w.S and w.lengths is not None for w in w32),
        "key mask": any(w.padding is not None for w in w32),
        "grouped heads": any(w.K < w.N and w.gradient for w in w32),
        "dense mask": any(w.dense_mask for w in w32),
        "bias": any(w.bias and w.learned for w in w32) and any(w.bias and not w.learned for w in w32),
        "long": any(w.S >= gate.LONG and w.gradient for w in w32),
    }
    assert all(kinds.values()), kinds


def test_what_runs_is_what_runs_on_this_machine(monkeypatch):
    monkeypatch.setattr(choice, "cuda_devices", list)
    w = next(w for w in cpu_gate_workloads() if w.name == "bert-128-f32")
    assert gate.runs(parse("pallas_fa:None"), w) == "xla"


def test_padding_of_keys_alone_leaves_queries_as_they_are():
    """A cache of which a part is filled."""
    w = next(w for w in cpu_gate_workloads() if w.name == "decode-1024-lengths-f32")
    arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in w.shapes().items()}
    keywords = parse("pallas_fa:None").keywords(w, arrays, {})
    assert "query_seq_lengths" not in keywords and keywords["key_value_seq_lengths"].shape == (w.B,)
    assert w.pairs() == keywords["key_value_seq_lengths"].sum()


def test_jax_nn_chooses_xla_by_itself():
    """So the time of `jax.nn:None` is that of `jax.nn:xla`, and a run that leaves it out proves as much."""
    x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32)
    program = lambda name: str(
        jax.make_jaxpr(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation=name))(x, x, x)
    )
    assert program(None) == program("xla")


def _row(implementation, ms, runs=None, S=512, error=None, memory=100):
    return {"workload": f"s{S}", "direction": "forward", "implementation": implementation, "p50_ms": ms, "runs": runs,
            "shape": {"T": S, "S": S}, "error": error, "temp_bytes": memory}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "speed", "below"),
    [
        (_row("pallas_fa:None", 1.01, "mosaic_gpu"), 1 / 1.01, False),
        (_row("pallas_fa:None", 1.03, "xla"), 1 / 1.03, True),  # short, so the memory is no excuse
        (_row("pallas_fa:None", 1.10, "xla", S=4096, memory=20), 1 / 1.10, False),
        (_row("pallas_fa:None", 1.10, "xla", S=4096, memory=21), 1 / 1.10, True),
        (_row("pallas_fa:None", 1.13, "xla", S=4096, memory=20), 1 / 1.13, True),
        (_row("pallas_fa:None", 1.03, "mosaic_gpu", S=4096), 1 / 1.03, True),
        (_row("pallas_fa:mma", 1.9, "mma"), 2 / 1.9, False),  # named: beside jax.nn's XLA alone
        (_row("pallas_fa:None", None, "xla", error="wrong: differs from the first: out by 2"), 0, True),
    ],
)
def test_verdicts(ours, speed, below):
    S = ours["shape"]["S"]
    peers = [_row("jax.nn:xla", 2.0, S=S), _row("jax.nn:cudnn", 1.0, S=S), _row("jax.nn:None", 0.1, S=S, error="slow")]
    (verdict,) = gate.verdicts([*peers, ours])
    assert verdict.speed == pytest.approx(speed) and verdict.below == below
    assert (f"{int(below)} of 1 calls" in gate.report([verdict])) and (str(verdict) in gate.report([verdict])) == below


def test_a_run_ends_with_1_where_a_call_is_slower(tmp_path, monkeypatch, capsys):
    by_name = {w.name: w for w in gate_workloads()}
    small = dataclasses.replace(by_name["bert-128-lengths-f32"], B=2, T=16, S=16, N=2, K=2, H=8, Hv=8)
    suite = dataclasses.replace(suites()["nowhere-slower"], workloads=(small,), directions=("forward",))
    monkeypatch.setattr(run, "suites", lambda: {"nowhere-slower": suite})
    monkeypatch.setattr(gate, "LIMIT", 1e9)
    names = ["jax.nn:xla", "pallas_fa:None"]
    out = tmp_path / "rows.jsonl"
    argv = ["--suite", "nowhere-slower", "--implementations", *names, "--rounds", "1", "--target-ms", "0"]
    with pytest.raises(SystemExit) as end:
        run.main([*argv, "--out", str(out)])
    assert end.value.code == 1
    found = rows.read([out])
    assert [row["implementation"] for row in found] == names
    assert all(row["error"] is None and row["p50_ms"] > 0 and row["repeats"] > 1 for row in found)
    assert [row["runs"] for row in found] == [None, "xla"]
    assert "1 of 1 calls are slower than they may be" in capsys.readouterr().out


@pytest.mark.parametrize("direction", ["forward", "backward", "fwdbwd"])
def test_a_chained_program_gives_the_results_of_one_call(direction):
    w = dataclasses.replace(gate_workloads()[0], B=2, T=12, S=12, N=2, K=2, H=8, Hv=8, dtype="float32")
    results = []
    for repeats in (1, 3):
        program = measure.Program(parse("pallas_fa:reference"), w, direction, repeats)
        program.compile()
        assert program.error is None
        assert program.run is not None and ("while" in program.run.as_text()) == (repeats > 1)  # type: ignore[attr-defined]
        results.append(program.results(program.bind([w.inputs()]).first()[0]))
    for name, x in results[0].items():
        assert rows.distance(x, results[1][name]) < 1e-6, name


@pytest.mark.parametrize("direction", ["forward", "backward", "fwdbwd"])
def test_nothing_of_a_chained_program_is_dropped(direction):
    w = dataclasses.replace(gate_workloads()[0], B=1, T=12, S=12, N=2, K=2, H=8, Hv=8, dtype="float32")
    operations = []
    for repeats in (1, 2):  # XLA makes no loop of two calls
        program = measure.Program(parse("pallas_fa:reference"), w, direction, repeats)
        program.compile()
        assert program.run is not None
        operations.append(program.run.cost_analysis()["flops"])  # type: ignore[attr-defined]
    assert operations[1] > 1.9 * operations[0]
