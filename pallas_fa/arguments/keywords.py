"""The keyword arguments of attention: the one list of them, with their defaults.

`dot_product_attention`, the functions of `context_parallel`, `attention_fn` and `explain` all take `Arguments`. What
they mean is documented in `dot_product_attention`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, get_type_hints

from jax.typing import ArrayLike

from pallas_fa import scores
from pallas_fa.arguments.other_libraries import INSTEAD
from pallas_fa.arguments.settings import Precision
from pallas_fa.operands.layout import Layout
from pallas_fa.operands.pytree import as_flag, is_array


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
_FLAGS = tuple(name for name, default in _DEFAULTS.items() if default is False)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments: those `given`, and the defaults of the others.

    Raises:
      TypeError: an argument is not known, or a flag is no bool.
    """
    for name, value in given.items():
        if name not in _DEFAULTS:
            shown = f" of shape {tuple(value.shape)}" if is_array(value) else f"={value!r}"
            raise TypeError(f"{name}{shown} is not an argument{_instead_of(name)}")
    for name in _FLAGS:
        as_flag(name, given.get(name))
    return _DEFAULTS | {name: x for name, x in given.items() if x is not None}


def _instead_of(name):
    """What to write in place of an argument that is not known."""
    if name in INSTEAD:
        return f" here. {INSTEAD[name]}"
    import difflib

    near = difflib.get_close_matches(name, [*_DEFAULTS, "bias", "mask", "implementation", "return_residual"])
    return f"; known are {', '.join(_DEFAULTS)}. {f'Did you mean {" or ".join(near)}?' if near else 'Leave it out.'}"


def with_signature[F: Callable[..., Any]](fn: F, **defaults: Any) -> F:
    """Returns `fn`, whose `**arguments` are `Arguments`, with a signature that names each, for `help` and `inspect`.

    Type checkers read the source; here names and defaults say more without the types. `defaults`: those that differ.
    """
    own = inspect.signature(fn).parameters.values()
    named = [p.replace(annotation=p.empty) for p in own if p.kind is not p.VAR_KEYWORD]
    named += [
        inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=d) for x, d in (_DEFAULTS | defaults).items()
    ]
    fn.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return fn
