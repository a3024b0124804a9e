"""The GPUs of this machine, and what one has, as a value that plans and tables of tiles take as an argument."""

import dataclasses
from typing import Any

import jax

# KB that one CTA (a CUDA thread block) may have, by compute capability; 48 where the capability is not listed.
_SHARED_MEMORY_KB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}


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
    def of(cls, device: Any) -> "Gpu":
        """The value for a CUDA device of JAX."""
        capability = device.compute_capability
        return cls(capability, device.core_count, _SHARED_MEMORY_KB.get(capability, 48) * 1024)

    @classmethod
    def visible(cls) -> "Gpu":
        """The first CUDA GPU of this process; an H100 or H200 SXM where there is none, to lower programs for one."""
        devices = of_platform("cuda")
        return cls.of(devices[0]) if devices else cls("9.0", 132, _SHARED_MEMORY_KB["9.0"] * 1024)


def of_platform(platform: str) -> list[Any]:
    """The devices of `platform`, such as "cuda"; none where JAX has no such platform here."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
