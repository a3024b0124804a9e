"""The calls of the suite `nowhere-slower`: what users of `jax.nn` write, the likely losers first."""

import dataclasses

from benchmarks.workloads import DTYPES, Workload, self_attention


def in_dtypes(dtypes: str, *workloads: Workload) -> list[Workload]:
    """Each workload in each dtype, which its name gets as an ending."""
    chosen = {dtype: short for dtype, short in DTYPES.items() if short in dtypes.split()}
    return [
        dataclasses.replace(w, name=f"{w.name}-{short}", dtype=dtype)
        for w in workloads
        for dtype, short in chosen.items()
    ]


def _decoding(T: int) -> Workload:
    return Workload(f"decode-{T}", 32, T, 4096, 32, 8, 128, 128, gradient=False, provenance="a step against a cache")


_SHORT = [
    self_attention(
        "bert-512-lengths", B=32, S=512, N=16, H=64, lengths=0.44, provenance="BERT-large, 288 to 512 tokens"
    ),
    self_attention("bert-128-lengths", B=64, S=128, N=12, H=64, lengths=0.5, provenance="BERT-base, 64 to 128 tokens"),
    self_attention("vit-197", B=64, S=197, N=16, H=64, provenance="ViT-L: 14 x 14 patches and the class"),
    self_attention("short-64-causal", B=256, S=64, N=8, H=32, causal=True, provenance="a small language model"),
    self_attention("short-256-keys", B=32, S=256, N=12, H=64, padding=0.5, provenance="a bool mask [B, 1, 1, S]"),
    self_attention("short-512-causal", B=16, S=512, N=16, H=64, causal=True, provenance="GPT-2 medium, short context"),
]
_MASKS = [
    self_attention("alphafold-768", B=64, S=768, N=4, H=32, bias="NTS", padding=0.25, provenance="pair bias, key mask"),
    self_attention(
        "dense-2048", B=2, S=2048, N=16, H=64, dense_mask=True, causal=True, provenance="a bool mask [T, S]"
    ),
    self_attention("softcap-2048", B=2, S=2048, N=16, H=128, causal=True, soft_cap=50.0, provenance="Gemma 2"),
    self_attention(
        "fixed-bias-1024", B=4, S=1024, N=16, H=64, bias="NTS", learned=False, provenance="ALiBi as an array"
    ),
    self_attention("bias-512", B=16, S=512, N=16, H=64, bias="NTS", provenance="T5: a learned bias"),
    self_attention("window-4096", B=2, S=4096, N=16, H=128, causal=True, window=(1023, 0), provenance="Mistral"),
]
_TRAINING = [
    self_attention("h64-1024", B=8, S=1024, N=32, H=64, provenance="the FlashAttention papers' shapes, halved"),
    self_attention("h64-1024-causal", B=8, S=1024, N=32, H=64, causal=True, provenance="likewise"),
    self_attention("h128-2048", B=4, S=2048, N=16, H=128, provenance="likewise"),
    self_attention("h128-2048-causal", B=4, S=2048, N=16, H=128, causal=True, provenance="likewise"),
    self_attention("h64-4096-causal", B=2, S=4096, N=32, H=64, causal=True, provenance="likewise"),
    self_attention("h128-4096", B=2, S=4096, N=16, H=128, provenance="likewise"),
    self_attention("gqa-2048", B=4, S=2048, N=32, K=8, H=128, causal=True, provenance="Llama 3 8B"),
]
_SHAPES = [
    Workload("cross-77", 4, 4096, 77, 10, 10, 64, 64, provenance="SDXL: image tokens on text"),
    Workload("cross-256-1500", 16, 256, 1500, 16, 16, 64, 64, provenance="Whisper's decoder on its encoder"),
    self_attention("odd-h-59", B=4, S=1024, N=16, H=59, causal=True, provenance="no multiple of 8"),
    self_attention("odd-h-80", B=4, S=2048, N=16, H=80, causal=True, provenance="H=80"),
    Workload("hv-192-128", 2, 2048, 2048, 16, 16, 192, 128, causal=True, provenance="DeepSeek's latent attention"),
    self_attention("vmap-1024", B=8, S=1024, N=16, H=64, causal=True, vmap=True, provenance="jax.vmap over sequences"),
]
_LONG = [
    self_attention("h128-8192-causal", B=1, S=8192, N=16, H=128, causal=True, provenance="long context"),
    self_attention("h128-16384", B=1, S=16384, N=4, H=128, provenance="long context, every pair"),
]


def gate_workloads() -> tuple[Workload, ...]:
    """Returns all calls, at least 120 with their directions."""
    return (
        *in_dtypes("bf16", *_SHORT, *_MASKS),
        *in_dtypes("f32", *_SHORT, *_MASKS),
        *in_dtypes("bf16 f32", *map(_decoding, (1, 4, 16))),
        *in_dtypes("f32", *_TRAINING, *_SHAPES),
        *in_dtypes("bf16", *_TRAINING, *_SHAPES),
        *in_dtypes("bf16 f32", *_LONG),
        *in_dtypes("f16", *_SHORT[:2], *_MASKS[:2], *_TRAINING[:4], *_SHAPES[:2]),
    )
