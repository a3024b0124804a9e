"""Prints, a line of JSON each, what XLA computes in one pass with the row sums that a backward kernel needs.

usage: python -m tests.elsewhere.fusions      started by `tests/test_compiled.py`, with a stand-in driver
"""

import json
import re

import jax
import jax.numpy as jnp

import pallas_fa
from tests.elsewhere.compile import printed
from tests.elsewhere.targets import TARGETS

# [B, T, N, H], and key heads.
SHAPES = (((1, 1024, 8, 128), 1), ((1, 1024, 32, 128), 8), ((8, 1024, 12, 64), 12))


def passes_with_row_sums(program: str, shape: tuple[int, ...]) -> list[list[str]]:
    """Returns the operations of each fused computation that multiplies two arrays of the shape and reduces the products."""
    computations = re.findall(r"^%[^\n]*\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL)
    array = re.escape(f"f32[{','.join(map(str, shape))}]")
    multiplies = re.compile(rf"= {array}\S* multiply\(")
    operations = (re.findall(r"= \S+ ([\w-]+)\(", x) for x in computations if multiplies.search(x))
    return [names for names in operations if "reduce" in names]


def main() -> None:
    """Compiles the pullback of each shape, a program of its own."""
    device = TARGETS["sm_90a"].device()
    sharding = jax.sharding.SingleDeviceSharding(device)

    def forward(q, k, v):
        attend = lambda *x: pallas_fa.dot_product_attention(*x, is_causal=True, implementation="mosaic_gpu")
        return jax.vjp(attend, q, k, v)

    for shape, key_heads in SHAPES:
        q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        k = jax.ShapeDtypeStruct((*shape[:2], key_heads, shape[3]), jnp.bfloat16)
        with printed(), jax.default_device(device):
            out, pullback = jax.eval_shape(forward, q, k, k)
            options = dict(in_shardings=sharding, out_shardings=sharding)
            traced = jax.jit(lambda pullback, d_out: pullback(d_out), **options).trace(pullback, out)
            program = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
        print(json.dumps([shape, passes_with_row_sums(program, shape)]), flush=True)


if __name__ == "__main__":
    main()
