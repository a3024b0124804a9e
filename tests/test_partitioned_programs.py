"""Programs whose arrays `jit` shards, as JAX and XLA see them: a share of the kernels, export, the compilation cache."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_fa import masks, scores
from pallas_fa.backends import choice
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.problem import Residuals, normalise
from pallas_fa.sharding.device_shard import KEY, LSE, OUT, QUERY, VALUE, DeviceShard, letters_of_operands
from tests.lowering import kernels
from tests.partitioned_calls import HEADS, TOKENS, B, gain, gradient, mesh_of, some_pairs


def with_kernels(devices, **static):
    """Gradients on 1 or 8 devices, and their arguments."""
    x = jax.ShapeDtypeStruct((B, 64, 8, 64), jnp.bfloat16)
    if devices > 1:
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh_of(), HEADS))
    return jax.jit(functools.partial(gradient, implementation="mosaic_gpu", **static)), dict.fromkeys(TOKENS, x)


def lowered_for(devices, **static):
    fn, arguments = with_kernels(devices, **static)
    return fn.trace(arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_for_several_gpus_ask_for_a_share_of_two_kernels():
    text = lowered_for(8)
    assert text.count("@CustomSPMDPartitioning") == 2
    assert "custom_call @mosaic_gpu" not in text
    text = lowered_for(1)
    assert "@CustomSPMDPartitioning" not in text
    assert text.count("custom_call @mosaic_gpu") == 2


def test_export():
    """For one device of several; for several it says what to do."""
    unknown_to_jax = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    export = lambda fn, a: jax.export.export(fn, platforms=["cuda"], disabled_checks=unknown_to_jax)(a)
    assert export(*with_kernels(1)).nr_devices == 1
    with pytest.raises(NotImplementedError, match="can't be exported .* inside jax.shard_map"):
        export(*with_kernels(8))


def test_programs_with_other_masks_differ():
    """Their kernels are not in them, and JAX's compilation cache must tell them apart; equal ones must be equal."""
    programs = [
        re.sub(r'backend_config = "\d+"', "", lowered_for(8, **static))
        for static in ({}, {"is_causal": True}, {"scale": 0.5}, {"is_causal": True})
    ]
    assert len(set(programs)) == 3
    assert programs[1] == programs[3]


@pytest.mark.parametrize("spec", (HEADS, P("data", "model"), P(None, None, ("data", "model"))), ids=str)
def test_the_kernels_of_one_device_lower(spec):
    """What XLA asks for when it has shared out a program: forward and backward for shards, with their indices."""
    mesh = mesh_of()
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    q, k = shape(B, 64, 8, 64), shape(B, 64, 4, 64)
    bias, slopes, allowed = shape(8, 64, 64), shape(8, dtype=jnp.float32), shape(64, 1, dtype=jnp.bool_)
    strip = shape(8, 127)

    def run(q, k, v, bias, slopes, allowed, strip):
        score = scores.Alibi(slopes).then(scores.Custom(gain, jnp.ones((1, 1)))).then(scores.RelativeBias(strip))
        mask = masks.Causal() & masks.Custom(some_pairs, allowed)
        problem, operands = normalise(q, k, v, bias, mask, score=score)
        axes = (*(() if x is None else (x,) if isinstance(x, str) else x for x in spec), (), (), ())
        shard = DeviceShard.of(mesh, problem, dict(zip(OUT, axes, strict=False)), dict.fromkeys(KEY, ()), {})
        call = functools.partial(shards_of, shard, problem)
        letters = letters_of_operands(operands)
        out, lse = call(choice.kernels_for(Gpu.visible()).forward, (operands,), (letters,), (OUT, LSE))
        arguments, letters = (Residuals(operands, out, lse), out, lse), (Residuals(letters, OUT, LSE), OUT, LSE)
        gradients = QUERY, KEY, VALUE, "_NTS", "_N__", "____", "_ND"
        return call(choice.kernels_for(Gpu.visible()).backward, arguments, letters, gradients)

    assert kernels(run, q, k, k, bias, slopes, allowed, strip) == 2


def shards_of(shard, problem, kernel, arguments, letters, results):
    """What each device computes, inside of shard_map, where a kernel runs as it is."""
    specs = jax.tree.map(lambda x: P(*shard.spec(x)), (letters, results))
    local = lambda *arguments: tuple(shard.run(kernel, problem, arguments, results))
    return jax.shard_map(local, mesh=shard.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*arguments)
