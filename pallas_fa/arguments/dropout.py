"""The rate and the key of dropout, each checked by itself."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.operands.pytree import is_array, is_static_number


def check_dropout_rate(rate: Any) -> float:
    """Returns `dropout_rate` as a float."""
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


def check_dropout_key(rate: float, key: Any) -> Any:
    """Returns `dropout_key` as uint32 [words]; errors name the rate."""
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
