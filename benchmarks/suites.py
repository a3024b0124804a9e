"""Suites: workloads that are measured together, and what is measured on them by default."""

import dataclasses
import functools

from benchmarks import hopper_workloads
from benchmarks.cpu_gate_workloads import cpu_gate_workloads
from benchmarks.cpu_workloads import cpu_workloads
from benchmarks.float32_workloads import float32_workloads
from benchmarks.gate_workloads import gate_workloads
from benchmarks.model_workloads import model_workloads
from benchmarks.workloads import Workload
from benchmarks.xla_workloads import xla_workloads


@dataclasses.dataclass(frozen=True)
class Suite:
    """Workloads that are measured together, and what is measured on them by default."""

    workloads: tuple[Workload, ...]
    directions: tuple[str, ...]
    implementations: tuple[str, ...]
    baseline: str
    chained: bool = False  # programs repeat calls that are shorter than a dispatch
    gate: bool = False  # each default call is judged beside its peers: `gate.py`


_CPU = ("jax.nn:xla", "pallas_fa:xla", "pallas_fa:reference")
_GPU = ("jax.nn:cudnn", "jax.nn:xla", "tokamax:mosaic", "dew_flash_attn:fa3", "pallas_fa:mosaic_gpu", "pallas_fa:xla")
_GATE = ("jax.nn:xla", "jax.nn:None", "jax.nn:cudnn", "einsum:xla", "pallas_fa:None")
_CPU_GATE = ("jax.nn:xla", "einsum:xla", "pallas_fa:None")
_FA3_AND_OURS = ("dew_flash_attn:fa3", "pallas_fa:mosaic_gpu")
_WITHOUT = ("pallas_fa:mosaic_gpu", "pallas_fa:mosaic_gpu+without")
_GPU_BLOCKS = ("pallas_fa:mosaic_gpu", "pallas_fa:mosaic_gpu+blocks")
_GPU_MASKS = (*_GPU, "jax.nn:cudnn+dense", "jax.nn:cudnn+bias", "tokamax:mosaic+dense")


@functools.cache
def suites() -> dict[str, Suite]:
    """All suites by name."""
    both = ("forward", "fwdbwd")
    return {
        "cpu": Suite(cpu_workloads(), both, _CPU, "jax.nn:xla"),
        "hopper-forward": Suite(tuple(hopper_workloads.papers()), ("forward",), _GPU, "jax.nn:cudnn"),
        "hopper-backward": Suite(tuple(hopper_workloads.papers()), ("backward",), _GPU, "jax.nn:cudnn"),
        "mma": Suite(
            (*hopper_workloads.papers(), *hopper_workloads.masked(), hopper_workloads.as_many_keys()),
            ("forward", "backward"),
            ("torch:flash", "pallas_fa:mma"),
            "torch:flash",
        ),
        "mma-99KB": Suite(
            tuple(hopper_workloads.papers()),
            ("forward", "backward"),
            ("torch:flash", "pallas_fa:mma+99KB"),
            "torch:flash",
        ),
        "hopper-dtypes": Suite(
            tuple(hopper_workloads.dtypes()),
            ("forward", "backward"),
            ("jax.nn:cudnn", "pallas_fa:mosaic_gpu"),
            "jax.nn:cudnn",
        ),
        "hopper-forward-masks": Suite(tuple(hopper_workloads.masked()), ("forward",), _GPU_MASKS, "jax.nn:cudnn"),
        "hopper-backward-masks": Suite(tuple(hopper_workloads.masked()), ("backward",), _GPU_MASKS, "jax.nn:cudnn"),
        "operands": Suite(
            tuple(hopper_workloads.operands()),
            both,
            (*_WITHOUT, "dew_flash_attn:fa3", "cudnn:jax"),
            _WITHOUT[1],
            chained=True,
        ),
        "hopper-documents": Suite(
            tuple(hopper_workloads.documents()),
            ("forward", "backward"),
            (*_GPU_MASKS, "pallas_fa:mosaic_gpu+intervals"),
            "jax.nn:cudnn+dense",
        ),
        "hopper-forward-blocks": Suite(
            tuple(hopper_workloads.blocks()), ("forward",), _GPU_BLOCKS, "pallas_fa:mosaic_gpu"
        ),
        "hopper-backward-blocks": Suite(
            tuple(hopper_workloads.blocks()), ("backward",), _GPU_BLOCKS, "pallas_fa:mosaic_gpu"
        ),
        "hopper-alphafold": Suite(tuple(hopper_workloads.alphafold()), both, _GPU_MASKS, "jax.nn:cudnn"),
        "hopper-models": Suite(model_workloads(), both, ("jax.nn:cudnn", *_FA3_AND_OURS), "jax.nn:cudnn", chained=True),
        "hopper-grouped": Suite(
            tuple(hopper_workloads.grouped()),
            ("backward",),
            ("jax.nn:cudnn", *_FA3_AND_OURS),
            "jax.nn:cudnn",
            chained=True,
        ),
        "hopper-relative": Suite(tuple(hopper_workloads.relative()), ("forward", "backward"), _GPU, "jax.nn:cudnn"),
        "float32": Suite(
            float32_workloads(), both, ("jax.nn:xla", "pallas_fa:mosaic_gpu", "pallas_fa:xla"), "jax.nn:xla"
        ),
        "xla-on-gpus": Suite(xla_workloads(), both, ("jax.nn:xla", "pallas_fa:xla"), "jax.nn:xla"),
        "nowhere-slower": Suite(gate_workloads(), both, _GATE, "jax.nn:xla", chained=True, gate=True),
        "nowhere-slower-cpu": Suite(cpu_gate_workloads(), both, _CPU_GATE, "jax.nn:xla", gate=True),
        "hopper-head-dims": Suite(tuple(hopper_workloads.head_dims()), ("forward", "backward"), _GPU, "jax.nn:xla"),
    }
