"""What is measured on a CPU: small calls in float32, most of them of B=1, N=8, H=64."""

from typing import Any

from benchmarks.workloads import Workload, self_attention


def cpu_workloads() -> tuple[Workload, ...]:
    """Returns the workloads of the suite `cpu`."""
    f32: dict[str, Any] = {"dtype": "float32"}
    base: dict[str, Any] = {"B": 1, "N": 8, "H": 64, **f32}
    required = "project requirement: float32, B=1 N=8 H=64"
    return (
        self_attention("causal-2048", S=2048, causal=True, provenance=f"{required}, time", **base),
        self_attention("full-2048", S=2048, provenance="as causal-2048, every pair allowed", **base),
        self_attention(
            "causal-2048-bf16", S=2048, causal=True, provenance="as causal-2048", **{**base, "dtype": "bfloat16"}
        ),
        self_attention("gqa-2048", S=2048, K=2, causal=True, provenance="as causal-2048, 8 query heads on 2", **base),
        self_attention(
            "window-2048", S=2048, causal=True, window=(255, 0), provenance="Mistral-like sliding window", **base
        ),
        self_attention(
            "documents-2048", S=2048, causal=True, documents=256, provenance="packed pretraining batches", **base
        ),
        self_attention("softcap-2048", S=2048, causal=True, soft_cap=50.0, provenance="Gemma 2", **base),
        self_attention("bias-1024", S=1024, bias="NTS", provenance="T5-like relative bias, trained", **base),
        self_attention("ragged-1000", S=1000, causal=True, provenance="no power of two divides it well", **base),
        self_attention("small-128", B=8, S=128, N=4, H=32, causal=True, provenance="the tiny GPT of models/", **f32),
        self_attention("batch-256", B=32, S=256, N=16, H=64, causal=True, provenance="many short sequences", **f32),
        Workload("decode-4096", 1, 1, 4096, 8, 8, 64, 64, "float32", provenance="one token against a cache"),
        self_attention("causal-8192", S=8192, causal=True, provenance=f"{required}, memory", **base),
    )
