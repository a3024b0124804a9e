"""Every way in which a run can end: its exit status, what it says, and that nothing is lost."""

import contextlib
import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from models import train
from models.endings import explain
from models.errors import OutputError, UsageError, is_disk_full
from models.folder import list_steps
from models.interrupt import SIGNALS, StopRequest
from models.lock import locked
from models.metrics import read_rows
from models.output import prepare_output
from models.run import run
from models.settings import parse
from models.text import TextTask
from tests.training import ROOT, arguments, final_state, losses, start, write_texts

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text"))


# The steps of a checkpoint are not those of the log, and the prompt is not ASCII.
MORE = ("--log-every", 7, "--sample-bytes", 40, "--prompt", "caf\N{LATIN SMALL LETTER E WITH ACUTE} ")


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert train.main(arguments(folder, out, *MORE)) == 0
    rows = losses(out)
    assert len(rows) == 60 + 2 and rows[-2]["loss"] < 0.6 * rows[0]["loss"]  # and it did learn
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    return out


def assert_same(out, straight):
    assert losses(out) == losses(straight)
    jax.tree.map(np.testing.assert_array_equal, final_state(out), final_state(straight))
    assert (out / "sample.txt").read_text() == (straight / "sample.txt").read_text()


def resume(out, *more):
    return train.main(["--out", str(out), "--resume", *map(str, more)])


@contextlib.contextmanager
def at_step(step, action):
    """Does `action` as a batch is made, in step `step`."""
    original = TextTask.batch

    def batch(self, number):
        if number + 1 == step:
            action()
        return original(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTask, "batch", batch)
        yield


def fail(error):
    def action():
        raise error

    return action


def wait_for(process, condition):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


# ---- stopped from outside ----


def test_a_killed_run_resumes_bit_for_bit(folder, straight, tmp_path):
    """On a terminal that knows ASCII alone."""
    process = start(arguments(folder, tmp_path, *MORE))
    wait_for(process, lambda: max(list_steps(tmp_path), default=0) >= 20)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert max(list_steps(tmp_path)) < 60, "killed too late to show anything"
    # Its settings are those that it was started with.
    process = start(["--out", str(tmp_path), "--resume"], PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "caf\\xe9 " in out, err
    assert_same(tmp_path, straight)


def test_however_it_ends_the_curve_goes_on_bit_for_bit(folder, straight, tmp_path, capsys):
    with at_step(13, fail(RuntimeError("a bug"))), pytest.raises(RuntimeError, match="a bug"):
        train.main(arguments(folder, tmp_path, *MORE))
    assert list_steps(tmp_path) == [10]
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for step, number, status in [(16, signal.SIGTERM, 143), (23, signal.SIGHUP, 129), (26, signal.SIGINT, 130)]:
        with at_step(step, lambda number=number: signal.raise_signal(number)):
            assert resume(tmp_path) == status
        err = capsys.readouterr().err
        assert f"Interrupted after step {step}. The last checkpoint is step {step}" in err and "--resume" in err
        assert [row["step"] for row in losses(tmp_path)] == list(range(1, step + 1))
    assert {number: signal.getsignal(number) for number in SIGNALS} == before

    with start(["--out", str(tmp_path), "--resume"]) as process:  # as with `| head`
        while "order-2 byte model" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141, err
    assert "rror" not in err and "Exception" not in err, err
    assert list_steps(tmp_path)[-1] == 40, "where something was to be printed"
    assert resume(tmp_path) == 0
    assert_same(tmp_path, straight)


def test_a_second_signal_stops_at_once(folder, tmp_path, capsys):
    def twice():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with at_step(3, twice):
        assert train.main(arguments(folder, tmp_path)) == 130
    assert "once more to stop at once" not in (err := capsys.readouterr().err)  # it is written past Python's streams
    assert "Interrupted. No checkpoint was written." in err


def test_ctrl_c_leaves_a_usable_checkpoint(folder, tmp_path):
    process = start(arguments(folder, tmp_path, "--steps", 100_000, "--checkpoint-every", 10_000, "--keep", 1))
    wait_for(process, lambda: len(read_rows(tmp_path / "metrics.jsonl")) >= 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    [step] = list_steps(tmp_path)
    assert f"Interrupted after step {step}" in err and "--resume" in err
    assert [row["step"] for row in losses(tmp_path)] == list(range(1, step + 1))
    assert final_state(tmp_path)["step"] == step


def test_ctrl_c_while_the_program_is_imported(tmp_path):
    with start(["--out", str(tmp_path / "run")], "-X", "importtime", "-m", "models.train") as process:
        while "jax._src" not in (line := process.stderr.readline()):
            assert line, "ended before JAX was imported"
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    said = [line for line in err.splitlines() if line and not line.startswith("import time:")]
    assert said == ["Interrupted. Nothing is lost: --resume continues from the last checkpoint, where there is one."]
    assert process.returncode == 130 and not (tmp_path / "run").exists()


def test_an_interrupt_is_not_lost_where_python_drops_exceptions():
    program = "import gc, signal; from models.interrupt import exit_on_interrupt; exit_on_interrupt();"
    program += "gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGINT)); gc.collect(); print('lost')"
    process = start([], "-c", program)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 130) and "Interrupted" in err and "Traceback" not in err


def test_signals_that_were_ignored_stay_ignored():
    """As nohup, and a shell that starts a job in the background, leave them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- what can't be written ----

BREAKS_OFF = """
import resource, runpy
from models.checkpoint import Checkpoints
save = Checkpoints.save
def limited(self, state):
    if int(state.step) == 30:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    save(self, state)
Checkpoints.save = limited
runpy.run_module("models.train", run_name="__main__")
"""


def test_a_write_that_breaks_off_costs_no_good_checkpoint(folder, straight, tmp_path, capsys):
    """In a process of its own, for the threads that a failed write leaves behind."""
    process = start(arguments(folder, tmp_path, *MORE), "-c", BREAKS_OFF)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "is full, or a limit is reached" in err and "The last checkpoint is step 20" in err, err
    assert "Traceback" not in err, err
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2 + 1, "and the half of one"
    assert final_state(tmp_path)["step"] == 20
    assert resume(tmp_path) == 0
    assert_same(tmp_path, straight)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_too_little_space_is_found_before_anything_is_written(folder, tmp_path, monkeypatch, capsys):
    with at_step(15, lambda: monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))):
        assert train.main(arguments(folder, tmp_path)) == 1
    err = capsys.readouterr().err
    assert "is full" in err and "The last checkpoint is step 10" in err and "Traceback" not in err
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["10"]


def test_disk_full_is_recognised_wherever_it_hides():
    inner = ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes to file 7: No space left on device")
    outer = RuntimeError("could not save")
    outer.__cause__ = inner
    assert is_disk_full(OSError(errno.ENOSPC, "")) and is_disk_full(inner) and is_disk_full(outer)
    assert not is_disk_full(OSError(errno.EACCES, "")) and not is_disk_full(ValueError("other"))


def test_a_folder_that_exists_but_can_not_be_written_to(folder, tmp_path, capsys):
    unwritable = tmp_path if os.geteuid() else Path("/sys")  # root may write nearly everywhere
    tmp_path.chmod(0o555)
    assert train.main(arguments(folder, unwritable)) == 2
    tmp_path.chmod(0o755)
    err = capsys.readouterr().err
    assert f"--out={str(unwritable)!r} can't be used (" in err and "choose another" in err and "Traceback" not in err


class Screen(io.StringIO):
    """A standard output that can't be written."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def test_what_is_printed_can_not_be_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Screen(OSError(errno.ENOSPC, "No space left on device")))
    assert train.main(arguments(folder, tmp_path)) == 1
    err = capsys.readouterr().err
    assert "what the run prints can't be written" in err and "No space left" in err and "is full" not in err


def test_any_terminal_will_do(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    monkeypatch.setattr(sys, "stderr", None)  # closed by the shell, with 2>&-
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    prepare_output()
    print("caf\xe9 \udcff", flush=True)
    assert ascii_only.buffer.getvalue() == b"caf\\xe9 \\udcff\n"
    sys.stderr.write("nobody reads this")
    sys.stderr.close()


# ---- what goes wrong ----


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(folder, tmp_path, capsys):
    args = arguments(folder, tmp_path, "--learning-rate", "1e30", "--warmup", 0)
    assert train.main(args) == 1
    err = capsys.readouterr().err
    assert "at step 2 is nan" in err and "--learning-rate" in err and "No checkpoint" in err
    assert list_steps(tmp_path) == []


def test_a_batch_that_no_memory_holds(folder, tmp_path):
    limit = "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (2**34, resource.RLIM_INFINITY));"
    limit += "runpy.run_module('models.train', run_name='__main__')"
    process = start(arguments(folder, tmp_path, "--batch", 100_000_000), "-c", limit)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert err.endswith("error: out of memory. Lower --batch, --context or --size (in a new run). No checkpoint was "
                        "written.\n") and "Traceback" not in err, err  # fmt: skip
    parse(arguments(folder, tmp_path))  # and the folder is free


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UsageError("--x=1: no"), 2, "error: --x=1: no"),
        (KeyboardInterrupt(), 130, "\nInterrupted. No checkpoint was written."),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (OutputError(), 1, "error: what the run prints can't be written"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 1, "error: out of memory. Lower --batch"),
        (MemoryError(), 1, "error: out of memory. Lower --batch"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 1, "error: 'a/b': Permission denied. No check"),
        (ModuleNotFoundError("No module named 'tqdm'"), 1, "No module named 'tqdm'; install what training needs: pip"),
    ],
)
def test_what_is_said_of_an_error(error, status, words, tmp_path):
    explained = explain(error, tmp_path)
    assert explained is not None and explained[0] == status
    assert words in explained[1] and "\n" not in explained[1].strip()


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend 'cuda': no"), AssertionError()])
def test_devices_that_are_not_there(folder, tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(jax, "devices", fail(error))
    assert train.main(arguments(folder, tmp_path / "run")) == 2
    err = capsys.readouterr().err
    assert f"JAX can't use such devices here ({str(error) or 'not built in'}); unset it" in err
    assert "JAX_PLATFORMS=" in err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("files: RESOURCE_EXHAUSTED"), OSError("no file")])
def test_bugs_keep_their_traceback(error, tmp_path):
    assert explain(error, tmp_path) is None


# ---- two runs, and one folder ----


def test_a_folder_in_use_is_refused_with_its_holder(folder, straight, tmp_path, capsys):
    out = shutil.copytree(straight, tmp_path / "run")
    with locked(out):
        for args in (arguments(folder, out), ["--out", str(out), "--resume"]):
            assert train.main(args) == 2
            err = capsys.readouterr().err
            assert f"--out={str(out)!r} is in use by process {os.getpid()} on {socket.gethostname()}, started 2" in err
            assert "wait for it to end, or choose another --out" in err
        settings = parse(arguments(folder, tmp_path / "new"))
    (tmp_path / "new").mkdir()
    with locked(tmp_path / "new"), pytest.raises(UsageError, match="is in use"):
        run(settings)  # whose settings were read just before
    shutil.copytree(straight, tmp_path / "new", dirs_exist_ok=True)
    with pytest.raises(UsageError, match="holds a run already"):
        run(settings)
    assert_same(out, straight)


def test_a_killed_process_lets_go_of_its_folder(tmp_path):
    program = "import sys, pathlib; from models.lock import locked\n"
    program += "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=f"is in use by process {process.pid} on "), locked(tmp_path):
        pass
    process.kill()
    process.communicate()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_a_run_without_a_checkpoint_is_not_written_over(folder, tmp_path, capsys):
    with at_step(7, fail(RuntimeError("a bug"))), pytest.raises(RuntimeError):
        train.main(arguments(folder, tmp_path))
    rows = losses(tmp_path)
    assert len(rows) == 5 and list_steps(tmp_path) == []
    capsys.readouterr()
    for args in (arguments(folder, tmp_path), ["--out", str(tmp_path), "--resume"]):
        assert train.main(args) == 2
        err = capsys.readouterr().err
        assert "ended before its first checkpoint" in err and "nothing to resume" in err and "another --out" in err
    assert losses(tmp_path) == rows
    subprocess.run(err.partition("remove that run with: ")[2], shell=True, check=True)
    parse(arguments(folder, tmp_path))


def test_a_run_that_fails_at_its_first_step_leaves_its_folder_free(folder, tmp_path, capsys):
    with at_step(1, fail(MemoryError())):
        assert train.main(arguments(folder, tmp_path)) == 1
    assert "out of memory" in capsys.readouterr().err
    parse(arguments(folder, tmp_path))
