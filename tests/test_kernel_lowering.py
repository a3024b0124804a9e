"""The kernels lower for CUDA on any machine: every mask, score, head dim, length and tile configuration.

Lowering runs all of Pallas and Mosaic GPU down to the GPU dialects, without a GPU; it finds most of what can be wrong
with a kernel but its results.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.hopper.forward.table import ForwardFacts, forward_configs
from tests import cases
from tests.cases import Case
from tests.lowering import kernels, time_in_calls_of_jax_nn

BASE = Case(200, 300, dtype="bfloat16", N=4, K=2, H=64, Hv=64, batch=(2,))
HEAD_DIMS = ((8, 8), (64, 64), (72, 72), (128, 128), (192, 128), (64, 128), (128, 64), (256, 256), (136, 24), (59, 100))
LENGTHS = ((1, 1), (1, 7), (64, 64), (799, 3), (239, 1), (1023, 1024), (4096, 4096))


def lower_forward(case, **keywords):
    inputs = case.inputs()
    call = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu", **keywords)
    return kernels(lambda q, k, v, arrays: call(q, k, v, **inputs.keywords(arrays)), *inputs.qkv, inputs.arrays)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_every_mask_lowers(mask):
    batch = (2, 3) if "partial" in mask else (2,)
    assert lower_forward(dataclasses.replace(BASE, mask=mask, batch=batch)) == 1


@pytest.mark.parametrize(("T", "rows"), [(17, 64), (100, 128), (1024, 1024)])
def test_the_log_sum_exp_of_a_head_has_room_for_whole_warpgroups(T, rows):
    """What a warpgroup stores of it is copied in one piece, which is cut at the end of a head in the interpreter alone."""
    q = jax.ShapeDtypeStruct((2, T, 4, 64), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu", return_residual=True)
    text = jax.jit(call).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    kernel = next(line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    assert f"tensor<2x4x{rows}xf32>" in kernel.rsplit("->", 1)[1]


def test_lengths_given_twice_lower():
    q = jax.ShapeDtypeStruct((2, 200, 4, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def gradient(q, a, b):
        call = functools.partial(pallas_fa.dot_product_attention, mask=masks.Lengths(kv_lengths=b))
        return jax.grad(lambda q: call(q, q, q, key_value_seq_lengths=a, implementation="mosaic_gpu").sum())(q)

    assert kernels(gradient, q, lengths, lengths) == 2


@pytest.mark.parametrize("score", ["plain", "soft_cap", "alibi"])
@pytest.mark.parametrize("mask", ["full", "window_causal", "segments", "dense"])
def test_kernels_lower_with_64_bit_types(mask, score):
    case = dataclasses.replace(BASE, mask=mask, score=score)
    inputs = case.inputs()
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype.name.replace("64", "32"))), inputs.arrays
    )

    def gradient(q, k, v, arrays):
        call = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu")
        return jax.grad(lambda q: call(q, k, v, **inputs.keywords(arrays)).astype(jnp.float32).sum())(q)

    with jax.enable_x64(True):
        assert kernels(gradient, *inputs.qkv, arrays) == 2


@pytest.mark.parametrize("T", [1, 128])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mma"])
def test_kernels_lower_with_64_bit_types_under_vmap(implementation, T, monkeypatch):
    """Where there is one device, JAX's rule for vmap traces the body of a kernel again."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    attend = functools.partial(pallas_fa.dot_product_attention, implementation=implementation)
    loss = lambda q, k, lengths: attend(q, k, k, key_value_seq_lengths=lengths).astype(jnp.float32).sum()
    q, k = (jax.ShapeDtypeStruct((3, 2, length, 4, 64), jnp.bfloat16) for length in (T, 1024))
    lengths = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    with jax.enable_x64(True):
        assert kernels(jax.vmap(loss), q, k, lengths) == 1
        assert kernels(jax.vmap(jax.grad(loss, (0, 1))), q, k, lengths) == 2


_ATTEND = functools.partial(
    pallas_fa.dot_product_attention,
    implementation="mosaic_gpu",
    is_causal=True,
    config=Config(forward=ForwardConfig(persistent_ctas=2, by_tickets=True)),
)
_SUM = lambda *qkv: _ATTEND(*qkv).astype(jnp.float32).sum()
_LAYERS = lambda layer: lambda q, k, v: jax.lax.scan(lambda q, _: (layer(q, k, v), None), q, length=3)[0]
_STACK = lambda x: jnp.stack([x] * 3)
# Name: a function of q, k and v, and how many kernels it has.
TRANSFORMED = {
    "gradient": (jax.grad(_SUM, (0, 1, 2)), 2),
    "checkpoint": (jax.grad(lambda *qkv: jax.checkpoint(_SUM)(*qkv)), 2),
    "checkpoint of layers": (jax.grad(lambda *qkv: _LAYERS(jax.checkpoint(_ATTEND))(*qkv).sum(), (0, 1, 2)), 3),
    "layers": (jax.grad(lambda *qkv: _LAYERS(_ATTEND)(*qkv).sum(), (1,)), 2),
    "either": (lambda q, k, v: jax.lax.cond(q[0, 0, 0, 0] > 0, _ATTEND, lambda q, k, v: q, q, k, v), 1),
    "tangents": (lambda q, k, v: jax.jvp(lambda q: _ATTEND(q, k, v, forward_mode=True), (q,), (q,)), 1),
    "mapped": (lambda q, k, v: jax.vmap(lambda q: _ATTEND(q, k, v))(_STACK(q)), 1),
    "mapped twice": (
        lambda q, k, v: jax.vmap(lambda k: jax.vmap(lambda q: _ATTEND(q, k, v))(_STACK(q)))(_STACK(k)),
        1,
    ),
    "gradients mapped": (lambda q, k, v: jax.vmap(lambda q: jax.grad(_SUM, (0, 1))(q, k, v))(_STACK(q)), 2),
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_calls_by_tickets_lower_under_every_transformation(name, devices, monkeypatch):
    """Their counter is written in place."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    fn, count = TRANSFORMED[name]
    x = jax.ShapeDtypeStruct((2, 200, 4, 64), jnp.bfloat16)
    with jax.enable_x64(devices == 1):
        assert kernels(fn, x, x, x) == count


@pytest.mark.parametrize(("name", "has_counter"), [("either", True), ("mapped", False), ("mapped twice", False)])
def test_mapped_kernels_have_no_counter(name, has_counter):
    """`run_state` around it can't be mapped."""
    x = jax.ShapeDtypeStruct((2, 200, 4, 64), jnp.bfloat16)
    text = jax.jit(TRANSFORMED[name][0]).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    (kernel,) = (line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    assert ("tensor<1xi32>" in kernel) == has_counter


def test_the_default_runs_on_a_cpu_with_64_bit_types_under_vmap(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x = np.random.default_rng(0).standard_normal((2, 1, 20, 2, 8), np.float32)
    attend = jax.vmap(lambda x: pallas_fa.dot_product_attention(x, x, x))
    with jax.enable_x64(True):
        out = attend(x)
    np.testing.assert_allclose(out, attend(x), rtol=1e-5, atol=1e-6)


def test_the_default_runs_on_a_cpu_with_64_bit_types():
    def attend():
        x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
        return jax.jit(lambda x: pallas_fa.dot_product_attention(x, x, x, is_causal=True))(x)

    with jax.enable_x64(True):
        out = attend()
    np.testing.assert_array_equal(out, attend())
    # Probabilities, such as 1/61, are rounded to bfloat16 where all logits are computed at once.
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, atol=float(jnp.finfo(jnp.bfloat16).eps) / 2)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("score", cases.SCORES)
def test_every_score_lowers(score):
    assert lower_forward(dataclasses.replace(BASE, mask="causal", score=score)) == 1


@pytest.mark.parametrize(("H", "Hv"), HEAD_DIMS)
def test_every_head_dim_lowers(H, Hv):
    assert lower_forward(dataclasses.replace(BASE, mask="causal", H=H, Hv=Hv)) == 1
    assert lower_forward(dataclasses.replace(BASE, T=256, S=320, mask="dense", score="bias", H=H, Hv=Hv)) == 1


@pytest.mark.parametrize(("T", "S"), LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_length_lowers(T, S, dtype):
    assert lower_forward(dataclasses.replace(BASE, T=T, S=S, mask="causal", dtype=dtype, batch=())) == 1


GPU = Gpu("9.0", 132, 227 * 1024)
MANY = 10_000  # heads, more than there are multiprocessors
CONFIGS = sorted(
    {
        (dim, "float32" if split else "bfloat16", config)
        for dim, split in ((64, False), (128, False), (192, False), (256, False), (64, True), (128, True))
        for length in (64, 256, 1024, 2**14)
        for flags in itertools.product((True, False), repeat=3)
        for config in forward_configs(
            ForwardFacts(dim, dim, length, length, MANY, *flags, split, scalar_ranges=not flags[0]), GPU
        )
    },
    key=str,
)


@pytest.mark.parametrize(("dim", "dtype", "config"), CONFIGS)
def test_every_configuration_of_the_tables_lowers(dim, dtype, config):
    # Where the tables have other key blocks there is no mask, and beside 80 keys no shared memory for one.
    # Where the output is stored in turns, masks have no arrays.
    in_turns = config.out_chunks and (config.q_block_pairs or config.persistent_ctas)
    mask = "full" if config.block_kv % 64 else "causal" if in_turns else "segments"
    case = dataclasses.replace(BASE, T=500, mask=mask, H=dim, Hv=dim, dtype=dtype)
    assert lower_forward(case, config=Config(forward=config)) == 1


@pytest.mark.parametrize(("H", "block_kv"), [(64, 112), (128, 176), (256, 80)])
@pytest.mark.parametrize(("S", "mask"), [(520, "causal"), (517, "full")])
def test_key_blocks_of_multiples_of_16_lower(H, block_kv, S, mask):
    config = ForwardConfig(block_kv=block_kv, ping_pong=True, rescale_under_qk=True)
    case = dataclasses.replace(BASE, T=344, S=S, mask=mask, H=H, Hv=H)
    assert lower_forward(case, config=Config(forward=config)) == 1


@pytest.mark.parametrize(("heads", "pairs"), [(1, 0), (16, 0), (33, 1), (66, 2), (132, 4), (MANY, 4)])
def test_no_more_pairs_than_keep_multiprocessors_busy(heads, pairs):
    """At 1024 queries there are 8 blocks of queries for each head, for 132 multiprocessors."""
    facts = ForwardFacts(128, 128, 1024, 1024, heads, uniform=False, visit_table=True, packed=True, split=False)
    assert forward_configs(facts, GPU)[0].q_block_pairs == pairs


def test_sizes_past_two_to_the_31_lower():
    """B * N * T * S = 2^34 logits, a tensor of 2^32 elements, and more than 65535 tiles along an axis."""
    x = jax.ShapeDtypeStruct((70_000, 1024, 1, 64), jnp.bfloat16)
    assert kernels(functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu"), x, x, x) == 1
    x = jax.ShapeDtypeStruct((1, 2**24, 1, 64), jnp.bfloat16)
    assert kernels(functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu"), x, x, x) == 1


def _floats(x, b, n, t, s):
    y = jnp.tanh(x) + jnp.exp(-jnp.abs(x)) + jnp.log(x * x + 1) + jnp.sin(x) * jnp.cos(x) + jnp.sqrt(jnp.abs(x))
    y = y + jax.nn.sigmoid(x) + jax.nn.relu(x) + jax.lax.rsqrt(x * x + 1) + x**3 + jnp.sign(x) + jnp.round(x)
    return jnp.clip(jnp.where(x > 0, y, -y), -5.0, 5.0) + jnp.maximum(x, 0.1) / jnp.minimum(x - 3, -1.0)


def _integers(b, n, t, s):
    mixed = (t * 3 + s // 2 - (t % 5)) ^ (s & 7) | (t << 1) >> 1
    return ((mixed > 4) & (t != s)) | (t <= s) & ((n + b) >= 0)


def test_the_operations_said_to_lower_do():
    call = functools.partial(
        pallas_fa.dot_product_attention,
        implementation="mosaic_gpu",
        score=scores.Custom(_floats),
        mask=masks.Custom(_integers),
    )
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    assert kernels(call, x, x, x) == 1


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"score": scores.Custom(lambda x, b, n, t, s: jax.lax.lgamma(x))}, "lgamma"),
        ({"mask": masks.Custom(lambda b, n, t, s: jnp.cbrt(t) > 2)}, "cbrt"),
        ({"score": scores.Custom(lambda x, b, n, t, s: jax.lax.fori_loop(0, 3, lambda i, y: y * x, x))}, "scan"),
        ({"config": 3}, "config.Config"),
    ],
)
def test_what_does_not_lower_is_said_and_goes_to_xla(keywords, reason):
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, **keywords)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(call, implementation="mosaic_gpu"), x, x, x)
    if "config" not in keywords:
        assert kernels(call, x, x, x) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_wgs": 4}, "compute_wgs=4"),
        ({"block_kv": 72}, "block_kv=72"),
        ({"block_kv": 272}, "block_kv=272"),
        ({"stages": 0}, "stages=0"),
        ({"l2_head_group": 0}, "l2_head_group=0"),
        ({"q_block_pairs": -1}, "q_block_pairs=-1"),
        ({"kv_splits": 0}, "kv_splits=0"),
        ({"kv_splits": 65}, "kv_splits=65"),
        ({"split_heads": -1}, "split_heads=-1"),
        ({"split_heads": 2}, "kv_splits is 1"),
    ],
)
def test_a_wrong_configuration_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        ForwardConfig(**arguments)


def test_a_lowering_takes_less_than_a_second():
    """70 of jax.nn's 14 ms. Nearly all of it is Mosaic's own; it has taken 35 to 45."""
    x = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu")
    assert time_in_calls_of_jax_nn(lambda: kernels(lambda q, k, v: call(q, k, v), x, x, x), rounds=5) < 70
