"""`normalise`: one call's arguments, checked, become a `Problem` (all that is static) and `Operands` (all arrays).

Every error that a caller can make in a call is raised here, or in the constructors of masks and scores; the rest of the
library may trust what it gets.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa import masks, scores
from pallas_fa.masks.base import all_of, parts_of
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_array, is_static_int, is_static_number
from pallas_fa.scores.base import chain


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static in one call; hashable. `mask` and `score` hold ShapeDtypeStructs in the places of arrays."""

    dims: Dims
    K: int
    H: int
    Hv: int
    dtype: np.dtype
    scale: float
    mask: masks.Mask | None
    score: scores.Score | None
    precision: Any = None
    deterministic_gradients: bool = False
    forward_mode: bool = False
    config: Any = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.dims.N // self.K

    @property
    def acc_dtype(self) -> np.dtype:
        """float64 for float64, float32 for everything else."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Operands(NamedTuple):
    """The arrays of one call, batch dims flattened: q [B,T,N,H], k [B,S,K,H], v [B,S,K,Hv], bound score and mask."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    score: scores.Score | None
    mask: masks.Mask | None


def normalise(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    logits_soft_cap=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    score=None,
    precision=None,
    deterministic_gradients=False,
    forward_mode=False,
    config=None,
    whole: Callable[[Dims], Dims] = lambda dims: dims,
) -> tuple[Problem, Operands]:
    """Checks the arguments of `dot_product_attention` and brings them to one form.

    Where q, k and v are a part of a problem, `whole` makes the sizes of all of it of theirs; masks and scores are bound
    to these.
    """
    q, k, v = (_float_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    dims = _check_shapes(q, k, v)
    flags = (
        ("is_causal", is_causal),
        ("deterministic_gradients", deterministic_gradients),
        ("forward_mode", forward_mode),
    )
    for name, flag in flags:
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name}={flag!r} must be True or False, known while tracing.")

    found = [
        _lengths(dims, query_seq_lengths, key_value_seq_lengths),
        masks.Causal() if is_causal else None,
        window_mask(local_window_size),
        segment_mask(dims, query_segment_ids, key_value_segment_ids),
        _mask(mask),
    ]
    bound_mask = bind_mask(all_of([m for m in found if m is not None]), whole(dims))

    static_scale, scale_score = _scale(scale, q.shape[-1])
    found = [scale_score, _bias(bias), _soft_cap(logits_soft_cap), _score(score)]
    bound_score = chain([x for x in found if x is not None])
    bound_score = bound_score and bound_score.bind(whole(dims))

    problem = Problem(
        dims=dims,
        K=k.shape[-2],
        H=q.shape[-1],
        Hv=v.shape[-1],
        dtype=np.dtype(q.dtype),
        scale=static_scale,
        mask=abstract(bound_mask),
        score=abstract(bound_score),
        precision=_precision(precision),
        deterministic_gradients=bool(deterministic_gradients),
        forward_mode=bool(forward_mode),
        config=config,
    )
    q, k, v = (x.reshape((dims.B, *x.shape[-3:])) for x in (q, k, v))
    return problem, Operands(q, k, v, bound_score, bound_mask)


def abstract(tree: Any) -> Any:
    """`tree` with ShapeDtypeStructs in the places of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _float_array(name, x):
    try:
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"{name} is a {type(x).__name__}; it must be a float array [*B, length, heads, head dim]."
        ) from e
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}.dtype={x.dtype} must be a float type. Convert it, e.g. with `.astype(jnp.bfloat16)`.")
    return x


def _check_shapes(q, k, v) -> Dims:
    shapes = f"query.shape={q.shape}, key.shape={k.shape}, value.shape={v.shape}"
    layout = "the layout is query [*B, T, N, H], key [*B, S, K, H], value [*B, S, K, Hv]"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3:
            raise ValueError(
                f"{name}.shape={x.shape} has too few dims: {layout}. Add the missing ones with `x[..., None]`."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"query.dtype={q.dtype}, key.dtype={k.dtype} and value.dtype={v.dtype} differ: they must be one dtype, since"
            " nothing is converted silently. Convert them with `.astype`."
        )
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"the batch dims differ: {shapes}; {layout}. Broadcast them to one batch with jnp.broadcast_to."
        )
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"key and value have different lengths S: {shapes}; {layout}. Give each key one value.")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"key and value have different numbers of heads K: {shapes}; {layout}. Repeat the fewer heads."
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"query and key have different head dims H: {shapes}; {layout}. Project them to one head dim.")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"a head dim is 0: {shapes}. Head dims must be at least 1.")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query has N={heads} heads and key has K={kv_heads}: N must be a multiple of K, since query head n reads key"
            f" head n // (N // K); {shapes}. If heads and length are swapped, transpose: {layout}."
        )
    return Dims(batch=tuple(q.shape[:-3]), T=q.shape[-3], S=k.shape[-3], N=heads)


def bind_mask(mask, dims) -> masks.Mask | None:
    """`mask` bound to one call."""
    if mask is None:
        return None
    # Lengths first: the alignment of a bottom-right Causal asks for them.
    given = all_of(parts_of(mask, masks.Lengths))
    return mask.bind(dims, lengths_of(given and given.bind(dims, masks.Lengths())))


def _scale(scale, head_dim):
    """(static scale, score that scales by a traced one or None)."""
    if scale is None:
        return head_dim**-0.5, None
    if is_static_number(scale):
        if not np.isfinite(scale):
            raise ValueError(f"scale={scale} must be finite. Leave it out for 1/sqrt(head dim) = {head_dim**-0.5:.4g}.")
        return float(scale), None
    if not is_array(scale) or scale.ndim != 0 or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"scale={scale!r} must be a float, a scalar float array, or None for 1/sqrt(head dim).")
    return 1.0, scores.Custom(_times, jnp.asarray(scale))


def _times(x, b, n, t, s, factor):
    return x * factor


def _bias(bias):
    if bias is None:
        return None
    if not is_array(bias):
        bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(
            f"bias.dtype={bias.dtype} must be a float type: a bias is added to the logits. Pass a bool array as `mask=`."
        )
    return scores.Bias(bias)


def _soft_cap(cap):
    if cap is None:
        return None
    if not is_static_number(cap):
        raise TypeError(f"logits_soft_cap={cap!r} must be a float > 0, or None. For a learned cap use scores.Custom.")
    if not (cap > 0 and np.isfinite(cap)):
        raise ValueError(f"logits_soft_cap={cap} must be positive and finite. Use None for no soft cap.")
    return scores.SoftCap(cap)


def _score(score):
    if score is None or isinstance(score, scores.Score):
        return score
    raise TypeError(
        f"score is a {type(score).__name__}; it must be a pallas_fa.scores.Score. Wrap a function fn(x, b, n, t, s) as"
        " scores.Custom(fn), an additive array as scores.Bias(array)."
    )


def _mask(mask):
    if mask is None or isinstance(mask, masks.Mask):
        return mask
    mask = mask if is_array(mask) else jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask.dtype={mask.dtype} must be bool (True: may attend). For a 0/1 mask pass `mask != 0`; pass an additive"
            " mask as `bias=`."
        )
    return masks.Dense(mask)


def window_mask(window) -> masks.Window | None:
    """`local_window_size`, checked."""
    if window is None:
        return None
    pair = (window, window) if is_static_number(window) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"local_window_size={window!r} must be an int, or a pair (left, right) of ints or None.")
    for side in pair:
        if side is not None and not is_static_int(side):
            raise TypeError(f"local_window_size={window!r} must hold ints (or None: no bound), got {side!r}.")
        if side is not None and side < 0:
            raise ValueError(f"local_window_size={window!r} must not be negative: 0 keeps the query's own position.")
    return masks.Window(*pair)


def segment_mask(dims, query_ids, key_ids) -> masks.Segments | None:
    """The segment ids, checked: int [*B, T] and [*B, S], both or neither."""
    if query_ids is None and key_ids is None:
        return None
    for name, ids in (("query_segment_ids", query_ids), ("key_value_segment_ids", key_ids)):
        if ids is None:
            raise ValueError(
                f"{name} is None but the other segment ids are given: both or neither. For self-attention pass the same"
                " array twice."
            )
    query_ids = _int_array("query_segment_ids", query_ids, (*dims.batch, dims.T), "[*B, T]")
    key_ids = _int_array("key_value_segment_ids", key_ids, (*dims.batch, dims.S), "[*B, S]")
    return masks.Segments(query_ids, key_ids)


def _lengths(dims, query_lengths, key_lengths):
    if query_lengths is None and key_lengths is None:
        return None
    pairs = (("query_seq_lengths", query_lengths), ("key_value_seq_lengths", key_lengths))
    return masks.Lengths(*(None if x is None else _int_array(name, x, dims.batch, "[*B]") for name, x in pairs))


def _int_array(name, x, shape, letters):
    x = x if is_array(x) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype={x.dtype} must be an integer type. Convert it with `.astype(jnp.int32)`.")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}.shape={tuple(x.shape)} must be {letters} = {tuple(shape)}. Use jnp.broadcast_to.")
    return x


def _precision(precision):
    named = (jax.lax.Precision, jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
    if precision is None or isinstance(precision, named):
        return precision
    try:
        if isinstance(precision, str):
            return jax.lax.Precision(precision)
        first, second = precision
        return jax.lax.Precision(first), jax.lax.Precision(second)
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"precision={precision!r} is not one of JAX's: None, 'default', 'high', 'highest', a jax.lax.Precision, a"
            " pair of them, or a jax.lax.DotAlgorithm(Preset)."
        ) from e
