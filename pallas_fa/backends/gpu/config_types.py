"""The types of the fields of a config of tiles."""

import dataclasses
from typing import Any

_WORDS = {int: "an int", bool: "True or False", tuple: "a pair of ints"}


def check_types(config: Any) -> None:
    """Raises TypeError unless each field of a config has the type of its default: int, bool or a pair of ints."""
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if _types(value) != _types(default):
            raise TypeError(
                f"{field.name}={value!r} must be {_WORDS[type(default)]}. Leave it out for the default, {default!r}."
            )


def _types(x):
    return (type(x), *map(type, x)) if isinstance(x, tuple) else (type(x),)
