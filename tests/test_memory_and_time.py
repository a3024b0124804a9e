"""What the library costs: memory of compiled programs, import time, and the time to trace and lower a call.

Times are CPU seconds, which other work on the machine slows less than it slows the wall clock, and medians; those of
lowering are compared with the time that jax.nn's call takes.
"""

import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_fa
from pallas_fa import masks, scores
from tests.lowering import time_in_calls_of_jax_nn


def _attention(**keywords):
    def attend(q, k, v):
        return pallas_fa.dot_product_attention(q, k, v, implementation="xla", **keywords)

    return attend


def _forward_and_backward(attend):
    def run(q, k, v, d_out):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(d_out)

    return jax.jit(run)


def _temporary_bytes(T, N=8, H=64, dtype=jnp.float32, **keywords):
    """Of forward and backward, from the compiler; nothing runs."""
    x = jax.ShapeDtypeStruct((1, T, N, H), dtype)
    compiled = _forward_and_backward(_attention(**keywords)).lower(x, x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_far_below_one_array_of_logits():
    """B=1, N=8, H=64, T=S=8192, causal, float32: under 15% of one T x S x N float32 array."""
    logits = 8192 * 8192 * 8 * 4
    assert _temporary_bytes(8192, is_causal=True) < 0.15 * logits


_LINEAR = {
    "window, soft cap": lambda T: {"mask": masks.Window(512, 0), "logits_soft_cap": 20.0},
    "segments, Alibi": lambda T: {
        "mask": masks.Segments(jnp.zeros(T, int), jnp.zeros(T, int)),
        "score": scores.Alibi(jnp.ones(8)),
    },
    "relative bias": lambda T: {"score": scores.RelativeBias(jnp.ones((8, 2 * T - 1)))},
    "dropout": lambda T: {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("name", _LINEAR)
def test_memory_grows_with_the_length_not_with_its_square(name):
    """Four times the length: about four times the memory, where logits would take sixteen times."""
    small, large = (_temporary_bytes(T, **_LINEAR[name](T)) for T in (2**12, 2**14))
    assert large < 6 * small


_forward_mode = _attention(is_causal=True, forward_mode=True)
_FORWARD_MODE = {
    "jvp": lambda x: jax.jvp(_forward_mode, x, x),
    "reverse over forward": lambda x: jax.vjp(lambda *x: jax.jvp(_forward_mode, x, x)[1], *x)[1](x[0]),
    "forward over reverse": lambda x: jax.jvp(lambda *x: jax.vjp(_forward_mode, *x)[1](x[0]), x, x),
}


@pytest.mark.parametrize("name", _FORWARD_MODE)
def test_memory_of_forward_mode_grows_with_the_length(name):
    """As above, and under 15% of one array of logits for Hessian-vector products too."""

    def temporary_bytes(T):
        x = (jax.ShapeDtypeStruct((1, T, 8, 64), jnp.float32),) * 3
        return jax.jit(_FORWARD_MODE[name]).lower(x).compile().memory_analysis().temp_size_in_bytes

    small, large = map(temporary_bytes, (2**12, 2**14))
    assert large < 6 * small
    assert large < 0.15 * (2**14) ** 2 * 8 * 4


def test_broadcast_biases_and_masks_are_not_materialised():
    """A bias per head and key and a padding mask of keys, at T = S = 8192: not even T x S bytes more, for one head."""
    T, N = 8192, 8
    x = jax.ShapeDtypeStruct((1, T, N, 64), jnp.float32)
    bias, mask = jax.ShapeDtypeStruct((N, 1, T), jnp.float32), jax.ShapeDtypeStruct((1, 1, 1, T), jnp.bool_)

    def run(q, k, v, bias, mask, d_out):
        attend = lambda q, k, v, bias: pallas_fa.dot_product_attention(q, k, v, bias, mask, implementation="xla")
        return jax.vjp(attend, q, k, v, bias)[1](d_out)

    used = jax.jit(run).lower(x, x, x, bias, mask, x).compile().memory_analysis().temp_size_in_bytes
    assert used < _temporary_bytes(T) + T * T


# ---- time -----------------------------------------------------------------------------------------------------------

_IMPORT = """
import time, sys
import jax
before = set(sys.modules)
start = time.process_time()
import pallas_fa
print(time.process_time() - start)
print(" ".join(sorted(set(sys.modules) - before)))
"""


def test_import_is_fast_and_lazy():
    """Less than 0.3 s beyond `import jax`; neither the kernels' part of Pallas nor Flax comes along."""
    runs = [
        subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(3)
    ]
    modules = runs[0][1].split()
    late = "jax.experimental.pallas", "jax.experimental.mosaic", "flax"
    heavy = [name for name in modules if name.startswith(late)]
    assert not heavy, f"imported with pallas_fa: {heavy}"
    assert statistics.median(float(run[0]) for run in runs) < 0.3


_TWO_CALLS = """
import jax
import pallas_fa
traced = []

@jax.jit
def attend(q):
    traced.append(q.shape)
    return pallas_fa.dot_product_attention(q, q, q)

x = jax.numpy.ones((1, 32, 2, 8))
attend(x), attend(x)
print(len(traced))
"""


@pytest.mark.smoke
def test_the_first_call_is_traced_once():
    """From JAX 0.12 on, `jax.jit` traces anew once a part of Pallas is imported: the first call must not be what does so."""
    run = subprocess.run([sys.executable, "-c", _TWO_CALLS], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1"]


_CALLS = {
    "causal": lambda: _attention(is_causal=True),
    "window and soft cap": lambda: _attention(local_window_size=(64, 0), logits_soft_cap=20.0),
    "segments": lambda: _attention(mask=masks.Segments(*(jnp.zeros((1, 512), int),) * 2)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_tracing_and_lowering_a_call_takes_under_50_ms(name):
    """3.5 of jax.nn's 14 ms are 49. A new function each time, so that JAX has nothing of it cached."""
    x = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.float32)
    assert time_in_calls_of_jax_nn(lambda: jax.jit(_CALLS[name]()).lower(x, x, x), rounds=15) < 3.5
