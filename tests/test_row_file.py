"""A run puts its rows in the place of a file only where nothing is lost by it, and says what can't be run before it runs."""

import json
import subprocess
import sys

import pytest

from benchmarks import (
    command,
    decode,
    gate,
    generation,
    implementations,
    overhead,
    plot,
    report,
    row_file,
    rows,
    run,
    training,
    tune,
)
from benchmarks.distributed import comms_model, scaling, tune_training
from benchmarks.row_file import record
from models import plot as plot_of_run


def row(workload, implementation="a", p50_ms=1.0, **more):
    error = None if p50_ms else "not run: the budget was spent"
    return {"suite": "s", "workload": workload, "implementation": implementation, "error": error} | (
        {"p50_ms": p50_ms, **more} if p50_ms else more
    )


@pytest.fixture
def path(tmp_path):
    """A file with rows of an earlier run: three with times, one with an error."""
    out = tmp_path / "rows.jsonl"
    record([row("x"), row("y"), row("x", "b"), row("y", "b", p50_ms=None)], out)
    return out


def others(path):
    return [p for p in path.parent.iterdir() if p != path]


def test_a_new_file_is_made(path):
    assert len(rows.read([path])) == 4 and not others(path)


def test_a_whole_run_takes_the_place_of_the_file(path):
    made = [row(w, i, 2.0) for w in "xyz" for i in "ab"]
    outcome = record(made, path)
    assert outcome.path == path and rows.read([path]) == made and not others(path)


@pytest.mark.parametrize(
    "made",
    [
        [row("x", p50_ms=2.0)],
        [row(w, i, 2.0) for w in "xz" for i in "ab"],
        [row("x"), row("y"), row("x", "b"), row("y", "c")],
        [row("x"), row("y"), row("x", "b", p50_ms=None), row("y", "b")],
        [row("x"), row("y"), row("x", "b") | {"error": "wrong: not finite"}, row("y", "b")],
        [row(w, i, 2.0) | {"suite": "other"} for w in "xy" for i in "ab"],
    ],
    ids=["one row", "another workload", "another implementation", "one without a time", "one wrong", "another suite"],
)
def test_a_run_that_would_lose_rows_goes_beside(path, made):
    before = path.read_text()
    outcome = record(made, path)
    assert path.read_text() == before
    assert others(path) == [outcome.path] and rows.read(others(path)) == made
    assert "rows.jsonl stays: this run lacks" in outcome.message and outcome.path.name in outcome.message
    record(made, path)
    assert len(others(path)) == 2, "each such run has a file of its own"


def test_an_interrupt_keeps_the_rows_of_both(path, tmp_path, capsys):
    def interrupted():
        yield row("x", p50_ms=2.0)
        raise KeyboardInterrupt

    before = path.read_text()
    with pytest.raises(SystemExit) as end:
        command.carry_out(interrupted(), path, lambda found: f"table of {len(found)}", plot=False)
    assert end.value.code == 130
    assert path.read_text() == before and rows.read(others(path)) == [row("x", p50_ms=2.0)]
    printed = capsys.readouterr().out
    assert "table of 1" in printed and "rows.jsonl stays: the run was interrupted" in printed
    new = tmp_path / "new" / "rows.jsonl"
    assert record(interrupted(), new).path != new and not new.exists(), "what has its name is a run that ended"


@pytest.mark.parametrize("end", [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_is_left_of_a_run_without_rows(path, end):
    def failing():
        raise end
        yield

    before = path.read_text()
    if end is KeyboardInterrupt:
        assert record(failing(), path).interrupted
    else:
        with pytest.raises(end):
            record(failing(), path)
    assert path.read_text() == before and not others(path)


def never():
    raise AssertionError("something ran")
    yield


@pytest.mark.parametrize("held", ["no rows", "3", "\xff"])
def test_a_file_of_something_else_is_left_alone(tmp_path, held):
    out = tmp_path / "notes.txt"
    out.write_bytes(held.encode("latin-1"))
    with pytest.raises(SystemExit, match=r"--out .*notes.txt: it exists and is no file of rows"):
        record(never(), out)
    assert out.read_bytes() == held.encode("latin-1")
    with pytest.raises(SystemExit, match="must hold rows"):
        command.read_rows([out])


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "rows.jsonl", tmp_path):
        with pytest.raises(SystemExit, match=r"--out .*: it cannot be written \(.*Name a file in a folder"):
            record(never(), out)


_KNOWN = "Known are 'mosaic_gpu', 'mma', 'xla', 'reference'"


@pytest.mark.parametrize(
    ("main", "argv", "words"),
    [
        (run.main, ["--suite", "no"], "invalid choice: 'no' (choose from 'cpu', 'hopper-forward'"),
        (run.main, ["--suite", "cpu", "--workloads", "small-128", "no"], "['no']: the suite cpu has causal-2048, full"),
        (run.main, ["--directions", "up"], "choose from 'forward', 'backward', 'fwdbwd'"),
        (run.main, ["--implementations", "jax.nn:xla", "pallas_fa:no"], "'pallas_fa:no': implementation='no'"),
        (run.main, ["--implementations", "jax.nn:no"], "'no' is not known. Of jax.nn are known None, cudnn, xla"),
        (
            run.main,
            ["--implementations", "triton:flash"],
            "a library of pallas_fa, jax.nn, einsum, tokamax, dew_flash_attn, cudnn, torch",
        ),
        (run.main, ["--implementations", "tokamax:mosaic"], "tokamax is not installed here"),
        (run.main, ["--baseline", "jax.nn:cudnn"], "name one that is measured beside: jax.nn:xla, pallas_fa:xla"),
        (run.main, ["--rounds", "0"], "--rounds: '0': ask for a whole number, 1 or more"),
        (run.main, ["--rounds", "-3"], "--rounds: '-3': ask"),
        (run.main, ["--rounds", "2.5"], "--rounds: '2.5': ask"),
        (run.main, ["--compile-threads", "0"], "--compile-threads: '0': ask"),
        (run.main, ["--budget-seconds", "-1"], "--budget-seconds: '-1': ask for a number, 0 or more"),
        (run.main, ["--target-ms", "nan"], "--target-ms: 'nan': ask"),
        (training.main, ["--contexts", "33"], "[33]: the suite tiny has 32, 64"),
        (training.main, ["--implementations", "pallas_fa:no"], _KNOWN),
        (training.main, ["--rounds", "0"], "--rounds: '0': ask"),
        (training.main, ["--steps", "-1"], "--steps: '-1': ask for a whole number, 0 or more"),
        (scaling.main, ["--rounds", "0"], "--rounds: '0': ask"),
        (scaling.main, ["--devices", "0"], "--devices: '0': ask"),
        (scaling.main, ["--devices", "9"], "--devices: 9: there are 8 here"),
        (scaling.main, ["--only", "no"], "choose from 'link', 'kernel', 'attention', 'training'"),
        (tune.main, ["window-8192", "stages=2", "--rounds", "0"], "--rounds: '0': ask"),
        (tune.main, ["no", "stages=2"], "choose from"),
        (tune_training.main, ["--rounds", "0"], "--rounds: '0': ask"),
        (comms_model.main, ["rows.jsonl", "--network-gb-per-s", "0"], "'0': ask for a number above 0"),
        (overhead.main, ["/none", "."], "'/none': there is no pallas_fa in it. Name the root of a checkout"),
        (gate.main, ["--bogus"], "the following arguments are required: rows"),
        (decode.main, ["--tiles", "1,2"], "'1,2': ask for compute warpgroups, keys of a block, stages and splits"),
        (
            generation.main,
            ["--size", "nano", "--prompt", "99"],
            "--prompt: 99: the context of --size nano is 32 tokens",
        ),
        (plot_of_run.main, ["/none"], "argument FOLDER: '/none' holds no metrics.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_said_before_anything_runs(main, argv, words, capsys, monkeypatch):
    monkeypatch.setattr(command, "carry_out", lambda *_, **__: pytest.fail("something ran"))
    monkeypatch.setattr(implementations, "installed", lambda library: library != "tokamax")
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "argv", "words"),
    [
        (plot.main, [row_file.RESULTS / "nvidia-h200" / "decode.jsonl"], "rows of decode have no picture"),
        (comms_model.main, [row_file.RESULTS / "cpu" / "cpu.jsonl"], "cpu.jsonl: not all rows have the fields kind"),
        (gate.main, [row_file.RESULTS / "nvidia-h200" / "decode.jsonl"], "rows have the fields direction, shape"),
        (report.main, ["--out", row_file.RESULTS], "it cannot be written"),
        (tune.main, ["window-8192", "stages=x"], "'stages=x': 'x' must be a literal, such as 3, True or (2, 1)"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_wrong_files_and_values_are_named(main, argv, words):
    with pytest.raises(SystemExit) as end:
        main([str(x) for x in argv])
    assert words in str(end.value)


@pytest.mark.parametrize("below", (True, False))
def test_kept_rows_are_judged(below, tmp_path, capsys):
    shape = {"T": 8, "S": 8}
    made = [
        {"workload": "w", "direction": "forward", "implementation": name, "shape": shape, "error": None, "p50_ms": ms}
        for name, ms in (("pallas_fa:None", 2.0 if below else 1.0), ("jax.nn:xla", 1.5))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, made)))
    if below:
        with pytest.raises(SystemExit, match="1"):
            gate.main([str(path)])
    else:
        gate.main([str(path)])
    assert f"{int(below)} of 1 calls are slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "code"), [(None, 0), (KeyboardInterrupt(), 130), (SystemExit(130), 130), (SystemExit("so"), "so")]
)
def test_exit_codes(raised, code):
    def main():
        if raised is not None:
            raise raised

    with pytest.raises(SystemExit) as end:
        command.start(main)
    assert end.value.code == code


def test_output_that_nobody_reads():
    """As with `| head`: no traceback, also where all that is printed fits the buffer and fails at the end."""
    for count in (1, 100_000):
        code = f"from benchmarks import command; command.start(lambda: print('row\\n' * {count}))"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b"" and process.wait() == 141
