"""Training over a mesh of devices: the curve of one device, checkpoints that change their mesh, and what is refused."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.training_program import noise
from models import step, train
from models.mesh import ONE_DEVICE, make_layout, parse_mesh
from models.text import TextTask, model_config
from tests.test_sharding import collectives
from tests.training import SENTENCE, losses

ROOT = Path(__file__).parent.parent
STEPS, SAVED = 6, 3

TRAIN = """
import json, sys
from models import train
for arguments in json.loads(sys.argv[1]):
    assert train.main(arguments) == 0, arguments
"""

COMPILE = """
import json, sys
import jax, numpy as np
from models.data import Corpus
from models.mesh import make_layout
from models.step import init_state, make_optimizer, make_train_step
from models.text import TextTask, model_config

LENGTH = 64
config = model_config("nano", "float32", None, context=LENGTH)
layout = make_layout(json.loads(sys.argv[1]), 8, LENGTH)
text = np.zeros(1000, np.uint8)
task = TextTask(config, Corpus(text, text, "zeros", 1), 8, 0, 100, layout)
optimizer = make_optimizer("adamw", 1e-3)
state = layout.state(init_state(layout.state(task.init()), optimizer))
shapes = {
    jax.tree_util.keystr(path): array.sharding.shard_shape(array.shape)
    for path, array in jax.tree_util.tree_leaves_with_path(state)
}
step = make_train_step(task.loss, optimizer, layout.shardings(state), task.options(state.params))
batch = task.batch(0)
compiled = step.lower(state, batch).compile()
kept = jax.tree.map(lambda x, out: x.sharding.is_equivalent_to(out, x.ndim), state, compiled.output_shardings[0])
arrays = {name: x for name, x in batch._asdict().items() if x is not None}
shapes["batch"] = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), arrays)
print(json.dumps({"shapes": shapes, "kept": all(jax.tree.leaves(kept)), "hlo": compiled.as_text()}))
"""

# Few threads, as on a small machine; and compiled in haste. The eight devices are those of conftest.py.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": "2",
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_backend_optimization_level=0",
}


def on_eight_devices(program, *arguments, hash_seed=0):
    """What the program prints for each of the arguments, in processes that see the CPU as 8 devices.

    `hash_seed`: the order of sets depends on it, and nothing else may.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(argument)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(hash_seed)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for argument in arguments
    ]
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        printed.append(out)
    return printed


def state_of(out):
    """The arrays of the last checkpoint, whichever devices they were on."""
    checkpointer, path = ocp.StandardCheckpointer(), out / "checkpoints" / str(STEPS) / "default"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = checkpointer.metadata(path).item_metadata.tree
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree)
    return checkpointer.restore(path, like)


def curve(out):
    return [row["loss"] if "loss" in row else row["validation_loss"] for row in losses(out)]


def recorded_mesh(out):
    return json.loads((out / "run.json").read_text())["mesh"]


STARTED = {
    "one": None,
    "2x2": "data=2,model=2",
    "8": "data=8",
    "2x2x2": "data=2,model=2,context=2",
    "images": None,
    "images-2x2": "data=2,model=2",
}
# Runs whose second half runs again: which, and on which mesh, where it is another one.
RESUMED = {
    "2x2-again": ("2x2", None),
    "2x2x2-again": ("2x2x2", None),
    "one-2x2": ("one", "data=2,model=2"),
    "one-ring": ("one", "data=2,context=4"),
    "2x2-one": ("2x2", "data=1"),
}


@pytest.mark.parametrize(
    "started, resumed",
    [
        (["one", "2x2x2"], ["2x2x2-again", "one-2x2"]),
        pytest.param(
            ["one", "2x2", "8", "images", "images-2x2"], ["2x2-again", "one-ring", "2x2-one"], marks=pytest.mark.full
        ),
    ],
    ids=["three axes", "others"],
)
def test_every_mesh_gives_the_losses_of_one_device_and_resumes_on_any_other(started, resumed, tmp_path):
    (tmp_path / "text.txt").write_text("".join(SENTENCE.format(index) for index in range(200)))
    out = lambda name: str(tmp_path / name)
    on = lambda mesh: ["--mesh", mesh] if mesh else []
    task = lambda name: ["--task", "images"] if name.startswith("images") else ["--data", out("text.txt")]
    common = ["--size", "nano", "--steps", STEPS, "--checkpoint-every", SAVED, "--validation-bytes", 1024]
    common = [*map(str, common), "--sample-bytes", "0"]
    calls = [[*common, "--out", out(name), *task(name), *on(STARTED[name])] for name in started]
    on_eight_devices(TRAIN, calls)

    calls, meshes = [], {name: STARTED[name] for name in started}
    for name in resumed:
        source, mesh = RESUMED[name]
        meshes[name] = mesh or STARTED[source]
        shutil.copytree(out(source), out(name))
        shutil.rmtree(tmp_path / name / "checkpoints" / str(STEPS))
        calls.append(["--out", out(name), "--resume", *on(mesh)])
    on_eight_devices(TRAIN, calls, hash_seed=1)

    for name, mesh in meshes.items():
        assert recorded_mesh(tmp_path / name) == mesh
        assert len(curve(tmp_path / name)) == STEPS + 1
        reference = tmp_path / ("images" if name.startswith("images") else "one")
        # Sums in another order move these float32 losses by some 1e-7.
        np.testing.assert_allclose(curve(tmp_path / name), curve(reference), rtol=1e-5, err_msg=name)
        if name.endswith("-again"):  # and then it is the same bit for bit
            straight = tmp_path / RESUMED[name][0]
            assert losses(tmp_path / name) == losses(straight)
            jax.tree.map(np.testing.assert_array_equal, state_of(tmp_path / name), state_of(straight))


def test_steps_that_are_not_waited_for_do_not_wait_for_one_another(tmp_path):
    """A hundred steps between two looks at the losses, on more devices than there are threads."""
    text = tmp_path / "text.txt"
    text.write_text(SENTENCE * 100)
    call = ["--size", "nano", "--data", text, "--mesh", "data=8", "--steps", 100, "--log-every", 100, "--out"]
    call += [tmp_path / "run", "--sample-bytes", 0, "--validation-bytes", 1024]
    on_eight_devices(TRAIN, [[str(argument) for argument in call]])
    assert len(curve(tmp_path / "run")) == 101


def test_what_a_device_holds_and_what_devices_exchange():
    found, with_context = map(json.loads, on_eight_devices(COMPILE, "data=2,model=2", "data=2,model=2,context=2"))
    used = {"query": [32, 32 // 2], "key": [32, 16 // 2], "value": [32, 16 // 2], "out": [32 // 2, 32]}
    used |= {"gate": [32, 96 // 2], "up": [32, 96 // 2], "down": [96 // 2, 32]}
    for compiled, devices in ((found, 2), (with_context, 4)):  # along the FSDP axes
        kept = {name: [part[0] // devices, *part[1:]] for name, part in used.items()}
        for name, part in {**kept, "embedding": [256, 32]}.items():
            parts = [shape for path, shape in compiled["shapes"].items() if f"['{name}']['" in path]
            layers = 1 if name == "embedding" else 2
            assert parts == [part] * 3 * layers, name  # the parameter and Adam's two moments
        gathered = set(re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", compiled["hlo"]))
        assert gathered == {",".join(map(str, part)) for part in used.values()}, "matrices, as `model` cuts them"
    tokens = {"tokens": [8 // 2, 64], "targets": [8 // 2, 64], "positions": [64]}
    assert found["shapes"]["batch"] == tokens
    assert with_context["shapes"]["batch"] == {name: [*shape[:-1], 64 // 2] for name, shape in tokens.items()}
    assert found["kept"] and with_context["kept"], "the step must leave the state where it was"
    # No device ever sees another's part of the batch or the heads, or of the weights that `model` cuts.
    assert collectives(found["hlo"]) == {"all-reduce", "all-gather"}
    # With context also what goes round the ring of two: a device's keys and values, and their gradients.
    assert collectives(with_context["hlo"]) == {"all-reduce", "all-gather", "collective-permute"}
    keys = 2 * (8 // 2) * (64 // 2) * (2 // 2) * 8  # k and v [B, T, K, H] of a device
    sent = set(re.findall(r"(\w+\[[\d,]*\])\S* collective-permute\(", with_context["hlo"]))
    assert sent == {f"f32[{keys}]"}
    whole = f"f32[{8 // 2},64,{96 // 2}]"  # [B, T, hidden units] of a device without context
    assert whole in found["hlo"] and whole not in with_context["hlo"], "no activations of whole sequences"


def test_fsdp_axes_cut_the_first_dim_that_divides():
    layout = make_layout("data=2,model=2", batch=2)
    shapes = {"down": (8, 6), "out": (6, 8), "up": (6, 8), "query": (5, 2, 4), "gate": (4, 2)}
    params = {layer: {"kernel": jnp.ones(shape)} for layer, shape in shapes.items()}
    places = {layer: found["kernel"].spec for layer, found in layout.shardings(params).items()}
    assert places == {
        "down": P(("model", "data"), None),
        "out": P("model", "data"),  # 6 rows are no parts for 2 x 2 devices
        "up": P("data", "model"),
        "query": P(None, "model", None),
        "gate": P("data", "model"),
    }


def test_the_norm_of_gradients_takes_one_sum_over_devices():
    layout = make_layout("data=2,model=2", batch=2)
    shapes = {"query": {"kernel": (8, 2, 4)}, "down": {"kernel": (8, 6)}, "norm": {"scale": (8,)}}
    keys = iter(jax.random.split(jax.random.key(0), 3))
    draw = lambda shape: jax.random.normal(next(keys), shape)
    tree = jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
    shardings = layout.shardings(tree)
    placed = layout.state(tree)
    compiled = jax.jit(lambda x: step._norm(x, shardings)).lower(placed).compile()
    np.testing.assert_allclose(compiled(placed), optax.tree.norm(tree), rtol=1e-6)
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text() or "")) == 1
    np.testing.assert_allclose(jax.jit(lambda x: step._norm(x, None))(tree), optax.tree.norm(tree), rtol=1e-6)


def test_xla_knows_the_options_of_a_step():
    """It knows the names on every platform, and refuses others."""
    add = lambda x: x + 1
    assert jax.jit(add, compiler_options=make_layout("data=2", batch=2).options({}, "float32"))(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_option"):
        jax.jit(add, compiler_options={"xla_gpu_no_option": True})(1.0)
    assert ONE_DEVICE.options({}, "float32") == {}


def test_messages_hold_the_parts_of_all_blocks_but_the_first():
    config, layout = model_config("tiny", "bfloat16", None, 128), make_layout("data=2,model=2", 4)
    task = TextTask(config, noise(128), 4, 0, 128, layout)
    params = jax.eval_shape(task.init)
    matrices = [x for path, x in jax.tree_util.tree_leaves_with_path(params["blocks"][0]) if x.ndim == 2]
    assert len(matrices) == 7
    sent = 2 * sum(x.size // 4 for x in matrices) * 2  # two blocks, a quarter of each matrix, bfloat16
    assert task.options(params)["xla_gpu_reduce_scatter_combine_threshold_bytes"] == sent


def barriers(program):
    return [eqn for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]


def gathering():
    """(a layout, x, parameters of a first block and of the others, a loss of these three and of how to gather them)."""

    def loss(gather, x, first, rest):
        x, *gathered = gather(x, first, rest)
        return sum(((x @ y.reshape(8, -1)) ** 2).sum() for y in jax.tree.leaves(gathered))

    block = {"query": {"kernel": jnp.ones((8, 2, 4))}, "norm": {"scale": jnp.ones(8)}}
    return make_layout("data=2", batch=2), jnp.ones((2, 8)), block, {1: block}, loss


def test_the_other_blocks_travel_once_the_first_has_arrived():
    layout, *arrays, _ = gathering()
    (call,) = jax.make_jaxpr(layout.gather)(*arrays).jaxpr.eqns
    program = call.params["call_jaxpr"].jaxpr
    (barrier,) = barriers(program)
    placed = [eqn for eqn in program.eqns if "sharding" in eqn.params]
    assert [eqn.params["sharding"].spec for eqn in placed] == [P(None, "model", None)] * 2, "whole"
    first, rest = placed
    assert set(first.outvars) <= set(barrier.invars) and set(rest.invars) <= set(barrier.outvars)


def test_sums_of_gradients_are_made_before_the_backward_pass_goes_on():
    layout, *arrays, loss = gathering()
    gradient = jax.grad(functools.partial(loss, layout.gather), (0, 1, 2))
    program = jax.make_jaxpr(gradient)(*arrays).jaxpr
    d_x, _, _, d_scale, d_kernel = program.outvars  # the first block's are the second and third
    barrier = barriers(program)[-1]
    assert set(barrier.outvars) == {d_x, d_kernel}
    assert d_scale not in barrier.outvars, "a vector is not worth a sum of its own"
    (place,) = (eqn for eqn in program.eqns if set(eqn.outvars) & set(barrier.invars) and "sharding" in eqn.params)
    assert place.params["sharding"].spec == P("data", "model", None), "each device's part of the sum"
    plain = jax.grad(functools.partial(loss, lambda *arrays: arrays), (0, 1, 2))
    chex.assert_trees_all_close(gradient(*arrays), plain(*arrays))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mesh", "date=2"], ["--mesh='date=2'", "'date' is not an axis", "--mesh data=2,model=2"]),
        (["--mesh", "data=2,"], ["'' is not an axis"]),
        (["--mesh", "data"], ["--mesh='data'", "'data' can't be read", "number of devices"]),
        (["--mesh", "data=0"], ["'data=0' can't be read"]),
        (["--mesh", "data=2,data=4"], ["'data=4' can't be read", "named once"]),
        (["--mesh", "contxt=2"], ["'contxt' is not an axis", "context the sequence"]),
        (["--mesh", "context=3"], ["--mesh='context=3'", "--context=32", "two equal pieces", "multiple of 6"]),
        (["--mesh", "context=32"], ["--context=32", "make --context a multiple of 64"]),
        (["--mesh", "context=2", "--task", "images"], ["context=2 cuts the sequence", "leave context out"]),
        (["--mesh", "data=8,model=2,context=4"], ["needs 64 devices", "there are", "lower an axis"]),
        (["--mesh", "context=2", "--implementation", "reference"], ["--implementation='reference'", "Use 'xla'"]),
        (["--mesh", "data=3"], ["--mesh='data=3'", "--batch=8", "multiple of 3", "divisor of 8"]),
        (["--mesh", "model=4"], ["model=4", "kv_heads=2", "divisor of 2", "another --size"]),
        (["--mesh", "model=3", "--size", "gpt2-small"], ["model=3", "hidden=2048", "divisor of 4"]),
        (["--mesh", "model=4", "--task", "images"], ["model=4", "heads=2", "divisor of 2"]),
        (["--mesh", "data=512", "--batch", "512"], ["needs 512 devices", "there are", "--mesh data=1"]),
    ],
)
def test_bad_meshes(args, words, tmp_path, capsys):
    assert train.main(["--size", "nano", "--out", str(tmp_path / "run"), *args]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_axes_that_are_not_named_have_one_device():
    assert parse_mesh("model=4,data=2") == {"data": 2, "context": 1, "model": 4}
    assert parse_mesh("context=1") == {"data": 1, "context": 1, "model": 1}
