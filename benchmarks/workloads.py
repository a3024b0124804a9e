"""A workload: the shapes, masks and scores of one call, where they come from, and how much work it is."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.patterns import PATTERNS
from pallas_fa.operands.layout import Layout, ordered

BACKWARD_FLOPS = 2.5  # five matmuls against the forward's two, as the FlashAttention papers count
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # and their names in those of workloads
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
    lengths: float | None = None  # up to this share of each sequence is padding, by lengths; of the keys where T != S
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
        if self.lengths is not None and self.T == self.S:
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
