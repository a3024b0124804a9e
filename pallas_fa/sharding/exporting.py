"""A clear error where `jax.export` meets what it can't store."""

from typing import Any

from jax.extend import core
from jax.interpreters import mlir

_needs_process = core.Primitive("pallas_fa_needs_process")
_needs_process.def_abstract_eval(lambda x: x)
_needs_process.def_impl(lambda x: x)


def _lower(ctx, x):
    module = ctx.module_context
    if module.lowering_parameters.for_export and module.axis_context.num_devices > 1:
        raise NotImplementedError(
            "a program for several devices can't be exported with GPU kernels on arrays that jit shards: XLA asks this"
            " process what each device computes. Call attention inside jax.shard_map, export for one device, or name"
            " implementation='xla'."
        )
    return [x]


mlir.register_lowering(_needs_process, _lower)


def needs_process(x: Any) -> Any:
    """`x`, in a program that can't be exported for several devices, since JAX calls back into Python to compile it."""
    return _needs_process.bind(x)
