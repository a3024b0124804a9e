"""Which implementation runs, what explain says, and that problems fail while tracing and platforms while lowering."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends import choice, mma
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.record import NEVER_RUN, SLOWER_ON_HOPPER
from pallas_fa.problem import normalise

NAMES = ("mosaic_gpu", "mma", "xla", "reference")


def inputs(dtype="float32", H=8):
    return tuple(jnp.ones((2, n, heads, H), dtype) for n, heads in ((4, 4), (6, 2), (6, 2)))


def problem(**keywords):
    return normalise(*inputs(**{k: keywords.pop(k) for k in ("dtype", "H") if k in keywords}), **keywords)[0]


def chosen(problem, implementation):
    return choice.choose(problem, implementation).backend.name


def reason(name, problem):
    return next(backend for backend in choice.backends() if backend.name == name).supports(problem).forward


def lines(*args, **keywords):
    """What explain says, by implementation."""
    return dict(line.split(": ", 1) for line in pallas_fa.explain(*args, **keywords).splitlines())


# ---- choose ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("xla", "reference"))
def test_a_name_is_taken_at_its_word(name):
    assert chosen(problem(), name) == name


def test_none_takes_what_is_exact():
    """The kernels multiply in 16 bits: float64 goes to xla without a word."""
    with jax.enable_x64(True):
        assert chosen(problem(dtype="float64"), None) == "xla"


def test_a_tuple_is_tried_in_order():
    assert chosen(problem(), ("reference", "xla")) == "reference"
    assert chosen(problem(), ("xla", "reference")) == "xla"
    assert chosen(problem(H=640), ("mosaic_gpu", "reference", "xla")) == "reference"
    assert chosen(problem(), ["reference"]) == "reference"
    assert chosen(problem(H=640), ("mosaic_gpu", "xla")) == "xla"


def test_the_error_of_a_name_gives_the_reason():
    q, k, v = inputs(H=640)
    with pytest.raises(NotImplementedError) as error:
        pallas_fa.dot_product_attention(q, k, v, implementation="mosaic_gpu")
    message = str(error.value)
    assert "implementation='mosaic_gpu'" in message and "implementation=None" in message
    assert "H=640" in message and str(reason("mosaic_gpu", problem(H=640))) in message


def test_the_error_of_a_tuple_lists_all_reasons():
    q, k, v = inputs()
    with pytest.raises(NotImplementedError) as error:
        pallas_fa.dot_product_attention(q, k, v, config="tiles", implementation=("mosaic_gpu", "xla"))
    message = str(error.value)
    for name in ("mosaic_gpu", "xla"):
        assert f"{name}: {reason(name, problem(config='tiles'))}" in message
    assert "config='tiles'" in message and "implementation=('mosaic_gpu', 'xla')" in message


@pytest.mark.parametrize("value", ("cudnn", ("xla", "triton"), ["flash"], "XLA"), ids=repr)
def test_unknown_names_list_the_known_ones(value):
    q, k, v = inputs()
    for function in (pallas_fa.dot_product_attention, pallas_fa.explain):
        with pytest.raises(ValueError) as error:
            function(q, k, v, implementation=value)
        message = str(error.value)
        assert f"implementation={value!r}" in message and "not known" in message
        assert all(repr(name) in message for name in NAMES)


@pytest.mark.parametrize("value", ((), 3, ("xla", None), True, {"xla"}), ids=repr)
def test_what_is_no_name_is_a_type_error(value):
    q, k, v = inputs()
    with pytest.raises(TypeError) as error:
        pallas_fa.dot_product_attention(q, k, v, implementation=value)
    assert f"implementation={value!r}" in str(error.value) and all(name in str(error.value) for name in NAMES)


def test_problems_are_values():
    """What is static is equal and hashes equal, so that programs are shared; what is not makes another problem."""
    ids = np.zeros((2, 4), int), np.zeros((2, 6), int)
    make = lambda **kw: problem(mask=masks.Segments(*ids) & masks.Window(3, 0), score=scores.SoftCap(2.0), **kw)
    assert make() == make() and hash(make()) == hash(make())
    others = (problem(), make(scale=0.5), make(dtype="bfloat16"), make(precision="highest"), make(H=16))
    others += (make(deterministic_gradients=True), make(bias=np.ones((4, 6), np.float32)), make(is_causal=True))
    assert len({make(), *others}) == 9


# ---- explain --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_explain_says_which_and_why_not():
    said = lines(*inputs(H=640), is_causal=True)
    assert tuple(said) == NAMES
    assert said["mosaic_gpu"].startswith("cannot: head dim H=640")
    assert said["xla"].startswith("runs this call")
    assert said["reference"] == "could, but only when named"


def test_explain_follows_the_order_that_is_given():
    said = lines(*inputs(), implementation=("reference", "xla"))
    assert said["reference"].startswith("runs this call")
    assert said["xla"].startswith("could") and "later in the order" in said["xla"]
    assert lines(*inputs(), implementation="reference")["xla"] == "could, but only when named"


def test_explain_when_none_can():
    said = lines(*inputs(), config="tiles")
    assert all(said[name].startswith("cannot: ") and "tiles" in said[name] for name in ("xla",))
    assert not any("runs" in verdict for verdict in said.values())


@pytest.mark.parametrize(
    "keywords, reason",
    (
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn inputs"),
        ({"dtype": "float32", "H": 136}, "H=136"),
        ({"dtype": "bfloat16", "H": 520}, "H=520"),
    ),
    ids=("float8", "float32, H=136", "H=520"),
)
def test_explain_names_what_the_kernels_cannot_do(keywords, reason):
    said = lines(*inputs(**keywords))
    assert said["mosaic_gpu"].startswith("cannot: ") and reason in said["mosaic_gpu"]
    assert said["xla"].startswith("runs this call")


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, "no window of ints"),
        ({"local_window_size": jnp.arange(2)}, "no window of ints"),  # of NumPy, these are ints, as in the call
        ({"local_window_size": (30, 0), "layout": "BNTH"}, "layout='BNTH'"),
        ({"local_window_size": (30, 0), "logits_soft_cap": 3.0}, "a score"),
        ({"local_window_size": 30, "dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "dropout"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_explain_says_why_rows_are_not_grouped(keywords, reason):
    shapes = ((2, n, 32, 64) if "layout" in keywords else (2, 32, n, 64) for n in (32, 8))
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    said = lines(q, k, k, config=Config(ForwardConfig(grouped_rows=True)), **keywords)["mosaic_gpu"]
    assert said.startswith("cannot: ") and "groups rows" in said and reason in said


def test_explain_says_what_runs_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(choice, "cuda_devices", list)
    said = lines(*inputs("bfloat16", H=64))
    few_queries = "; few queries by mma.sync; the 2 query heads of a key head share a tile"
    assert said["mosaic_gpu"] == "runs this call where it is lowered for a CUDA GPU" + few_queries
    here, memory = said["xla"].split("; ")
    assert here == f"runs this call on this machine's {jax.default_backend()}"
    assert memory.startswith("logits of ") and "MiB" in memory


@pytest.mark.parametrize("T, left", [(1, True), (4, True), (5, False)])
def test_hopper_leaves_few_rows_to_mma(T, left, monkeypatch):
    """Up to 16 rows of 4 heads, unless the call names Hopper's tiles."""
    monkeypatch.setattr(choice, "cuda_devices", list)
    shape = jax.ShapeDtypeStruct
    q, k = shape((2, T, 32, 64), jnp.bfloat16), shape((2, 4096, 8, 64), jnp.bfloat16)
    assert ("few queries by mma.sync" in lines(q, k, k)["mosaic_gpu"]) == left
    assert "mma.sync" not in lines(q, k, k, config=Config(ForwardConfig(1, 64)))["mosaic_gpu"]
    call = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu")
    assert runs_by_mma(call, q, k, k) == left


@pytest.mark.parametrize("size, left", [(32, False), (64, True)])
def test_hopper_keeps_small_pages(size, left, monkeypatch):
    monkeypatch.setattr(choice, "cuda_devices", list)
    shape = jax.ShapeDtypeStruct
    q, pages = shape((2, 1, 32, 64), jnp.bfloat16), shape((8, size, 8, 64), jnp.bfloat16)
    call = functools.partial(pallas_fa.paged_attention, implementation="mosaic_gpu")
    assert runs_by_mma(call, q, pages, pages, shape((2, 4), jnp.int32), shape((2,), jnp.int32)) == left


def runs_by_mma(call, *args):
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "flash_attention" in text
    return "flash_attention_decode" in text


def test_explain_says_what_computes_the_gradients():
    arrays = inputs("bfloat16", H=64)
    bias = np.ones((4, 6), np.float32)  # its gradient is a sum over heads, which the kernel adds up in no fixed order
    said = lines(*arrays, bias=bias, deterministic_gradients=True)
    assert "xla computes its gradients, because" in said["mosaic_gpu"] and "no fixed order" in said["mosaic_gpu"]
    assert "gradients" not in lines(*arrays, bias=bias)["mosaic_gpu"]


def test_explain_takes_shapes_and_computes_nothing():
    """Arrays of a terabyte; all that can be an array may be a shape."""
    shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
    q, k = shape(64, 2**17, 32, 128), shape(64, 2**17, 8, 128)
    ids, lengths = shape(64, 2**17, dtype=jnp.int32), shape(64, dtype=jnp.int32)
    said = lines(
        q, k, k, shape(32, 1, 2**17), shape(2**17, 2**17, dtype=jnp.bool_), scale=shape(), is_causal=True,
        query_seq_lengths=lengths, key_value_seq_lengths=lengths, query_segment_ids=ids, key_value_segment_ids=ids,
        local_window_size=(4096, 0), logits_soft_cap=30.0, score=scores.Alibi(shape(32)), precision="highest",
        return_residual=True,
    )  # fmt: skip
    assert said["xla"].startswith("runs this call")


def test_explain_takes_numpy_arrays_masks_and_scores():
    q, k, v = (np.asarray(x) for x in inputs())
    said = lines(q, k, v, None, masks.Segments(np.zeros((2, 4), int), np.zeros((2, 6), int)), score=scores.SoftCap(2.0))
    assert said["xla"].startswith("runs this call")


def test_explain_agrees_with_choose():
    for keywords in ({}, {"implementation": "reference"}, {"implementation": ("reference", "xla")}):
        said = lines(*inputs(), **keywords)
        runs, *_ = (name for name, verdict in said.items() if verdict.startswith("runs this call"))
        assert runs == chosen(problem(), keywords.get("implementation"))


# ---- platforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ("cpu", "cuda", "tpu"))
def test_xla_lowers_for_every_platform_from_any_machine(platform):
    attend = jax.jit(functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="xla"))
    gradient = jax.jit(jax.grad(lambda *x: attend(*x).sum()))
    lowered = gradient.trace(*inputs()).lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in lowered and "custom_call" not in lowered


def test_the_default_exports():
    """One platform for each export; a saved program runs as it did."""
    attend = jax.jit(functools.partial(pallas_fa.dot_product_attention, is_causal=True))
    arguments = inputs()
    exported = jax.export.export(attend, platforms=("cpu",))(*arguments)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(*arguments), attend(*arguments))


def test_nothing_in_the_environment_changes_the_choice():
    """The choice depends on the call and the platform; fresh processes with odd variables say the same."""
    code = "import jax.numpy as jnp, pallas_fa; print(pallas_fa.explain(*[jnp.ones((1, 8, 2, 8))] * 3))"

    def said(**extra):
        environment = {**os.environ, **extra}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert said() == said(PALLAS_FA_IMPLEMENTATION="reference", IMPLEMENTATION="reference") != ""


# ---- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ("8.0", "8.6", "8.9", "10.0", "11.0", "12.0", "12.1"))
def test_other_gpus_than_hopper_run_the_kernels_by_mma_when_named(capability, monkeypatch):
    gpu = Gpu(capability, 100, 99 * 1024)
    monkeypatch.setattr(Gpu, "visible", lambda: gpu)
    call = problem(dtype="bfloat16", H=64)
    assert chosen(call, None) == "xla"
    for name in ("mosaic_gpu", "mma"):
        found = choice.choose(call, name)
        assert found.backend == found.gradients == mma.backend(gpu, name)
        assert lines(*inputs("bfloat16", 64))[name] == f"could, but only when named: {NEVER_RUN}"
    assert chosen(call, ("mosaic_gpu", "xla")) == "mosaic_gpu"


def test_hopper_runs_the_kernels_by_mma_when_named():
    call = problem(dtype="bfloat16", H=64)
    assert chosen(call, None) == chosen(call, "mosaic_gpu") == "mosaic_gpu"
    assert lines(*inputs("bfloat16", 64))["mma"] == f"could, but only when named: {SLOWER_ON_HOPPER}"
    assert chosen(call, "mma") == "mma"


def test_older_gpus_run_no_kernels(monkeypatch):
    monkeypatch.setattr(Gpu, "visible", lambda: Gpu("7.5", 40, 48 * 1024))
    call = problem(dtype="bfloat16", H=64)
    assert "7.5" in str(reason("mosaic_gpu", call)) and "8.0 and above" in str(reason("mma", call))
    assert chosen(call, None) == "xla"


def test_explain_says_why_amd_gpus_run_xla(monkeypatch):
    monkeypatch.setattr(choice, "has_rocm", lambda: True)
    said = pallas_fa.explain(*inputs("bfloat16", H=64))
    assert "ROCm" in said.splitlines()[-1] and "xla runs" in said.splitlines()[-1]
