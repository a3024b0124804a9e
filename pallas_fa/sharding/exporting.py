"""Raises clear errors where `jax.export` can't store a program with kernels."""

from typing import Any

from jax.extend import core
from jax.interpreters import batching, mlir

_refuse_export = core.Primitive("pallas_fa_refuse_export")
_one_platform = core.Primitive("pallas_fa_one_platform")
for _primitive in (_refuse_export, _one_platform):
    _primitive.def_abstract_eval(lambda x: x)
    _primitive.def_impl(lambda x: x)
batching.defvectorized(_one_platform)


def _lower(ctx, x):
    module = ctx.module_context
    if module.lowering_parameters.for_export and module.axis_context.num_devices > 1:
        raise NotImplementedError(
            "a program for several devices can't be exported with GPU kernels on arrays that jit shards: XLA asks this"
            " process what each device computes. Call attention inside jax.shard_map, export for one device, or name"
            " implementation='xla'."
        )
    return [x]


def _lower_for_one_platform(ctx, x):
    platforms = ctx.module_context.platforms
    if len(platforms) > 1:
        raise NotImplementedError(
            f"a program with GPU kernels can't be lowered for several platforms at once, here {', '.join(platforms)}. Export"
            " once for each platform, or name implementation='xla'."
        )
    return [x]


mlir.register_lowering(_refuse_export, _lower)
mlir.register_lowering(_one_platform, _lower_for_one_platform)


def refuse_export(x: Any) -> Any:
    """Returns `x`; exporting the program for several devices raises, since compiling it calls back into this process."""
    return _refuse_export.bind(x)


def refuse_several_platforms(x: Any) -> Any:
    """Returns `x`; lowering the program for several platforms at once raises, which kernels do not support."""
    return _one_platform.bind(x)
