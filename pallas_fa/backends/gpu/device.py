"""What a GPU has, as a value that plans and tables of tiles take as an argument."""

import dataclasses
import functools
from typing import Any

import jax

# KB that one CTA (a CUDA thread block) may have, by compute capability; 48 where the capability is not listed.
_SHARED_MEMORY_KB = {
    "8.0": 163,
    "8.6": 99,
    "8.7": 163,
    "8.9": 99,
    "9.0": 227,
    "10.0": 227,
    "10.3": 227,
    "11.0": 227,
    "12.0": 99,
    "12.1": 99,
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a kernel may use of one GPU.

    Args:
      compute_capability: such as "9.0".
      multiprocessors: how many the GPU has.
      shared_memory: bytes that one CTA may have.
    """

    compute_capability: str
    multiprocessors: int
    shared_memory: int

    @classmethod
    def of(cls, *devices: Any) -> "Gpu":
        """Returns the value for CUDA devices of JAX. Of several kinds all capabilities are named, which no kernel is for."""
        capability = ", ".join(sorted({device.compute_capability for device in devices}))
        multiprocessors = min(device.core_count for device in devices)
        return cls(capability, multiprocessors, _SHARED_MEMORY_KB.get(capability, 48) * 1024)

    @classmethod
    @functools.cache  # asking JAX for devices that are not there takes it 20 us
    def visible(cls) -> "Gpu":
        """Returns that of this process's CUDA GPUs; an H100 or H200 SXM where there is none, to lower programs for one."""
        devices = cuda_devices()
        return cls.of(*devices) if devices else cls("9.0", 132, _SHARED_MEMORY_KB["9.0"] * 1024)


def cuda_devices() -> list[Any]:
    """Returns the CUDA GPUs of this process."""
    return _devices("cuda")


def has_rocm() -> bool:
    """Returns whether this process has GPUs of AMD."""
    return bool(_devices("rocm"))


def _devices(platform):
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
