"""The layout, precision, config and mode of a call, each checked by itself: what a program is compiled for."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.operands.layout import LAYOUTS, Layout
from pallas_fa.operands.pytree import is_one_of

Precision = str | jax.lax.Precision | tuple[Any, Any] | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset


def check_layout(layout: Any) -> Layout:
    """Returns `layout`; raises unless it is a `Layout`."""
    if not is_one_of(layout, LAYOUTS):
        raise ValueError(
            f"layout={layout!r} is not one of {', '.join(map(repr, LAYOUTS))}, the orders of the dims of query, key, value"
            " and output. Transpose other arrays; one of [*B, T, N * H] needs only a reshape to [*B, T, N, H]."
        )
    return layout


def check_precision(precision: Any, dtype: Any) -> Any:
    """Returns `precision` as JAX takes it; for float32 inputs, None is JAX's default precision of products."""
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


def check_config(config: Any) -> Any:
    """Returns `config`, checked as far as it can be before an implementation is chosen."""
    try:
        hash(config)
    except TypeError as e:
        raise TypeError(
            f"config={config!r} is a {type(config).__name__}; it must be a config of tiles, such as"
            " pallas_fa.mosaic_gpu.config.Config(forward=...), or None for the library's tables."
        ) from e
    return config


def refuse_forward_mode(given: Mapping[str, Any]) -> None:
    """Raises where forward mode is asked of a function that has reverse mode only."""
    if given.get("forward_mode"):
        raise NotImplementedError(
            "forward_mode=True: attention to a sharded sequence has reverse mode only. Use jax.vjp or jax.grad, or"
            " dot_product_attention on whole arrays."
        )
