"""Named workloads: shapes, masks and scores, where they come from, and how much work each one is."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.patterns import PATTERNS
from pallas_fa.operands.layout import Layout, ordered

BACKWARD_FLOPS = 2.5  # five matmuls against the forward's two, as the FlashAttention papers count
FLOPS_FACTOR = {"forward": 1.0, "backward": BACKWARD_FLOPS, "fwdbwd": 1.0 + BACKWARD_FLOPS}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One attention problem. Letters as in `pallas_fa`: B batch, T queries, S keys, N query heads, K key heads, H, Hv.

    The masks let every query see one interval of keys, of which a pattern may leave out some.
    """

    name: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None  # (left, right), both ends included
    documents: int | None = None  # length of the packed documents, told apart by segment ids
    pattern: str | None = None  # one of `patterns.PATTERNS`
    dense_mask: bool = False  # causal and window are given as a bool array [1, 1, T, S]
    lengths: float | None = None  # T = S; up to this share of each sequence is padding, by sequence lengths
    padding: float | None = None  # a [B, 1, 1, S] mask; up to this share of the keys is padding (0: a mask of True)
    soft_cap: float | None = None
    sinks: bool = False  # one for each query head, with gradient
    layout: Layout = "BTNH"  # of query, key, value and output
    dropout: float = 0.0  # the rate; the key is that of `dropout_key`
    bias: str | None = None  # letters of the bias dims that are not 1: "NTS" is a bias [1, N, T, S]
    learned: bool = True  # whether the bias gets a gradient
    relative: bool = False  # a bias of s - t, from an array `strip` [N, T + S - 1] with gradient
    vmap: bool = False  # the call is of one sequence, under jax.vmap over the batch
    gradient: bool = True  # False: only its forward is of use
    timed: bool = True  # False: compiled for its memory only
    series: str = ""  # workloads of one series differ in S only: the lines of the plot
    provenance: str = ""

    @property
    def mask(self) -> str:
        """The masks and scores in words, such as 'causal window(1024,0)'."""
        words = ["causal"] if self.causal else []
        words += [f"window({self.window[0]},{self.window[1]})"] if self.window else []
        words += [f"documents({self.documents})"] if self.documents else []
        words += [self.pattern] if self.pattern else []
        words += [f"padding({self.padding:g})"] if self.padding is not None else []
        words += [f"lengths({self.lengths:g})"] if self.lengths is not None else []
        words += [f"soft_cap({self.soft_cap:g})"] if self.soft_cap else []
        words += [f"{'bias' if self.learned else 'fixed_bias'}({self.bias})"] if self.bias else []
        words += ["sinks"] if self.sinks else []
        words += ["relative_bias"] if self.relative else []
        words += ["dense_mask"] if self.dense_mask else []
        words += ["vmap"] if self.vmap else []
        words += [self.layout] if self.layout != "BTNH" else []
        words += [f"dropout({self.dropout:g})"] if self.dropout else []
        return " ".join(words) or "full"

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(lo, hi), each [B or 1, T]: query t of entry b may attend to the keys lo <= s < hi, but for the pattern."""
        t = np.arange(self.T)[None]
        lo, hi = np.zeros_like(t), np.full_like(t, self.S)
        if self.causal:
            hi = np.minimum(hi, t + 1)
        if self.window:
            lo, hi = np.maximum(lo, t - self.window[0]), np.minimum(hi, t + self.window[1] + 1)
        if self.documents:
            first = t // self.documents * self.documents
            lo, hi = np.maximum(lo, first), np.minimum(hi, first + self.documents)
        if self.padding is not None or self.lengths is not None:
            hi = np.minimum(hi, self.real_keys()[:, None])
        if self.lengths is not None:
            hi = np.where(t < self.real_keys()[:, None], hi, 0)
        return lo, hi

    def real_keys(self) -> np.ndarray:
        """[B]: how many keys are real, from (1 - padding) S to S."""
        share = self.padding if self.lengths is None else self.lengths
        return np.linspace((1 - (share or 0)) * self.S, self.S, self.B).round().astype(np.int64)

    def pairs(self) -> int:
        """Allowed (query, key) pairs of one head, summed over the batch."""
        lo, hi = self.bounds()
        each = (np.maximum(hi - lo, 0) if self.pattern is None else self._keys_of_pattern(lo, hi)).sum(axis=1)
        return int(each.sum()) if len(each) == self.B else int(each[0]) * self.B

    def _keys_of_pattern(self, lo, hi):
        """[B or 1, T]: keys that each query sees."""
        assert self.pattern
        s, fn = np.arange(self.S), PATTERNS[self.pattern]
        seen = lambda t: (fn(t, s) & (lo[:, t, None] <= s) & (s < hi[:, t, None])).sum(axis=-1)
        return np.stack([seen(t) for t in range(self.T)], axis=1)

    def flops(self, direction: str) -> float:
        """Floating-point operations, allowed pairs only: 2 (H + Hv) a pair and head forward."""
        return 2.0 * (self.H + self.Hv) * self.N * self.pairs() * FLOPS_FACTOR[direction]

    def bytes(self, direction: str) -> int:
        """Of the inputs and the output; three times as many with the gradients."""
        size = sum(x.size * x.dtype.itemsize for x in (*self.shapes().values(), self.out_shape()))
        return size if direction == "forward" else 3 * size

    def bias_shape(self) -> tuple[int, ...] | None:
        sizes = zip("BNTS", (self.B, self.N, self.T, self.S), strict=True)
        return tuple(n if c in self.bias else 1 for c, n in sizes) if self.bias else None

    def diagonals(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Which entry of `strip` belongs to each pair: int [T or rows, S]."""
        rows = np.arange(self.T) if rows is None else rows
        return np.arange(self.S) - rows[:, None] + self.T - 1

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What gets gradients: query, key, value and, where there are any, bias, strip and sinks."""
        shapes: dict[str, tuple[int, ...]] = {
            "query": ordered(self.layout, (self.B, self.T, self.N, self.H)),
            "key": ordered(self.layout, (self.B, self.S, self.K, self.H)),
            "value": ordered(self.layout, (self.B, self.S, self.K, self.Hv)),
        }
        if (bias := self.bias_shape()) is not None:
            shapes["bias"] = bias
        if self.relative:
            shapes["strip"] = self.N, self.T + self.S - 1
        arrays = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for name, shape in shapes.items()}
        return arrays | ({"sinks": jax.ShapeDtypeStruct((self.N,), jnp.dtype(jnp.float32))} if self.sinks else {})

    def dropout_key(self) -> np.ndarray:
        """A raw key."""
        return np.array([17, 42], np.uint32)

    def out_shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(ordered(self.layout, (self.B, self.T, self.N, self.Hv)), jnp.dtype(self.dtype))

    def inputs(self, seed: int = 0) -> tuple[dict[str, jax.Array], jax.Array]:
        """(random normal arrays of `shapes`, random normal cotangent of the output)."""
        return _normal(seed, self.shapes(), self.out_shape())

    def dense(self, *, padding_only: bool = False, documents_only: bool = False) -> jax.Array:
        """The mask as a bool array [B or 1, 1, T or 1, S]."""
        if padding_only:
            return jnp.asarray((np.arange(self.S) < self.real_keys()[:, None])[:, None, None, :])
        bare = dataclasses.replace(self, causal=False, window=None, padding=None) if documents_only else self
        lo, hi = (jnp.asarray(x[:, None, :, None], jnp.int32) for x in bare.bounds())
        return _between(lo, hi, self.S, bare.pattern)

    def ids(self) -> jax.Array:
        """Segment ids [B, S] (T = S) of the packed documents."""
        assert self.documents and self.T == self.S
        return jnp.broadcast_to(jnp.arange(self.S, dtype=jnp.int32) // self.documents, (self.B, self.S))


def _normal(seed, shapes, out_shape):
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    arrays = {name: _draw(k, like) for (name, like), k in zip(shapes.items(), keys[1:], strict=True)}
    return arrays, _draw(keys[0], out_shape)


@functools.partial(jax.jit, static_argnums=1)
def _draw(key, like):
    return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _between(lo, hi, size, pattern):
    s = jnp.arange(size)
    ok = (lo <= s) & (s < hi)
    return ok if pattern is None else ok & PATTERNS[pattern](jnp.arange(lo.shape[2])[:, None], s)


def self_attention(name: str, B: int, S: int, N: int, H: int, *, K: int | None = None, **rest: Any) -> Workload:
    """T = S and H = Hv; MHA unless K is given."""
    return Workload(name, B=B, T=S, S=S, N=N, K=K or N, H=H, Hv=H, **rest)


def _cpu() -> list[Workload]:
    f32: dict[str, Any] = {"dtype": "float32"}
    base: dict[str, Any] = {"B": 1, "N": 8, "H": 64, **f32}
    required = "project requirement: float32, B=1 N=8 H=64"
    return [
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
    ]


_PAPER = "FlashAttention papers: B*S = 16384, N*H = 2048"


def _hopper_table() -> list[Workload]:
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


def _hopper_masks() -> list[Workload]:
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


def _hopper_blocks() -> list[Workload]:
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


def _alphafold() -> list[Workload]:
    what = "AlphaFold-like: rows with a pair bias shared over 64 rows and a key mask"
    return [self_attention("alphafold-768", B=64, S=768, N=4, H=64, bias="NTS", padding=0.25, provenance=what)]


def _operands() -> list[Workload]:
    """What a call may bring; the same call `+without` it is the baseline."""
    return [
        self_attention(
            "gpt-oss-8192-sinks", B=1, S=8192, N=64, K=8, H=64, causal=True, window=(127, 0), sinks=True,
            provenance="gpt-oss: a window of 128 keys",
        ),
        self_attention("h128-causal-4096-sinks", B=4, S=4096, N=16, H=128, causal=True, sinks=True, provenance=_PAPER),
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


def _head_dims() -> list[Workload]:
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


def _relative() -> list[Workload]:
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


def _documents() -> list[Workload]:
    base: dict[str, Any] = {"B": 1, "S": 16384, "N": 16, "H": 128, "documents": 128}
    what = "many short documents in one row, as flash-attn's varlen functions take them"
    return [
        self_attention("documents-128-full", provenance=what, **base),
        self_attention("documents-128-causal", causal=True, provenance=what, **base),
    ]


@dataclasses.dataclass(frozen=True)
class Suite:
    """Workloads that are measured together, and what is measured on them by default."""

    workloads: tuple[Workload, ...]
    directions: tuple[str, ...]
    implementations: tuple[str, ...]
    baseline: str
    chained: bool = False  # programs repeat calls that are shorter than a dispatch
    gate: bool = False  # each default call is judged beside its peers: `gate.py`


_CPU = ("jax.nn:xla", "pallas_fa:xla", "pallas_fa:reference")
_GPU = ("jax.nn:cudnn", "jax.nn:xla", "tokamax:mosaic", "dew_flash_attn:fa3", "pallas_fa:mosaic_gpu", "pallas_fa:xla")
_GATE = ("jax.nn:xla", "jax.nn:None", "jax.nn:cudnn", "einsum:xla", "pallas_fa:None")
_FA3_AND_OURS = ("dew_flash_attn:fa3", "pallas_fa:mosaic_gpu")
_WITHOUT = ("pallas_fa:mosaic_gpu", "pallas_fa:mosaic_gpu+without")
_GPU_BLOCKS = ("pallas_fa:mosaic_gpu", "pallas_fa:mosaic_gpu+blocks")
_GPU_MASKS = (*_GPU, "jax.nn:cudnn+dense", "jax.nn:cudnn+bias", "tokamax:mosaic+dense")


@functools.cache
def suites() -> dict[str, Suite]:
    """All suites by name."""
    from benchmarks.float32_workloads import float32_workloads
    from benchmarks.gate_workloads import gate_workloads
    from benchmarks.model_workloads import model_workloads

    both = ("forward", "fwdbwd")
    return {
        "cpu": Suite(tuple(_cpu()), both, _CPU, "jax.nn:xla"),
        "hopper-forward": Suite(tuple(_hopper_table()), ("forward",), _GPU, "jax.nn:cudnn"),
        "hopper-backward": Suite(tuple(_hopper_table()), ("backward",), _GPU, "jax.nn:cudnn"),
        "hopper-forward-masks": Suite(tuple(_hopper_masks()), ("forward",), _GPU_MASKS, "jax.nn:cudnn"),
        "hopper-backward-masks": Suite(tuple(_hopper_masks()), ("backward",), _GPU_MASKS, "jax.nn:cudnn"),
        "operands": Suite(tuple(_operands()), both, (*_WITHOUT, "dew_flash_attn:fa3"), _WITHOUT[1]),
        "hopper-documents": Suite(
            tuple(_documents()),
            ("forward", "backward"),
            (*_GPU_MASKS, "pallas_fa:mosaic_gpu+intervals"),
            "jax.nn:cudnn+dense",
        ),
        "hopper-forward-blocks": Suite(tuple(_hopper_blocks()), ("forward",), _GPU_BLOCKS, "pallas_fa:mosaic_gpu"),
        "hopper-backward-blocks": Suite(tuple(_hopper_blocks()), ("backward",), _GPU_BLOCKS, "pallas_fa:mosaic_gpu"),
        "hopper-alphafold": Suite(tuple(_alphafold()), both, _GPU_MASKS, "jax.nn:cudnn"),
        "hopper-models": Suite(model_workloads(), both, ("jax.nn:cudnn", *_FA3_AND_OURS), "jax.nn:cudnn", chained=True),
        "hopper-relative": Suite(tuple(_relative()), ("forward", "backward"), _GPU, "jax.nn:cudnn"),
        "float32": Suite(
            float32_workloads(), both, ("jax.nn:xla", "pallas_fa:mosaic_gpu", "pallas_fa:xla"), "jax.nn:xla"
        ),
        "nowhere-slower": Suite(gate_workloads(), both, _GATE, "jax.nn:xla", chained=True, gate=True),
        "hopper-head-dims": Suite(tuple(_head_dims()), ("forward", "backward"), _GPU, "jax.nn:xla"),
    }
