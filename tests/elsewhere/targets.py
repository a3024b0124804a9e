"""GPUs that kernels are compiled for, as XLA's ahead-of-time compiler describes them."""

import dataclasses
from typing import Any

from pallas_fa.backends.gpu.device import Gpu

# Of these, the compiler reads the compute capability; the rest only has to be there.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {core_memory}
  shared_memory_per_block_optin: {shared_memory}
  threads_per_core_limit: 1536
  core_count: {multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 1000000000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.5
  device_memory_size: 40000000000
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU: its name, its compute capability and multiprocessors; `architecture` is what ptxas compiles for."""

    name: str
    compute_capability: str
    multiprocessors: int
    architecture: str

    @property
    def gpu(self) -> Gpu:
        """What plans and tables of tiles ask about."""
        device = dataclasses.make_dataclass("Device", ("compute_capability", "core_count"))
        return Gpu.of(device(self.compute_capability, self.multiprocessors))

    @property
    def number(self) -> str:
        """The compute capability as in names of architectures."""
        return self.compute_capability.replace(".", "")

    def device(self) -> Any:
        """Returns a device of JAX that programs can be compiled for."""
        from jax.experimental import topologies

        major, minor = self.compute_capability.split(".")
        description = _DESCRIPTION.format(
            name=self.name,
            major=major,
            minor=minor,
            extension="ACCELERATED_FEATURES" if self.architecture.endswith("a") else "NONE",
            multiprocessors=self.multiprocessors,
            shared_memory=self.gpu.shared_memory,
            core_memory=self.gpu.shared_memory + 1024,
        )
        sizes = dict(topology_name="1x1x1", topology="1x1x1", target_config=description)
        return topologies.get_topology_desc(platform="cuda", **sizes).devices[0]


TARGETS = {
    target.architecture: target
    for target in (
        Target("NVIDIA A100-SXM4-80GB", "8.0", 108, "sm_80"),
        Target("NVIDIA RTX A6000", "8.6", 84, "sm_86"),
        Target("NVIDIA L4", "8.9", 58, "sm_89"),
        Target("NVIDIA H200", "9.0", 132, "sm_90a"),
        Target("NVIDIA B200", "10.0", 148, "sm_100a"),
        Target("NVIDIA RTX PRO 6000 Blackwell", "12.0", 188, "sm_120a"),
    )
}
