"""The calls of the suite `xla-on-gpus`: what GPUs without kernels compute, beside the same by XLA through `jax.nn`."""

from typing import Any

from benchmarks.workloads import DTYPES, Workload, self_attention


def xla_workloads() -> tuple[Workload, ...]:
    """S=1024, 2048 and 4096 in each dtype; at 4096 also fewer key heads, a mask of keys, and a bias with its gradient."""

    def papers(dtype, S, H, name, **given):
        shape = {"B": 16384 // S, "S": S, "N": 2048 // H, "H": H}
        provenance = "FlashAttention papers: B*S = 16384, N*H = 2048"
        name = f"{DTYPES[dtype]}-h{H}-{name}-{S}"
        return self_attention(name, **shape, dtype=dtype, provenance=provenance, **given)

    calls: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}
    features: dict[str, dict[str, Any]] = {
        "gqa": {"K": 4},
        "gqa-causal": {"K": 4, "causal": True},
        "key-mask": {"padding": 0.25},
        "bias": {"bias": "NTS"},
    }
    return (
        *(papers(x, S, 128, name, **calls[name]) for x in DTYPES for S in (4096, 2048, 1024) for name in calls),
        *(papers(x, 4096, 64, "full") for x in DTYPES),
        *(papers("bfloat16", 4096, 128, name, **features[name]) for name in features),
        papers("bfloat16", 1024, 128, "gqa-causal", **features["gqa-causal"]),
    )
