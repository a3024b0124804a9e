"""The keyword arguments of attention: the one list of them, and the check of each by itself.

`dot_product_attention`, the functions of `context_parallel`, `attention_fn` and `explain` all take `Arguments`. What
they mean is documented in `dot_product_attention`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_fa import masks, scores
from pallas_fa.arguments_elsewhere import ELSEWHERE
from pallas_fa.masks.band import check_side
from pallas_fa.masks.segments import check_ids
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.layout import LAYOUTS, Layout
from pallas_fa.operands.pages import Paged
from pallas_fa.operands.pytree import as_flag, is_array, is_finite, is_float, is_static_number
from pallas_fa.scores.soft_cap import check_cap

Precision = str | jax.lax.Precision | tuple[Any, Any] | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset


class Arguments(TypedDict, total=False):
    """What a call may say beside query, key, value, bias and mask.

    Not given, flags are False, rates 0, the layout is "BTNH", all else is None.
    """

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None
    logits_soft_cap: float | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    score: scores.Score | None
    sinks: ArrayLike | None
    precision: Precision | None
    deterministic_gradients: bool
    forward_mode: bool
    dropout_rate: float
    layout: Layout
    dropout_key: ArrayLike | None
    broadcast_dropout: bool
    config: Any


_NOT_GIVEN = {bool: False, float: 0.0}
_DEFAULTS = {name: _NOT_GIVEN.get(kind) for name, kind in get_type_hints(Arguments).items()} | {"layout": "BTNH"}
FLAGS = tuple(name for name, default in _DEFAULTS.items() if default is False)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments: those `given`, and the defaults of the others.

    Raises:
      TypeError: an argument is not known, or a flag is no bool.
    """
    for name, value in given.items():
        if name not in _DEFAULTS:
            shown = f" of shape {tuple(value.shape)}" if is_array(value) else f"={value!r}"
            raise TypeError(f"{name}{shown} is not an argument{_instead_of(name)}")
    for name in FLAGS:
        as_flag(name, given.get(name))
    return _DEFAULTS | {name: x for name, x in given.items() if x is not None}


def _instead_of(name):
    """What to write in place of an argument that is not known."""
    if name in ELSEWHERE:
        return f" here. {ELSEWHERE[name]}"
    import difflib

    near = difflib.get_close_matches(name, [*_DEFAULTS, "bias", "mask", "implementation", "return_residual"])
    return f"; known are {', '.join(_DEFAULTS)}. {f'Did you mean {" or ".join(near)}?' if near else 'Leave it out.'}"


def refuse_forward_mode(given: Mapping[str, Any]) -> None:
    """Raises where forward mode is asked of a function that has reverse mode only."""
    if given.get("forward_mode"):
        raise NotImplementedError(
            "forward_mode=True: attention to a sharded sequence has reverse mode only. Use jax.vjp or jax.grad, or"
            " dot_product_attention on whole arrays."
        )


def dropout_rate(rate: Any) -> float:
    """`dropout_rate`, checked."""
    if not is_static_number(rate):
        raise TypeError(
            f"dropout_rate={rate!r} must be a Python float in [0, 1), since the program is compiled for it. Convert it with"
            " float(rate) outside of jax.jit, or name it in static_argnames."
        )
    if not 0 <= rate < 1:
        raise ValueError(
            f"dropout_rate={rate!r} must be in [0, 1): the share of weights set to 0. Use 0.0 for no dropout."
        )
    return float(rate)


def layout(layout: Any) -> Layout:
    """`layout`, checked."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout={layout!r} is not one of {', '.join(map(repr, LAYOUTS))}, the orders of the dims of query, key, value"
            " and output. Transpose other arrays; one of [*B, T, N * H] needs only a reshape to [*B, T, N, H]."
        )
    return layout


def dropout_key(rate: float, key: Any) -> Any:
    """`dropout_key`, checked, as uint32 [words]."""
    make = "Make one with jax.random.key(seed), or split or fold_in one that you have."
    if key is None:
        raise ValueError(
            f"dropout_rate={rate}, but dropout_key=None: dropout needs a JAX PRNG key. {make} Use dropout_rate=0.0 for no"
            " dropout. In a Flax module, attention_fn=pallas_fa.nn.attention_fn takes the module's key."
        )
    if not is_array(key):
        raise TypeError(f"dropout_key={key!r} is of type {type(key).__name__}; it must be a JAX PRNG key. {make}")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise TypeError(f"dropout_key.dtype={key.dtype} must be that of a JAX PRNG key, typed or raw (uint32). {make}")
    if (key.shape != ()) if is_typed else (key.shape not in ((2,), (4,))):
        raise ValueError(
            f"dropout_key.shape={tuple(key.shape)} must be that of one key: {'()' if is_typed else '(2,) or (4,)'}. Pass one"
            " of them, dropout_key[i]; a key for each entry of an axis is for jax.vmap over that axis."
        )
    return jax.random.key_data(key) if is_typed else jnp.asarray(key)


def with_signature[F: Callable[..., Any]](fn: F, **defaults: Any) -> F:
    """`fn`, whose `**arguments` are `Arguments`, with a signature that names each, for `help` and `inspect`.

    Type checkers read the source; here names and defaults say more without the types. `defaults`: those that differ.
    """
    own = inspect.signature(fn).parameters.values()
    named = [p.replace(annotation=p.empty) for p in own if p.kind is not p.VAR_KEYWORD]
    named += [
        inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=d) for x, d in (_DEFAULTS | defaults).items()
    ]
    fn.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return fn


def float_array(name: str, x: Any, dims: str = "[*B, length, heads, head dim]") -> Any:
    """`x` as an array, if it is of a float type; `dims` is what its dims are called."""
    x = array(name, x, f"a float array {dims}", "Pass an array of JAX or NumPy.")
    if not is_float(x.dtype):
        rule = "a float type with a sign" if jnp.issubdtype(x.dtype, jnp.floating) else "a float type"
        raise TypeError(f"{name}.dtype={x.dtype} must be {rule}. Convert it, e.g. with `.astype(jnp.bfloat16)`.")
    return x if isinstance(x, (jax.Array, Paged)) else jnp.asarray(x)


def scale(scale: Any, head_dim: int, dtype: Any) -> tuple[float, scores.Score | None]:
    """(static scale, score that scales logits of inputs of `dtype` by a traced one, or None)."""
    if scale is None:
        return head_dim**-0.5, None
    if is_static_number(scale):
        if not is_finite(scale, dtype):
            raise ValueError(
                f"scale={scale} must be finite in the dtype of logits, float32 (float64 for float64). Leave it out for"
                f" 1/sqrt(head dim) = {head_dim**-0.5:.4g}."
            )
        return float(scale), None
    rule = "must be a float, a scalar float or int array, or None for 1/sqrt(head dim)"
    if not is_array(scale):
        raise TypeError(f"scale={scale!r} {rule}. {'Pass 1.0 for no scale.' if isinstance(scale, bool) else _FLOAT}")
    if not is_float(scale.dtype) and not jnp.issubdtype(scale.dtype, jnp.integer):
        raise TypeError(f"scale={scale!r} {rule}. {_FLOAT}")
    if scale.ndim != 0:
        one = math.prod(scale.shape) == 1
        remedy = "Use scale.reshape(())." if one else "Pass scale=1.0, and multiply the query by it."
        raise TypeError(f"scale={scale!r} {rule}. {remedy}")
    if jnp.issubdtype(scale.dtype, jnp.integer):
        scale = jnp.asarray(scale).astype(np.promote_types(dtype, np.float32))  # as a Python int
    return 1.0, scores.Custom(_times, jnp.asarray(scale))


_FLOAT = "Convert it, e.g. with `float`, or an array with `.astype(jnp.float32)`."


def _times(x, b, n, t, s, factor):
    return x * factor


def bias(bias: Any) -> scores.Bias | None:
    """`bias` as a score."""
    if bias is None:
        return None
    x = array("bias", bias, "an array, broadcastable to [*B, N, T, S]")
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.float32)  # as in jax.nn, where it is added all the same
    if not is_float(x.dtype):
        raise TypeError(
            f"bias.dtype={x.dtype} must be a float type: a bias is added to the logits. Pass a bool array as `mask=`; to"
            " add it as 0 and 1, convert it with `.astype(jnp.float32)`."
        )
    return scores.Bias(x)


def array(name: str, x: Any, what: str, remedy: str = "Leave it out for none.") -> Any:
    """`x` as an array; what is none, but another kind of argument, is named. `what` says which array it must be."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name}={x!r} has no values; it must be {what}. Pass shapes alone to pallas_fa.explain, or to the call by"
            " jax.eval_shape."
        )
    if is_array(x):
        return x
    for kind, keyword in ((masks.Mask, "mask"), (scores.Score, "score")):
        if isinstance(x, kind) and keyword != name:
            raise TypeError(f"{name} is a {type(x).__name__}; it must be {what}. Pass it as `{keyword}=`.")
        if isinstance(x, type) and issubclass(x, kind):
            raise TypeError(f"{name} is the class {x.__name__}. Make one and pass it: `{keyword}={x.__name__}(...)`.")
    if callable(x):
        remedy = _OF_FUNCTIONS.get(name, remedy)
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as e:
        raise TypeError(f"{name}={x!r} is a {type(x).__name__}; it must be {what}. {remedy}") from e


_OF_FUNCTIONS = {
    "mask": "Wrap a function fn(b, n, t, s) as pallas_fa.masks.Custom(fn).",
    "bias": "Wrap a function fn(x, b, n, t, s) as pallas_fa.scores.Custom(fn), and pass it as `score=`.",
}


def soft_cap(cap: Any) -> scores.SoftCap | None:
    """`logits_soft_cap` as a score."""
    return None if cap is None else scores.SoftCap(check_cap("logits_soft_cap", cap, "Use None"))


def score(score: Any) -> scores.Score | None:
    """`score`, checked."""
    if score is None or isinstance(score, scores.Score):
        return score
    if isinstance(score, masks.Mask):
        raise TypeError(f"score is a {type(score).__name__}, a mask. Pass it as `mask=`.")
    if isinstance(score, type) and issubclass(score, scores.Score):
        raise TypeError(f"score is the class {score.__name__}. Make one and pass it: `score={score.__name__}(...)`.")
    raise TypeError(
        f"score is a {type(score).__name__}; it must be a pallas_fa.scores.Score. Wrap a function fn(x, b, n, t, s) as"
        " scores.Custom(fn), an additive array as scores.Bias(array)."
    )


def sinks(dims: Dims, sinks: Any) -> Any:
    """`sinks`, checked, as [B|1, N, 1, 1]."""
    if sinks is None:
        return None
    x = array("sinks", sinks, "a float array [N] or [*B, N]")
    if not is_float(x.dtype):
        raise TypeError(
            f"sinks.dtype={x.dtype} must be a float type: a sink is a logit. Convert it, e.g. with"
            " `.astype(jnp.float32)`."
        )
    shapes = (dims.N,), (*dims.batch, dims.N)
    if tuple(x.shape) not in shapes:
        as_many = [shape for shape in shapes if math.prod(shape) == math.prod(x.shape)]
        shared = f"broadcast_to(sinks, {shapes[0]}) for one sink that all heads share"
        raise ValueError(
            f"sinks.shape={tuple(x.shape)} must be [N] = {shapes[0]}, one logit for each query head, or [*B, N] ="
            f" {shapes[1]}. Use jnp.{f'reshape(sinks, {as_many[0]})' if as_many else shared}."
        )
    return jnp.reshape(x, (dims.B if x.ndim > 1 else 1, dims.N, 1, 1))


def mask_array(mask: Any, kind: str) -> Any:
    """`mask`, which is no `Mask`, as an array; `kind` says of which dtype it may be."""
    several = isinstance(mask, (list, tuple)) and any(isinstance(x, masks.Mask) for x in mask)
    remedy = "Combine masks by `&` or `|`." if several else "Leave it out for none."
    what = f"a {kind} array, broadcastable to [*B, N, T, S], or a pallas_fa.masks.Mask"
    return array("mask", mask, what, remedy)


def mask(mask: Any) -> masks.Mask | None:
    """`mask`, an array or a mask, as a mask."""
    if mask is None or isinstance(mask, masks.Mask):
        return mask
    x = mask_array(mask, "bool")
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"mask.dtype={x.dtype} must be bool (True: may attend). For a 0/1 mask pass `mask != 0`; pass an additive"
            " mask as `bias=`."
        )
    return masks.Dense(x)


def window_sides(window: Any) -> tuple[Any, Any]:
    """The two sides of `local_window_size`, each checked by itself."""
    if is_array(window) and window.shape == (2,):
        window = tuple(window)  # as in jax.nn, which unpacks it
    scalar = is_static_number(window) or (is_array(window) and not window.shape)
    pair = (window, window) if scalar else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"local_window_size={window!r} must be an int or an int scalar array, or a pair (left, right) of ints, int"
            " arrays ([], [*B] or [*B, N, 1, 1]) or None."
        )
    left, right = (check_side(f"local_window_size[{i}]", side) for i, side in enumerate(pair))
    return left, right


def window_mask(dims: Dims, window: Any, align: offsets.Align = "top_left") -> masks.Window | None:
    """`local_window_size`, checked; `align` as in `masks.Window`."""
    if window is None:
        return None
    sides = window_sides(window)
    for i, side in enumerate(sides):
        if is_array(side):
            offsets.per_sequence(f"local_window_size[{i}]", side, dims)  # an error here names the argument
    return masks.Window(*sides, align=align)


def segment_mask(dims: Dims, query_ids: Any, key_ids: Any) -> masks.Segments | None:
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
    check_ids(query_segment_ids=query_ids, key_value_segment_ids=key_ids)  # an error here names the arguments
    return masks.Segments(query_ids, key_ids)


def lengths_mask(dims: Dims, query_lengths: Any, key_lengths: Any) -> masks.Lengths | None:
    """The sequence lengths, checked: int [*B], each or none."""
    if query_lengths is None and key_lengths is None:
        return None
    # Without batch dims jax.nn takes lengths [1], having added one.
    unbatched = lambda x: x.reshape(()) if not dims.batch and x.shape == (1,) else x
    pairs = (("query_seq_lengths", query_lengths), ("key_value_seq_lengths", key_lengths))
    return masks.Lengths(
        *(None if x is None else _int_array(name, x, dims.batch, "[*B]", unbatched) for name, x in pairs)
    )


def _int_array(name, x, shape, letters, adapt=lambda x: x):
    x = adapt(offsets.int_array(name, x))
    have, shape = tuple(x.shape), tuple(shape)
    if have != shape:
        each = "batch entry" if letters == "[*B]" else "token"
        remedy = offsets.broadcast_remedy(have, shape, f"Pass one int for each {each}.")
        raise ValueError(f"{name}.shape={have} must be {letters} = {shape}. {remedy}")
    return x


def config(config: Any) -> Any:
    """`config`, checked so far as no implementation is known that takes it."""
    try:
        hash(config)
    except TypeError as e:
        raise TypeError(
            f"config={config!r} is a {type(config).__name__}; it must be a config of tiles, such as"
            " pallas_fa.mosaic_gpu.config.Config(forward=...), or None for the library's tables."
        ) from e
    return config


def precision(precision: Any, dtype: Any) -> Any:
    """`precision` as JAX takes it; of float32 inputs None is JAX's default, which says how exact their products are."""
    if precision is None and dtype == jnp.float32:
        precision = jax.config.jax_default_matmul_precision
    named = (jax.lax.Precision, jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
    if isinstance(precision, str):
        precision = jax.lax.DotAlgorithmPreset.__members__.get(precision, precision)
    if precision is jax.lax.DotAlgorithmPreset.DEFAULT:
        return jax.lax.Precision.DEFAULT  # it names no algorithm
    if precision is None or isinstance(precision, named):
        return precision
    try:
        if isinstance(precision, str):
            return jax.lax.Precision(precision)
        if not isinstance(precision, (tuple, list)):
            raise TypeError
        first, second = precision
        return jax.lax.Precision(first), jax.lax.Precision(second)
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"precision={precision!r} is not one of JAX's: None, 'default', 'high', 'highest', a jax.lax.Precision, a"
            " pair of them, or a jax.lax.DotAlgorithm(Preset) or its name."
        ) from e
