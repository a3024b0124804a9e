"""The calls of the suite `xla-on-gpus`: what GPUs without kernels compute, beside the same by XLA through `jax.nn`."""

from typing import Any

from benchmarks.workloads import Workload, self_attention

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def xla_workloads() -> tuple[Workload, ...]:
    """S=1024, 2048 and 4096 in each dtype; at 4096 also fewer key heads, a mask of keys, and a bias with its gradient."""
    plain = [
        self_attention(
            f"{short}-h{H}-{'causal' if causal else 'full'}-{S}",
            B=16384 // S,
            S=S,
            N=2048 // H,
            H=H,
            causal=causal,
            dtype=dtype,
            provenance="FlashAttention papers: B*S = 16384, N*H = 2048",
        )
        for dtype, short in _DTYPES.items()
        for S in (4096, 2048, 1024)
        for H, causal in ((64, False), (128, False), (128, True))
    ]
    features: dict[str, dict[str, Any]] = {"gqa": {"K": 4}, "key-mask": {"padding": 0.25}, "bias": {"bias": "NTS"}}
    more = [
        self_attention(
            f"{_DTYPES[dtype]}-h128-{name}-4096",
            B=4,
            S=4096,
            N=16,
            H=128,
            dtype=dtype,
            provenance=f"as above, {name}",
            **given,
        )
        for dtype in ("bfloat16", "float32")
        for name, given in features.items()
    ]
    return (*plain, *more)
