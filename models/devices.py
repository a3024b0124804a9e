"""Whether JAX can use the devices that it is told to."""

from __future__ import annotations

import jax

from models.errors import UsageError


def check_devices() -> None:
    """Starts JAX. Raises UsageError if it can't use what JAX_PLATFORMS names."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion, without words, if jaxlib is not built for it
        raise UsageError(
            f"JAX_PLATFORMS={jax.config.jax_platforms!r}: JAX can't use such devices here ({str(error) or 'not built in'}); "
            "unset it to use those that there are, or install JAX for them."
        ) from error
