"""A few small calls of the kernels, for `compute-sanitizer --tool memcheck python -m tests.sanitizer_calls` on a GPU.

Forward and backward: full, causal and with a window, packed documents, a bias with its gradient, grouped heads, odd lengths,
pairs of blocks of queries, float32; full and causal by mma.sync. Forward: few queries by mma.sync, of keys in one piece, in
parts and in pages.
"""

import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.mma import config as mma

_LENGTH = 300


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def _loss(q, k, v, bias, **keywords):
    call = functools.partial(pallas_fa.dot_product_attention, **{"implementation": "mosaic_gpu"} | keywords)
    return (call(q, k, v, bias=bias).astype(jnp.float32) ** 2).sum()


def main(names: Sequence[str] = ()) -> None:
    """Runs the calls whose names have one of `names` in them, or all, and prints a line after each."""
    ids = jnp.arange(_LENGTH)[None] // 70
    causal = {"is_causal": True}
    two_heads = _LENGTH, 2, 2
    in_registers = mma.Config(backward=mma.FusedBackwardConfig(2, 64, 16, stages=1, values_in_registers=True))
    calls = {
        "full, H=128": ((*two_heads, 128), None, {}),
        "causal, H=128": ((*two_heads, 128), None, causal),
        "window, H=128": ((*two_heads, 128), None, causal | {"local_window_size": (100, 0)}),
        "documents, H=64": ((*two_heads, 64), None, causal | {"query_segment_ids": ids, "key_value_segment_ids": ids}),
        "bias, H=64": ((*two_heads, 64), _normal(3, 1, 2, _LENGTH, _LENGTH), {}),
        "causal, H=256": ((*two_heads, 256), None, causal),
        "causal, H=64": ((*two_heads, 64), None, causal),
        "float32, causal, H=128": ((*two_heads, 128), None, causal),
        "float32, bias, H=64": ((*two_heads, 64), _normal(3, 1, 2, _LENGTH, _LENGTH), {}),
        "full, pairs": ((*two_heads, 128), None, {"config": Config(forward=ForwardConfig(q_block_pairs=2))}),
        "causal, pairs, H=64": (
            (*two_heads, 64),
            None,
            causal | {"config": Config(forward=ForwardConfig(1, q_block_pairs=2))},
        ),
        # Only where the diagonal ends at a tile's corner.
        "causal, heads of a tile before the next": ((256, 8, 1, 128), None, causal),
        "mma, gradients, H=64": ((*two_heads, 64), None, causal | {"implementation": "mma"}),
        "mma, gradients, H=128": ((*two_heads, 128), None, {"implementation": "mma"}),
        "mma, gradients, causal, H=256": ((*two_heads, 256), None, causal | {"implementation": "mma"}),
        "mma, gradients, V in registers, H=256": (
            (*two_heads, 256),
            None,
            {"implementation": "mma", "config": in_registers},
        ),
    }
    for name, ((T, N, K, H), bias, keywords) in calls.items():
        if names and not any(part in name for part in names):
            continue
        dtype = jnp.float32 if "float32" in name else jnp.bfloat16
        q, k, v = (_normal(i, 1, T, heads, H).astype(dtype) for i, heads in enumerate((N, K, K)))
        run = jax.jit(jax.grad(functools.partial(_loss, **keywords), (0, 1, 2) if bias is None else (0, 1, 2, 3)))
        jax.block_until_ready(run(q, k, v, bias))
        print(f"ran: {name}", flush=True)
    for name, (rows, page, H) in {
        "mma, few queries": (16, None, 128),
        "mma, few queries, 32 rows": (32, None, 64),
        "mma, few queries, pages": (16, 16, 128),
    }.items():
        if not names or any(part in name for part in names):
            jax.block_until_ready(_few_queries(rows, page, H))
            print(f"ran: {name}", flush=True)


def _few_queries(rows, page, H):
    q, k, v = (_normal(i, 2, T, heads, H) for i, (T, heads) in enumerate(((1, 8), (320, 2), (320, 2))))
    lengths = jnp.array([70, 320])
    keywords = {"implementation": "mma", "config": mma.Config(decode=mma.DecodeConfig(rows, 64, 3, kv_splits=2))}
    if page is None:
        return pallas_fa.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **keywords)
    table = jnp.arange(2 * 320 // page).reshape(2, -1)
    pages = (x.reshape(-1, page, *x.shape[2:]) for x in (k, v))
    return pallas_fa.paged_attention(q, *pages, table, lengths, **keywords)


if __name__ == "__main__":
    main(sys.argv[1:])
