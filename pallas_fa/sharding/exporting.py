"""Raises a clear error where `jax.export` would store a program that needs this process to compile."""

from typing import Any

from jax.extend import core
from jax.interpreters import mlir

_refuse_export = core.Primitive("pallas_fa_refuse_export")
_refuse_export.def_abstract_eval(lambda x: x)
_refuse_export.def_impl(lambda x: x)


def _lower(ctx, x):
    module = ctx.module_context
    if module.lowering_parameters.for_export and module.axis_context.num_devices > 1:
        raise NotImplementedError(
            "a program for several devices can't be exported with GPU kernels on arrays that jit shards: XLA asks this"
            " process what each device computes. Call attention inside jax.shard_map, export for one device, or name"
            " implementation='xla'."
        )
    return [x]


mlir.register_lowering(_refuse_export, _lower)


def refuse_export(x: Any) -> Any:
    """Returns `x`; exporting the program for several devices raises, since compiling it calls back into this process."""
    return _refuse_export.bind(x)
