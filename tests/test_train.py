"""The training program: its step, its log, what it refuses, and every way in which a run can end."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import train
from models.checkpoint import Checkpoints, list_steps
from models.errors import is_disk_full
from models.metrics import MetricsLog, read_rows
from models.settings import parse
from models.step import init_state, make_optimizer, make_train_step, schedule

ROOT = Path(__file__).parent.parent
SENTENCE = "the quick brown fox number {} jumps over the lazy dog; "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty files of easy text, 2 kB each."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(SENTENCE.format(index) * 40)
    return folder


def arguments(folder, out, *more):
    settings = ["--size", "nano", "--data", folder, "--out", out, "--steps", 120, "--checkpoint-every", 10]
    settings += ["--validate-every", 40, "--log-every", 5, "--sample-bytes", 40]
    return [str(argument) for argument in (*settings, *more)]


def start(args, *program):
    """The real program in a process of its own; on the CPU, where its results are bitwise reproducible."""
    return subprocess.Popen(
        [sys.executable, *(program or ("-m", "models.train")), *args],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_checkpoint(process, out, step):
    while not any(done >= step for done in list_steps(out / "checkpoints")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@contextlib.contextmanager
def small_disk(tmp_path, size):
    """A real file system of that size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if mounted.returncode:
        assert any(why in mounted.stderr for why in ("superuser", "ermission denied", "not permitted")), mounted.stderr
        pytest.skip("mounting a file system needs root; a simulated failure is tested everywhere")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def final_state(out):
    """The arrays of the last checkpoint, read without knowing the model."""
    checkpoints = Checkpoints(out / "checkpoints", keep=3)
    restored = checkpoints._manager.restore(checkpoints.latest())
    checkpoints.close()
    return jax.tree.map(np.asarray, restored)


def losses(out):
    """The log without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.endswith("_per_second")}
        for row in read_rows(out / "metrics.jsonl")
    ]


# ---- ways in which a run ends ----


def test_a_killed_run_resumes_bit_for_bit(folder, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    whole = start(arguments(folder, straight))
    process = start(arguments(folder, killed))
    wait_for_checkpoint(process, killed, 30)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert max(list_steps(killed / "checkpoints")) < 120, "killed too late to show anything"

    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    assert "order-2 byte model" in out and "--- sampled" in out
    resumed = start(["--out", str(killed), "--resume"])  # its settings are those that it was started with
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err

    assert losses(killed) == losses(straight)
    assert len(losses(straight)) == 120 + 3
    jax.tree.map(np.testing.assert_array_equal, final_state(killed), final_state(straight))
    assert (killed / "sample.txt").read_text() == (straight / "sample.txt").read_text()
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert losses(straight)[119]["loss"] < 0.6 * losses(straight)[0]["loss"]  # and it did learn


def test_ctrl_c_leaves_a_usable_checkpoint(folder, tmp_path):
    process = start(arguments(folder, tmp_path / "run", "--steps", 100_000, "--checkpoint-every", 10_000, "--keep", 1))
    log = tmp_path / "run" / "metrics.jsonl"
    while len(read_rows(log)) < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    [step] = list_steps(tmp_path / "run" / "checkpoints")
    assert f"Interrupted after step {step}" in err and "--resume" in err
    assert [row["step"] for row in losses(tmp_path / "run") if "loss" in row] == list(range(1, step + 1))
    assert final_state(tmp_path / "run")["step"] == step


def test_a_full_disk_costs_no_good_checkpoint(folder, tmp_path, capsys):
    """On a real file system of 2 MB, which holds a few checkpoints; then there is more space and the run goes on."""
    with small_disk(tmp_path, "2m") as disk:
        assert train.main(arguments(folder, disk / "run", "--keep", 9)) == 1
        err = capsys.readouterr().err
        assert "is full" in err and "Traceback" not in err
        steps = list_steps(disk / "run" / "checkpoints")
        assert steps and steps[-1] < 120
        assert f"The last checkpoint is step {steps[-1]}" in err and "--resume" in err
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert train.main(["--out", str(disk / "run"), "--resume", "--sample-bytes", "0"]) == 0
        assert [row["step"] for row in losses(disk / "run") if "loss" in row] == list(range(1, 121))


def test_a_write_that_breaks_off_costs_no_good_checkpoint(folder, tmp_path):
    """The same where free space can't be told before: a checkpoint is half written when the disk is full."""
    # In a process of its own, for the threads that a failed write leaves behind.
    blind = "import runpy, shutil, types; shutil.disk_usage = lambda _: types.SimpleNamespace(free=2**40); "
    blind += "runpy.run_module('models.train', run_name='__main__')"
    with small_disk(tmp_path, "1500k") as disk:
        process = start(arguments(folder, disk / "run", "--keep", 9), "-c", blind)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1, err
        steps = list_steps(disk / "run" / "checkpoints")
        assert "is full" in err and f"The last checkpoint is step {steps[-1]}" in err and "Traceback" not in err, err
        assert len(list((disk / "run" / "checkpoints").iterdir())) == len(steps) + 1  # and the half of one
        assert final_state(disk / "run")["step"] == steps[-1]


def test_a_failed_write_is_a_message_and_not_a_traceback(folder, tmp_path, monkeypatch, capsys):
    original = Checkpoints.save

    def save(self, state):
        if int(state.step) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, state)

    monkeypatch.setattr(Checkpoints, "save", save)
    assert train.main(arguments(folder, tmp_path / "run", "--steps", 30)) == 1
    err = capsys.readouterr().err
    assert "is full" in err and "The last checkpoint is step 10" in err
    assert list_steps(tmp_path / "run" / "checkpoints") == [10]


def test_disk_full_is_recognised_wherever_it_hides():
    inner = ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes to file 7: No space left on device")
    outer = RuntimeError("could not save")
    outer.__cause__ = inner
    assert is_disk_full(OSError(errno.ENOSPC, "")) and is_disk_full(inner) and is_disk_full(outer)
    assert (
        not is_disk_full(OSError(errno.EACCES, "")) and not is_disk_full(ValueError("other")) and not is_disk_full(None)
    )


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(folder, tmp_path, capsys):
    args = arguments(folder, tmp_path / "run", "--learning-rate", "1e30", "--warmup", 0)
    assert train.main(args) == 1
    err = capsys.readouterr().err
    assert "The loss at step" in err and "--learning-rate" in err and "No checkpoint" in err
    assert list_steps(tmp_path / "run" / "checkpoints") == []


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
        (["--batch", "-4"], ["--batch=-4", "at least 1"]),
        (["--checkpoint-every", "0"], ["--checkpoint-every=0", "at least 1"]),
        (["--learning-rate", "nan"], ["--learning-rate=nan", "positive finite"]),
        (["--temperature", "0"], ["--temperature=0.0", "positive finite"]),
        (["--seed", "-1"], ["--seed=-1", "between 0 and"]),
        (["--dtype", "float16"], ["--dtype='float16'", "bfloat16"]),
        (["--optimizer", "sgd"], ["--optimizer='sgd'", "muon"]),
        (["--warmup", "50", "--steps", "50"], ["--warmup=50", "--steps=50", "lower"]),
        (["--context", "1"], ["--context=1", "at least 2"]),
        (["--prompt", ""], ["--prompt=''", "at least one character"]),
        (["--task", "images", "--data", "x"], ["--data='x'", "--task text"]),
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
    assert "can't be made" in refused(capsys, arguments(folder, file / "below"))
    err = refused(capsys, arguments(folder, tmp_path / "none", "--resume"))
    assert "--resume finds no checkpoint" in err and "leave out --resume" in err


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The folder of a short run that is done; in bfloat16 and with Muon, which must train too."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train.main(arguments(folder, out, "--steps", 10, "--dtype", "bfloat16", "--optimizer", "muon")) == 0
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


def test_a_damaged_checkpoint_is_named(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "10" / "default" / "d")
    shutil.rmtree(out / "checkpoints" / "10" / "default" / "ocdbt.process_0")
    process = start(["--out", str(out), "--resume"])
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "Traceback" not in err, err
    assert str(out / "checkpoints" / "10") in err and "delete that folder" in err


def test_default_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse([]).out == Path("runs/text-tiny")
    for name in ("text-tiny", "text-tiny-2"):
        (tmp_path / "runs" / name / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
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
