"""The GPUs of this machine."""

from typing import Any

import jax


def of_platform(platform: str) -> list[Any]:
    """The devices of `platform`, such as "cuda"; none where JAX has no such platform here."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
