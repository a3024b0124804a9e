"""A progress bar where there is someone to see it; machines that only measure need not have tqdm."""

import contextlib
from typing import Any, Protocol


class Bar(Protocol):
    def update(self, n: float = 1) -> Any: ...

    def set_postfix_str(self, s: str = "") -> Any: ...


class _NoBar:
    def update(self, n: float = 1) -> None:
        del n

    def set_postfix_str(self, s: str = "") -> None:
        del s


def bar(total: int, what: str) -> contextlib.AbstractContextManager[Bar]:
    """A bar of `total` steps, shown on a terminal."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return contextlib.nullcontext(_NoBar())
    return tqdm(total=total, desc=what, disable=None)
