"""The calls of the suite `float32`: those of the papers in float32, and rows as in AlphaFold."""

import dataclasses

from benchmarks.workloads import Workload, self_attention


def float32_workloads() -> tuple[Workload, ...]:
    """H=64 and 128, full and causal, S=1024 and 4096; a pair bias with its gradient and a key mask."""
    papers = [
        self_attention(
            f"f32-h{H}-{'causal' if causal else 'full'}-{S}",
            B=16384 // S,
            S=S,
            N=2048 // H,
            H=H,
            causal=causal,
            provenance="FlashAttention papers, in float32: B*S = 16384, N*H = 2048",
        )
        for S in (4096, 1024)
        for H in (64, 128)
        for causal in (False, True)
    ]
    what = "AlphaFold-like: rows with a pair bias shared over 64 rows and a key mask"
    rows = [
        self_attention(f"f32-alphafold-h{H}", B=64, S=768, N=4, H=H, bias="NTS", padding=0.25, provenance=what)
        for H in (32, 64)
    ]
    return tuple(dataclasses.replace(w, dtype="float32") for w in (*papers, *rows))
