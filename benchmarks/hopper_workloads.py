"""What is measured on Hopper GPUs: the tables of papers, masks, biases, operands, head dims, documents."""

import dataclasses
from typing import Any

from benchmarks.model_workloads import GEMMA2
from benchmarks.workloads import Workload, self_attention

_PAPER = "FlashAttention papers: B*S = 16384, N*H = 2048"


def papers() -> list[Workload]:
    """Tables of the FlashAttention papers: H x (full, causal) x S, 16384 tokens, width 2048."""
    return [
        self_attention(
            f"h{H}-{'causal' if causal else 'full'}-{S}",
            B=16384 // S,
            S=S,
            N=2048 // H,
            H=H,
            causal=causal,
            series=f"h{H}-{'causal' if causal else 'full'}",
            provenance=_PAPER,
        )
        for H in (64, 128, 256)
        for causal in (False, True)
        for S in (1024, 4096, 16384)
    ] + [
        self_attention("gqa-4096", B=4, S=4096, N=32, K=4, H=128, causal=True, provenance="Llama-like, 32 on 4 heads"),
        self_attention("mha-4096", B=4, S=4096, N=32, H=128, causal=True, provenance="what gqa-4096 is compared with"),
    ]


def dtypes() -> list[Workload]:
    """The papers' calls at S=4096 in both dtypes of 16 bits."""
    calls = [w for w in papers() if w.series and w.S == 4096]
    return [
        dataclasses.replace(w, name=f"{w.name}-{dtype}", dtype=dtype, series=None)
        for w in calls
        for dtype in ("bfloat16", "float16")
    ]


def masked() -> list[Workload]:
    """Masks and scores, beside the same call without."""
    base: dict[str, Any] = {"B": 2, "S": 8192, "N": 16, "H": 128}
    return [
        self_attention("h128-full-8192", provenance="no mask: what masks are compared with", **base),
        self_attention("h128-causal-8192", causal=True, provenance="causal alone", **base),
        self_attention("window-8192", causal=True, window=(1023, 0), provenance="sliding window of 1024 keys", **base),
        self_attention("documents-8192", causal=True, documents=1024, provenance="packed documents of 1024", **base),
        self_attention("softcap-8192", causal=True, soft_cap=20.0, provenance="soft cap of 20", **base),
        self_attention("bias-8192", bias="NTS", provenance="full bias [1, N, S, S]", **base),
        self_attention("padding-8192", padding=0.0, provenance="[B, 1, 1, S] mask that hides nothing", **base),
        self_attention("padding-half-8192", padding=0.5, provenance="[B, 1, 1, S] mask, up to half hidden", **base),
    ]


def grouped() -> list[Workload]:
    """Few key heads for many query heads: as small batches have, and devices that share the heads of a model."""
    device, llama, qwen = "Llama 3 70B on 8 devices", "Llama 3 8B, one sequence", "Qwen3 30B-A3B, one sequence"
    shapes = (
        (1, 1024, 8, 1, 128, device),
        (1, 4096, 8, 1, 128, device),
        (1, 16384, 8, 1, 128, device),
        (1, 1024, 32, 8, 128, llama),
        (1, 2048, 32, 8, 128, llama),
        (1, 6144, 32, 8, 128, llama),
        (1, 8192, 32, 4, 128, qwen),
        (1, 16384, 32, 4, 128, qwen),
        (1, 6144, 64, 8, 128, "Llama 3 70B, one sequence"),
        (2, 2048, 28, 4, 128, "Qwen2.5 7B"),
        (1, 2048, 71, 1, 64, "Falcon 7B"),
        (1, 1024, 64, 8, 64, "gpt-oss, a layer without window"),
        (2, 3072, 64, 8, 64, "gpt-oss, a layer without window"),
        (4, 4096, 32, 1, 128, "one key head for all"),
        (1, 8192, 8, 1, 256, "Gemma 2B"),
    )
    of = lambda B, S, N, K, H, whose, causal=True: self_attention(
        f"h{H}-{'causal' if causal else 'full'}-{B}x{S}-{N}-on-{K}",
        B=B,
        S=S,
        N=N,
        K=K,
        H=H,
        causal=causal,
        provenance=whose,
    )
    return [*(of(*shape) for shape in shapes), of(1, 4096, 8, 1, 128, "the same without mask", causal=False)]


def as_many_keys() -> Workload:
    """A causal call whose queries see as many keys in the mean as those of the window in `masked`."""
    return self_attention("h128-causal-2048", B=8, S=2048, N=16, H=128, causal=True, provenance="as a window of 1024")


def blocks() -> list[Workload]:
    """With "+blocks", each is compared with itself without; sinks also with the window alone."""
    base: dict[str, Any] = {"B": 2, "S": 8192, "N": 16, "H": 128}
    image: dict[str, Any] = {"B": 1, "S": 128 * 128, "N": 16, "H": 128, "pattern": "neighbours"}
    return [
        self_attention("h128-causal-8192", causal=True, provenance="time of a block that is visited", **base),
        self_attention("window-8192", causal=True, window=(1023, 0), provenance="sliding window of 1024 keys", **base),
        self_attention("sinks-8192", causal=True, pattern="sinks_and_window", provenance="StreamingLLM", **base),
        self_attention("natten-2d", provenance="NATTEN, 128 x 128 tokens, 13 x 13, no ranges", **image),
        self_attention("natten-2d-hull", window=(774, 774), provenance="natten-2d in its smallest window", **image),
    ]


def alphafold() -> list[Workload]:
    """Rows of a pair representation."""
    what = "AlphaFold-like: rows with a pair bias shared over 64 rows and a key mask"
    return [self_attention("alphafold-768", B=64, S=768, N=4, H=64, bias="NTS", padding=0.25, provenance=what)]


def operands() -> list[Workload]:
    """What a call may bring; the same call `+without` it is the baseline."""
    return [
        self_attention(
            "gpt-oss-8192-sinks", B=1, S=8192, N=64, K=8, H=64, causal=True, window=(127, 0), sinks=True,
            provenance="gpt-oss: a window of 128 keys",
        ),
        self_attention("h128-causal-4096-sinks", B=4, S=4096, N=16, H=128, causal=True, sinks=True, provenance=_PAPER),
        self_attention("gemma2-soft-cap", **GEMMA2, soft_cap=50.0, provenance="Gemma 2 9B, its local layers"),
        self_attention("h128-causal-4096-bnth", B=4, S=4096, N=16, H=128, causal=True, layout="BNTH", provenance=_PAPER),
        self_attention("h128-full-4096-bnth", B=4, S=4096, N=16, H=128, layout="BNTH", provenance=_PAPER),
        *(
            self_attention(
                f"h{H}-{'causal' if causal else 'full'}-4096-dropout", B=4, S=4096, N=2048 // H, H=H, causal=causal,
                dropout=0.1, provenance=_PAPER,
            )
            for H in (64, 128)
            for causal in (False, True)
        ),
    ]  # fmt: skip


def head_dims() -> list[Workload]:
    """Head dims beside those that kernels compute with."""
    what = "no multiple of 8: beside the multiple of 64 that kernels compute with"
    sizes = (64, 32), (59, 32), (128, 16), (100, 16)
    beside = [self_attention(f"h{H}-4096", B=4, S=4096, N=N, H=H, causal=True, provenance=what) for H, N in sizes]
    large = [
        self_attention(
            f"h512-{'causal' if causal else 'full'}-4096-{K}",
            B=4,
            S=4096,
            N=8,
            K=K,
            H=512,
            causal=causal,
            provenance=what,
        )
        for K, what in ((1, "Gemma 4, its global layers: one key head"), (4, "the same with four"))
        for causal in (True, False)
    ]
    return beside + large


def relative() -> list[Workload]:
    """Biases of s - t, dense and relative."""
    base: dict[str, Any] = {"B": 2, "S": 8192, "N": 16, "H": 128}
    return [
        self_attention(f"{name}-{mask}-8192", causal=mask == "causal", provenance=what, **options, **base)
        for mask in ("full", "causal")
        for name, what, options in (
            ("none", "no bias: what the others are compared with", {}),
            ("dense", "bias [1, N, S, S] with its gradient", {"bias": "NTS"}),
            ("relative", "T5-like: bias of s - t with its gradient", {"relative": True}),
        )
    ]


def documents() -> list[Workload]:
    """Short documents packed into one row."""
    base: dict[str, Any] = {"B": 1, "S": 16384, "N": 16, "H": 128, "documents": 128}
    what = "many short documents in one row, as flash-attn's varlen functions take them"
    return [
        self_attention("documents-128-full", provenance=what, **base),
        self_attention("documents-128-causal", causal=True, provenance=what, **base),
    ]
