"""Checkpoints: what is written comes back bit for bit, damage is named, and a kill at any point costs nothing."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.checkpoint import Checkpoints
from models.checksums import SUMS
from models.errors import UsageError
from models.folder import list_steps
from models.step import TrainState

ROOT = Path(__file__).parent.parent


def state_of(step, sharding=None):
    kernel = jnp.arange(64.0).reshape(8, 8) + step
    params = {"kernel": kernel if sharding is None else jax.device_put(kernel, sharding), "scale": jnp.full(3, step)}
    return TrainState(jnp.int32(step), params, (jnp.zeros(5), {"nu": jnp.float32(1 / step)}))


def restore(out, like=None):
    return Checkpoints(out, keep=3).restore(state_of(1) if like is None else like)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 2 to 4: that of step 1 is deleted for the last."""
    out = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(out, keep=3)
    for step in (1, 2, 3, 4):
        checkpoints.save(state_of(step))
    checkpoints.close()
    return out


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "a run")


def files_of(checkpoint):
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def garble(file):
    """Changes one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_the_last_are_kept_and_come_back(saved):
    assert sorted(entry.name for entry in (saved / "checkpoints").iterdir()) == ["2", "3", "4"]
    assert_equal(restore(saved), state_of(4))


@pytest.mark.parametrize("harm", [garble, Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_damage_to_any_file_is_named_with_the_way_back(run, harm):
    """Followed to the letter, the message leads to the checkpoint before."""
    last = run / "checkpoints" / "4"
    whole = shutil.copytree(last, run / "whole")
    names = [file.relative_to(last) for file in files_of(last)]
    assert Path("default/_METADATA") in names and any("ocdbt.process_0/d" in str(name) for name in names)
    for name in names:
        if name.name == SUMS and harm is not garble:
            continue  # without it the checkpoint is like an old one; without its last newline it is as good
        shutil.rmtree(last)
        shutil.copytree(whole, last)
        harm(last / name)
        with pytest.raises(UsageError, match="checkpoint of step 4 is damaged") as refused:
            restore(run)
        if name.name != SUMS:  # a line of it that is damaged may name no file at all
            assert str(last / name) in str(refused.value), refused.value
        assert "That of step 3 is intact" in str(refused.value)
    remove, _, resume = str(refused.value).partition("continue from it with: ")[2].partition(" && ")
    assert shlex.split(resume) == ["python", "-m", "models.train", "--out", str(run), "--resume"]
    subprocess.run(remove, shell=True, check=True)
    assert_equal(restore(run), state_of(3))


def test_the_way_back_passes_over_what_is_damaged_too(run):
    for step in (4, 3):
        garble(run / "checkpoints" / str(step) / "default" / "_METADATA")
    with pytest.raises(UsageError, match="That of step 2 is intact.*checkpoints/3'? .*checkpoints/4'? && "):
        restore(run)
    garble(run / "checkpoints" / "2" / "default" / "_METADATA")
    with pytest.raises(UsageError, match="No intact checkpoint is left: start a new run with another --out"):
        restore(run)


def test_an_old_checkpoint_without_checksums_is_used_and_said_to_be_unchecked(run, capsys):
    for step in (3, 4):
        (run / "checkpoints" / str(step) / SUMS).unlink()
    assert_equal(restore(run), state_of(4))
    assert "step 4 has no checksums" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints" / "4" / "default")
    with pytest.raises(UsageError, match="step 4 can't be restored .* That of step 3 has no checksums; continue"):
        restore(run)


def test_a_checkpoint_of_another_model_is_not_called_damaged(run):
    with pytest.raises(UsageError, match="can't be restored .* It is intact: is run.json that of this run"):
        restore(run, TrainState(jnp.int32(0), {"other": jnp.ones(3)}, ()))


def test_checkpoints_of_several_devices_are_checked_and_change_their_mesh(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    first, second = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P("b"))
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        checkpoints.save(state_of(step, first))
    found = restore(tmp_path, state_of(1, second))
    assert_equal(found, state_of(2))
    assert found.params["kernel"].sharding.is_equivalent_to(second, 2)
    data = next((tmp_path / "checkpoints" / "2" / "default" / "ocdbt.process_0" / "d").iterdir())
    garble(data)
    with pytest.raises(UsageError) as refused:
        restore(tmp_path, state_of(1, second))
    assert str(data) in str(refused.value) and "step 1 is intact" in str(refused.value)


# Children of one process, so that JAX is imported once. Python reports to audit hooks each file that it opens, renames
# or removes: the child is killed just before one of these, the next child before the next.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from models.checkpoint import Checkpoints
from models.step import TrainState

template, folder = map(Path, sys.argv[1:])

def state_of(step):
    return TrainState(np.array(step, np.int32), {"kernel": np.full((4, 4), step, np.float32)}, ())

def child(out, point):
    checkpoints = Checkpoints(out, keep=2)
    events = 0
    def hook(event, arguments):
        nonlocal events
        writes = event in ("open", "os.mkdir", "os.rename") and str(out) in str(arguments[0])
        if writes or event in ("os.remove", "os.rmdir"):
            events += 1
            if events == point:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    checkpoints.save(state_of(3))
    os._exit(0)

point = 0
while True:
    point += 1
    out = folder / f"{point:03}"
    shutil.copytree(template, out)
    pid = os.fork()
    if pid == 0:
        child(out, point)
    if os.waitpid(pid, 0)[1] == 0:
        break
    assert point < 1000
print(point)
"""


def test_a_kill_at_any_point_of_a_save_leaves_what_can_be_resumed(tmp_path):
    template, folder = tmp_path / "template", tmp_path / "killed"
    small = lambda step: TrainState(jnp.int32(step), {"kernel": jnp.full((4, 4), float(step))}, ())
    checkpoints = Checkpoints(template, keep=2)
    for step in (1, 2):
        checkpoints.save(small(step))
    done = subprocess.run([sys.executable, "-c", KILLED, template, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = {}
    for out in sorted(folder.iterdir()):
        steps = tuple(list_steps(out))
        resumed = Checkpoints(out, keep=2)
        assert_equal(resumed.restore(small(0)), small(steps[-1]))
        for step in steps:
            assert (out / "checkpoints" / str(step) / SUMS).exists(), "no checkpoint without checksums is ever seen"
        assert sorted(entry.name for entry in (out / "checkpoints").iterdir()) == sorted(map(str, steps))
        resumed.save(small(4))
        assert_equal(restore(out, small(0)), small(4))
        left[steps] = left.get(steps, 0) + 1
    # Killed before the new one is complete; then before the oldest is deleted; then while it is, and after.
    assert list(left) == [(1, 2), (1, 2, 3), (2, 3)]
    assert left[1, 2] > 20 and left[2, 3] > 5, left
