"""Which implementation runs a problem, and why the others do not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_fa import reference, xla
from pallas_fa.problem import Problem

NAMES = ("mosaic_gpu", "xla", "reference")
_DEFAULT = ("mosaic_gpu", "xla")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention: `forward(problem, q, k, v, score, mask) -> (out, lse)` and its `backward`."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def supports(name: str, problem: Problem) -> str | None:
    """None if implementation `name` can do `problem` on the platform it is made for, else the reason why not."""
    if name == "mosaic_gpu":
        return "its GPU kernels are not part of this version"
    return xla.supports(problem) if name == "xla" else None


def choose(problem: Problem, implementation: Any) -> Implementation:
    """The first of `implementation` (a name, a tuple of names, None for the default order) that can do `problem`.

    Raises NotImplementedError with every reason when none can.
    """
    names = _names(implementation)
    reasons = {name: supports(name, problem) for name in names}
    able = [name for name in names if reasons[name] is None]
    if not able:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(
            f"implementation={implementation!r} cannot do this call: {listed}. Use implementation=None to let the"
            " library choose."
        )
    return _IMPLEMENTATIONS[able[0]]


def explain_choice(problem: Problem, implementation: Any) -> str:
    """One line for each implementation: what it would do with `problem`."""
    names = _names(implementation)
    chosen = next((name for name in names if supports(name, problem) is None), None)
    lines = []
    for name in NAMES:
        reason = supports(name, problem)
        if name == chosen:
            verdict = "runs this call"
        elif reason is not None:
            verdict = f"cannot: {reason}"
        else:
            verdict = "could, but comes later in the order" if name in names else "could, but only when named"
        lines.append(f"{name}: {verdict}")
    return "\n".join(lines)


def _names(implementation) -> tuple[str, ...]:
    names = _DEFAULT if implementation is None else implementation
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"implementation={implementation!r} must be None, a name or a tuple of names of {NAMES}.")
    for name in names:
        if name not in NAMES:
            raise ValueError(
                f"implementation={implementation!r}: {name!r} is not known. Known are {', '.join(map(repr, NAMES))}, a"
                " tuple of them to be tried in order, or None for the default order."
            )
    return tuple(names)


def _reference_backward(problem, q, k, v, score, mask, out, lse, d_out, d_lse):
    raise AssertionError("the reference is differentiated by JAX")


_IMPLEMENTATIONS = {
    "xla": Implementation("xla", xla.forward, xla.backward),
    "reference": Implementation("reference", reference.attention, _reference_backward),
}
