"""The training program: its step, its log, and what it refuses. How a run ends is in test_run_ends.py."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot

from models import train
from models.errors import UsageError
from models.metrics import MetricsLog, read_rows
from models.plot import plot_run
from models.settings import parse, write_record
from models.step import init_state, make_optimizer, make_train_step, schedule
from tests.training import SENTENCE, arguments, final_state, losses, write_texts

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text"))


# ---- what is refused ----


def refused(capsys, args):
    """The message with which these arguments are refused, before anything is written."""
    assert train.main([str(argument) for argument in args]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--size", "huge"], ["--size='huge'", "gpt2-medium", "choose"]),
        (["--task", "audio"], ["--task='audio'", "text, images"]),
        (["--task", "images", "--size", "gpt2-small"], ["--size='gpt2-small'", "--task images", "tiny"]),
        (["--steps", "0"], ["--steps=0", "at least 1"]),
        (["--steps", str(2**31)], ["--steps=2147483648", "below 2**31"]),
        (["--warmup", "-1"], ["--warmup=-1", "not be negative"]),
        (["--batch", "-4"], ["--batch=-4", "at least 1"]),
        (["--checkpoint-every", "0"], ["--checkpoint-every=0", "at least 1"]),
        (["--learning-rate", "nan"], ["--learning-rate=nan", "positive finite"]),
        (["--learning-rate", "1e300"], ["--learning-rate=1e+300", "of float32"]),
        (["--temperature", "0"], ["--temperature=0.0", "positive finite"]),
        (["--temperature", "1e-300"], ["--temperature=1e-300", "of float32"]),
        (["--seed", "-1"], ["--seed=-1", "between 0 and"]),
        (["--dtype", "float16"], ["--dtype='float16'", "bfloat16"]),
        (["--optimizer", "sgd"], ["--optimizer='sgd'", "muon"]),
        (["--warmup", "50", "--steps", "50"], ["--warmup=50", "--steps=50", "lower"]),
        (["--context", "1"], ["--context=1", "at least 2"]),
        (["--prompt", ""], ["--prompt=''", "at least one character"]),
        (["--task", "images", "--data", "x"], ["--data='x'", "--task text"]),
        (["--task", "images", "--sinks"], ["--sinks=True", "--task text"]),
        (["--data", ""], ["--data=''", "'.' is the current directory"]),
        (["--data", "no/such/file"], ["--data='no/such/file'", "does not exist", "check the path"]),
        (["--implementation", "nonsense"], ["--implementation='nonsense'", "xla"]),
    ],
)
def test_bad_arguments(args, words, tmp_path, capsys):
    err = refused(capsys, [*args, "--out", tmp_path / "run"])
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_bad_data(tmp_path, capsys):
    empty, short, blank = tmp_path / "empty", tmp_path / "short.txt", tmp_path / "blank.txt"
    empty.mkdir()
    short.write_text("too short")
    blank.write_text("")
    (empty / ".hidden").write_text("not looked at" * 100)
    for path, words in [(empty, "holds no text"), (blank, "holds no text"), (short, "is too short")]:
        err = refused(capsys, ["--data", path, "--out", tmp_path / "run"])
        assert f"--data='{path}'" in err and words in err, err
    assert "--context=128 needs at least 130" in err and "smaller --context" in err


def test_bad_folders(folder, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in refused(capsys, arguments(folder, file))
    assert "can't be used (Not a directory)" in refused(capsys, arguments(folder, file / "below"))
    assert "can't be used (File name too long)" in refused(capsys, arguments(folder, tmp_path / ("x" * 300)))
    assert "its path must be UTF-8" in refused(capsys, arguments(folder, tmp_path / "caf\udce9"))
    assert "'.' is the current directory" in refused(capsys, arguments(folder, ""))
    err = refused(capsys, arguments(folder, tmp_path / "none", "--resume"))
    assert "--resume finds no checkpoint" in err and "leave out --resume" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_run_does_not_read_its_own_files(folder, capsys):
    err = refused(capsys, arguments(folder, folder / "runs" / "one"))
    assert "lies in --data" in err and "choose an --out elsewhere" in err
    parse(arguments(folder, folder / ".runs" / "one"))  # which the data leave out
    parse(arguments(folder / "00.txt", folder / "runs" / "one"))


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The folder of a short run that is done; in bfloat16 and with Muon, which must train too."""
    out = tmp_path_factory.mktemp("finished") / "run"
    more = ("--steps", 10, "--checkpoint-every", 5, "--dtype", "bfloat16", "--optimizer", "muon")
    assert train.main(arguments(folder, out, *more)) == 0
    first, *_, last = [row["loss"] for row in losses(out) if "loss" in row]
    assert last < first
    return out


def test_a_run_is_never_written_over(finished, folder, capsys):
    err = refused(capsys, arguments(folder, finished))
    assert "checkpoint at step 10" in err and "--resume" in err and "another --out" in err


def test_a_resumed_run_keeps_its_settings_and_its_data(finished, folder, tmp_path, capsys):
    err = refused(capsys, ["--out", finished, "--resume", "--batch", 9])
    assert "--batch=9" in err and "which has 8" in err and "leave out --batch" in err
    other = tmp_path / "other.txt"
    other.write_text(SENTENCE * 100)
    err = refused(capsys, ["--out", finished, "--resume", "--data", other])
    assert f"--data='{other}'" in err and "same bytes" in err
    settings = parse(["--out", str(finished), "--resume"])
    assert (settings.size, settings.steps, settings.data) == ("nano", 10, str(folder))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / "run")
    data = next((out / "checkpoints" / "10" / "default" / "ocdbt.process_0" / "d").iterdir())
    good = data.read_bytes()
    data.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    err = refused(capsys, ["--out", out, "--resume"])
    assert str(data) in err and "differs from its checksum" in err and "step 5 is intact" in err, err
    remove = err.partition("continue from it with: ")[2].partition(" && python -m models.train ")[0]
    subprocess.run(remove, shell=True, check=True)
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(finished)
    jax.tree.map(np.testing.assert_array_equal, final_state(out), final_state(finished))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b'{"task": "te', "Unterminated string"),
        (b"\xff\xfe\x00", "can't decode"),
        (b"[]", "it is no JSON object"),
        (b"{}", "it lacks 'task'"),
        ((b'"steps": 10', b'"steps": "10"'), "'steps' can't be '10'"),
        ((b'"steps": 10', b'"steps": 0'), "'steps' can't be 0: it must be at least 1"),
        ((b'"task": "text"', b'"task": "txet"'), "'task' can't be 'txet': it must be one of text, images"),
    ],
)
def test_a_damaged_record_is_named(finished, tmp_path, capsys, content, words):
    out = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("d"))
    record = out / "run.json"
    if content is None:
        record.unlink()
    else:
        record.write_bytes(content if isinstance(content, bytes) else record.read_bytes().replace(*content))
    err = refused(capsys, ["--out", out, "--resume"])
    assert f"can't read {str(record)!r}" in err and words in err and "another --out" in err, err


def test_default_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = parse([])
    assert new.out == Path("runs/text-tiny")
    for name in ("text-tiny", "text-tiny-2"):
        (tmp_path / "runs" / name / "checkpoints" / "5").mkdir(parents=True)
        write_record(dataclasses.replace(new, out=Path("runs") / name), "digest")
    assert parse([]).out == Path("runs/text-tiny-3")
    assert parse(["--resume"]).out == Path("runs/text-tiny-2")
    assert parse(["--task", "images"]).out == Path("runs/images-tiny")


# ---- the step and the log ----


def test_schedule_rises_and_falls():
    rate = schedule(2.0, warmup=9, steps=109)
    assert rate(0) == pytest.approx(0.2) and rate(9) == pytest.approx(2.0)
    assert rate(59) == pytest.approx(1.0) and rate(109) == pytest.approx(0, abs=1e-6)
    assert schedule(2.0, warmup=0, steps=1)(0) == 2.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_step_is_pure_donates_its_state_and_lowers_the_loss(optimizer):
    rule = make_optimizer(optimizer, 0.1)
    params = {"kernel": jnp.ones((4, 3)), "embedding": {"embedding": jnp.ones((5, 4))}, "scale": jnp.ones(3)}

    def loss(params, batch):
        out = params["embedding"]["embedding"][batch] @ params["kernel"] * params["scale"]
        return jnp.mean((out - jnp.arange(3)) ** 2)

    step = make_train_step(loss, rule)
    batch = np.array([0, 2, 2])
    first = init_state(jax.tree.map(jnp.copy, params), rule)
    state, metrics = step(first, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))
    assert metrics["loss"] == loss(params, batch)
    again, _ = step(init_state(jax.tree.map(jnp.copy, params), rule), batch)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    for _ in range(30):
        state, metrics = step(state, batch)
    assert state.step == 31
    assert metrics["loss"] < 0.1 * loss(params, batch)


def test_the_log_drops_what_is_to_be_repeated_and_what_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, step=0)
    log.append([{"step": step, "loss": 1 / step} for step in (1, 2, 3)])
    log.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    log = MetricsLog(path, step=2)
    log.append([{"step": 3, "loss": 7.0}])
    log.close()
    assert read_rows(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 7.0}]


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"step": 2, "lo', b"2", b"{}", b'{"step": "2"}', b""])
def test_damage_to_the_log_is_named_and_costs_no_row(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1, "loss": 2.0}\n' + line + b'\n{"step": 3, "loss": 1.0}\n'
    path.write_bytes(content)
    with pytest.raises(UsageError, match="metrics.jsonl' is damaged: line 2 is b.*delete it to go on without it"):
        MetricsLog(path, step=3)
    assert path.read_bytes() == content


def test_a_damaged_log_ends_the_program_with_a_message(finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / "run")
    log = out / "metrics.jsonl"
    log.write_bytes(b"\xff\n" + log.read_bytes())
    assert "line 1 is b'\\xff'" in refused(capsys, ["--out", out, "--resume"])
    log.unlink()
    assert train.main(["--out", str(out), "--resume"]) == 0  # nothing is left to do, and no validation to report
    assert "order-2 byte model" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "labels"), [(3, []), (99, []), (100, ["training, mean of 2 steps"])])
def test_the_curve_has_a_mean_where_there_is_one(tmp_path, monkeypatch, steps, labels):
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    folder = tmp_path / "a$b^$"  # no formula
    folder.mkdir()
    rows = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_run(folder).read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert axes.get_legend_handles_labels()[1] == ["training, each step", *labels]
    assert axes.get_title() == "a$b^$"
    monkeypatch.undo()
    pyplot.close(drawn[0])


def test_a_run_without_rows_is_drawn_too(tmp_path):
    assert plot_run(tmp_path).exists()
