"""The suite `hopper-models`: attention in the shapes of models that people run."""

from benchmarks.workloads import Workload, self_attention

GEMMA2 = {"B": 1, "S": 8192, "N": 16, "K": 8, "H": 256, "causal": True, "window": (4095, 0)}


def model_workloads() -> tuple[Workload, ...]:
    """Returns all calls; those shorter than a dispatch are chained inside one program."""
    return (
        self_attention("llama3-8b", B=2, S=8192, N=32, K=8, H=128, causal=True, provenance="Llama 3 8B"),
        Workload("deepseek-mla", 2, 4096, 4096, 16, 16, 192, 128, causal=True, provenance="DeepSeek V3, training"),
        self_attention("gemma2", **GEMMA2, soft_cap=50.0, provenance="Gemma 2 9B, its local layers"),
        self_attention("gemma2-uncapped", **GEMMA2, provenance="the same without the soft cap, to compare with"),
        self_attention(
            "gpt-oss", B=1, S=8192, N=64, K=8, H=64, causal=True, window=(127, 0), provenance="gpt-oss, a window of 128"
        ),
        self_attention("h96-causal-4096", B=2, S=4096, N=32, H=96, causal=True, provenance="Phi-3 mini"),
        self_attention("h80-causal-4096", B=2, S=4096, N=16, H=80, causal=True, provenance="H=80, as in ViT-H"),
        self_attention("vit-197", B=64, S=197, N=16, H=64, provenance="ViT-L, 224 x 224 pixels"),
        self_attention("vit-577", B=32, S=577, N=16, H=64, provenance="ViT-L, 384 x 384 pixels"),
        self_attention(
            "bert-512-lengths", B=32, S=512, N=16, H=64, lengths=0.44, provenance="BERT-large, 288 to 512 tokens"
        ),
        self_attention("sdxl-self-4096", B=8, S=4096, N=10, H=64, provenance="SDXL, image tokens"),
        Workload("sdxl-cross-77", 8, 4096, 77, 10, 10, 64, 64, provenance="SDXL, image tokens on text"),
        self_attention("flux-4608", B=1, S=4608, N=24, H=128, provenance="Flux, image and text tokens"),
        self_attention("whisper-1500", B=8, S=1500, N=20, H=64, provenance="Whisper large, encoder"),
        self_attention("t5-512-bias", B=16, S=512, N=16, H=64, bias="NTS", provenance="T5, a learned bias"),
        self_attention("short-64-causal", B=256, S=64, N=8, H=32, causal=True, provenance="a small language model"),
        self_attention("h128-causal-131072", B=1, S=131072, N=8, H=128, causal=True, provenance="a context of 128k"),
    )
