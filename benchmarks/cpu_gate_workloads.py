"""The calls of the suite `nowhere-slower-cpu`: what users of `jax.nn` write on a laptop, the likely losers first."""

from benchmarks.gate_workloads import in_dtypes
from benchmarks.workloads import Workload, self_attention


def _decoding(name: str, T: int, S: int, *, B: int = 1, N: int = 8, K: int = 8, provenance: str) -> Workload:
    return Workload(name, B, T, S, N, K, 64, 64, gradient=False, provenance=provenance)


_DECODING = [
    _decoding("decode-1024", 1, 1024, B=8, provenance="a step against a cache"),
    Workload(
        "decode-1024-lengths", 8, 1, 1024, 8, 8, 64, 64, lengths=0.5, gradient=False, provenance="a cache, half to full"
    ),
    _decoding("decode-4096-gqa", 1, 4096, N=16, K=4, provenance="a step against a long cache"),
]
_SHORT = [
    self_attention("tiny-64-causal", B=8, S=64, N=4, H=32, causal=True, provenance="a character model"),
    self_attention("small-128-causal", B=8, S=128, N=4, H=32, causal=True, provenance="the GPT of models/"),
    self_attention("bert-128", B=8, S=128, N=12, H=64, provenance="BERT-base"),
    self_attention("bert-128-keys", B=8, S=128, N=12, H=64, padding=0.5, provenance="a bool mask [B, 1, 1, S]"),
    self_attention("bert-128-lengths", B=8, S=128, N=12, H=64, lengths=0.5, provenance="64 to 128 tokens"),
    self_attention("vit-197", B=4, S=197, N=12, H=64, provenance="ViT-B: 14 x 14 patches and the class"),
    self_attention("causal-256", B=8, S=256, N=8, H=64, causal=True, provenance="many short sequences"),
    self_attention("bias-256", B=4, S=256, N=8, H=64, bias="NTS", provenance="T5: a learned bias"),
    self_attention("gqa-128", B=8, S=128, N=8, K=2, H=64, causal=True, provenance="four query heads on a key head"),
    self_attention("vmap-128", B=8, S=128, N=8, H=64, causal=True, vmap=True, provenance="jax.vmap over sequences"),
]
_SHAPES = [
    Workload("cross-512-77", 2, 512, 77, 8, 8, 64, 64, provenance="image tokens on text"),
    Workload("cross-64-1500", 1, 64, 1500, 8, 8, 64, 64, provenance="Whisper's decoder on its encoder"),
    self_attention("full-512", B=2, S=512, N=8, H=64, provenance="B=2 N=8 H=64"),
    self_attention("fixed-bias-512", B=2, S=512, N=8, H=64, bias="NTS", learned=False, provenance="ALiBi as an array"),
    self_attention("softcap-512", B=2, S=512, N=8, H=64, causal=True, soft_cap=50.0, provenance="Gemma 2"),
    self_attention("h128-4096", B=1, S=4096, N=4, H=128, provenance="long context"),
]
_FLOAT32 = [
    self_attention("tiny-8-causal", B=2, S=8, N=4, H=32, causal=True, provenance="a unit test"),
    self_attention("small-64", B=32, S=64, N=8, H=64, provenance="ViT: 8 x 8 patches"),
    self_attention("dense-64", B=8, S=64, N=4, H=32, dense_mask=True, causal=True, provenance="a mask of Flax's"),
    self_attention("bias-64", B=8, S=64, N=8, H=64, bias="NTS", provenance="T5: a learned bias"),
    self_attention("h128-256", B=4, S=256, N=8, H=128, provenance="wide heads"),
    self_attention("odd-h-59", B=2, S=256, N=8, H=59, causal=True, provenance="no multiple of 8"),
    Workload("hv-48-64", 2, 256, 256, 8, 8, 48, 64, causal=True, provenance="values of another head dim"),
    self_attention("alphafold-256", B=16, S=256, N=4, H=32, bias="NTS", padding=0.25, provenance="pair bias, key mask"),
    self_attention("bert-512-keys", B=2, S=512, N=12, H=64, padding=0.5, provenance="a bool mask [B, 1, 1, S]"),
    self_attention("dense-1024", B=1, S=1024, N=8, H=64, dense_mask=True, causal=True, provenance="a mask [T, S]"),
    self_attention("window-1024", B=1, S=1024, N=8, H=64, causal=True, window=(127, 0), provenance="a sliding window"),
    self_attention("full-1024", B=1, S=1024, N=8, H=64, provenance="B=1 N=8 H=64"),
    self_attention("causal-2048", B=1, S=2048, N=8, H=64, causal=True, provenance="B=1 N=8 H=64"),
    _decoding("decode-128", 1, 128, provenance="a step against a short cache"),
    _decoding("decode-16-2048", 16, 2048, K=2, provenance="16 queries against a cache"),
]


def cpu_gate_workloads() -> tuple[Workload, ...]:
    """Returns all calls, in float32, and most in bfloat16, too."""
    return (*in_dtypes("bf16 f32", *_DECODING, *_SHORT, *_SHAPES), *in_dtypes("f32", *_FLOAT32))
