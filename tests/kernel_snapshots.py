"""The kernels that calls lower to, as text that can be compared between two trees.

usage: python -m tests.kernel_snapshots write FILE          the fingerprint of each kernel of each call
       python -m tests.kernel_snapshots compare FILE OTHER  which kernels differ; exit code 1 if any does
       python -m tests.kernel_snapshots show CALL           the text of the kernels of one call

A refactoring that means to change no kernel proves it so. Locations are left out, and symbols are numbered in the order
in which they appear, so that names in the source don't count. A second fingerprint ignores the order of lines and the
numbers of values and constants: where only that is equal, the kernel has the same operations in another order.
"""

import hashlib
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, llvm, nvvm
from tqdm import tqdm

import pallas_fa
from pallas_fa import masks, scores
from tests import accuracy, cases

Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


def kernels(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The Mosaic GPU module of each kernel in the program that `fn` lowers to for CUDA."""
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op.attributes["call_target_name"]):
            config = op.attributes["mhlo.backend_config"]
            found.append(_text(ir.StringAttr(config["module"]).value_bytes))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return found


def _text(module: bytes) -> str:
    with mlir.make_ir_context() as context:
        mgpu.dialect.register_dialect(context)  # pyright: ignore[reportPrivateImportUsage]
        assert gpu and llvm and nvvm  # imported, so that their types can be parsed
        context.allow_unregistered_dialects = True
        context.load_all_available_dialects()
        text = ir.Module.parse(module).operation.get_asm(enable_debug_info=False)
    text = re.sub(r'mosaic_gpu.dump_basename = "[^"]*"', "", text)
    symbols = {name: f"@symbol{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"@[\w.$-]+", text)))}
    return re.sub(r"@[\w.$-]+", lambda m: symbols[m.group()], text)


def fingerprints(text: str) -> tuple[str, str]:
    """(of the text, of its operations in any order)."""
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()[:16]
    operations = sorted(re.sub(r"%[\w#:]+|value = \S+", "", line) for line in text.splitlines())
    return digest(text), digest("\n".join(operations))


def calls() -> Iterator[Call]:
    """Every 16-bit row of the table of cases, and shapes that meet every row of the tables of tiles."""
    for case in cases.TABLE:
        if case.dtype not in ("bfloat16", "float16"):
            continue
        inputs = case.inputs()
        attention = accuracy.library(inputs, ("mosaic_gpu", "xla"))
        arguments = *inputs.qkv, inputs.arrays
        yield f"case-{case}", _with_gradients(attention, inputs.d_out, inputs.d_lse), arguments
    lengths, dims = (1000, 1024, 2048, 4096, 8192, 16384), ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96))
    for T, (H, Hv), mask in itertools.product(lengths, dims, MASKS):
        for heads, kv_heads in ((16, 16), (32, 4)):
            yield _call(T, H, Hv, heads, kv_heads, mask, "plain")
    for T, (H, Hv), mask, score in itertools.product((1024, 4096), dims[:2], ("full", "causal", "packed"), SCORES):
        yield _call(T, H, Hv, 16, 16, mask, score)
    for T, H, mask in itertools.product((1024, 4096), (64, 128), ("full", "causal")):
        yield _call(T, H, H, 16, 4, mask, "plain", deterministic_gradients=True)


MASKS = {
    "full": lambda B, T: {},
    "causal": lambda B, T: {"is_causal": True},
    "window": lambda B, T: {"mask": masks.Causal() & masks.Window(512, 0)},
    "packed": lambda B, T: {"is_causal": True, **_ids(jax.ShapeDtypeStruct((B, T), jnp.int32))},
    "lengths": lambda B, T: {"key_value_seq_lengths": jax.ShapeDtypeStruct((B,), jnp.int32)},
}
SCORES = {
    "soft_cap": lambda N, T: {"logits_soft_cap": 30.0},
    "alibi": lambda N, T: {"score": scores.Alibi(jax.ShapeDtypeStruct((N,), jnp.float32))},
    "bias": lambda N, T: {"bias": jax.ShapeDtypeStruct((1, N, T, T), jnp.bfloat16)},
    "bias_keys": lambda N, T: {"bias": jax.ShapeDtypeStruct((1, 1, 1, T), jnp.float32)},
}


def _ids(ids):
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def _call(T: int, H: int, Hv: int, N: int, K: int, mask: str, score: str, **options: Any) -> Call:
    B = 2
    keywords = {**MASKS[mask](B, T), **(SCORES[score](N, T) if score != "plain" else {})}
    leaves, structure = jax.tree.flatten(keywords)
    is_array = [hasattr(x, "shape") for x in leaves]

    def attention(q, k, v, arrays):
        arrays = iter(arrays)
        filled = [next(arrays) if flag else x for x, flag in zip(leaves, is_array, strict=True)]
        keywords = jax.tree.unflatten(structure, filled)
        call = dict(implementation=("mosaic_gpu", "xla"), return_residual=True, **options)
        return pallas_fa.dot_product_attention(q, k, v, **keywords, **call)

    def with_gradients(q, k, v, floats, others, d_out, d_lse):
        floats, others = iter(floats), iter(others)

        def primal(q, k, v, floats):
            floats, rest = iter(floats), iter(others_list)
            return attention(q, k, v, [next(floats) if f else next(rest) for f in is_float])

        others_list = list(others)
        out, pullback = jax.vjp(primal, q, k, v, list(floats))
        return out, pullback((d_out, d_lse))

    given = [x for x, flag in zip(leaves, is_array, strict=True) if flag]
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in given]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = (
        array(B, T, N, H),
        array(B, T, K, H),
        array(B, T, K, Hv),
        [x for x, f in zip(given, is_float, strict=True) if f],
        [x for x, f in zip(given, is_float, strict=True) if not f],
        array(B, T, N, Hv),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
    )
    marks = "".join(f"-{name}" for name in options)
    return f"shape-T{T}-H{H}-Hv{Hv}-N{N}-K{K}-{mask}-{score}{marks}", with_gradients, arguments


def _with_gradients(attention, d_out, d_lse):
    def run(q, k, v, arrays):
        out, pullback = jax.vjp(attention, q, k, v, arrays)
        return out, pullback((d_out, d_lse))

    return run


def write(file: str) -> None:
    """Writes the fingerprints of the kernels of all calls to `file`."""
    found = {}
    for name, fn, args in tqdm(list(calls()), desc="lowering", mininterval=10):
        found[name] = [fingerprints(text) for text in kernels(fn, *args)]
    pathlib.Path(file).write_text(json.dumps(found, indent=0))
    print(f"{sum(map(len, found.values()))} kernels of {len(found)} calls in {file}")


def compare(file: str, other: str) -> int:
    """Prints which kernels differ; returns 1 if any does."""
    a, b = (json.loads(pathlib.Path(name).read_text()) for name in (file, other))
    counts = dict.fromkeys(("same", "other order", "different", "in one file only"), 0)
    for name in sorted(a.keys() | b.keys()):
        pairs = itertools.zip_longest(a.get(name, []), b.get(name, []))
        for number, (x, y) in enumerate(pairs):
            if x == y:
                verdict = "same"
            elif x is None or y is None:
                verdict = "in one file only"
            else:
                verdict = "other order" if x[1] == y[1] else "different"
            counts[verdict] += 1
            if verdict != "same":
                print(f"{verdict}: kernel {number} of {name}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["same"] < sum(counts.values()))


def show(call: str) -> None:
    """Prints the kernels of one call."""
    for name, fn, args in calls():
        if name == call:
            print("\n".join(kernels(fn, *args)))


if __name__ == "__main__":
    sys.exit({"write": write, "compare": compare, "show": show}[sys.argv[1]](*sys.argv[2:]))
