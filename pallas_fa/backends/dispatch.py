"""Which implementation runs a problem, and why the others do not."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_fa.backends import reference
from pallas_fa.backends.hopper import support
from pallas_fa.backends.xla import attention as xla
from pallas_fa.problem import Problem
from pallas_fa.scores.base import float_arrays, with_float_arrays

NAMES = ("mosaic_gpu", "xla", "reference")
_DEFAULT = ("mosaic_gpu", "xla")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention: `forward(problem, q, k, v, score, mask) -> (out, lse)` and its `backward`."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def supports(name: str, problem: Problem, dropout: bool = False) -> str | None:
    """None if implementation `name` can do `problem` on the platform it is made for, else the reason why not."""
    if dropout and name != "reference":
        return "it has no dropout yet (set dropout_rate=0, or let 'reference' do it with the T x S weights in memory)"
    if name == "mosaic_gpu":
        return support.supports(problem)
    if problem.config is not None:
        return f"it has no tiles to configure, but config={problem.config!r} was given"
    return None


def choose(problem: Problem, implementation: Any, dropout: bool = False) -> Implementation:
    """The first of `implementation` (a name, a tuple of names, None for the default order) that can do `problem`.

    Raises NotImplementedError with every reason when none can.
    """
    names = _names(implementation, dropout)
    reasons = {name: supports(name, problem, dropout) for name in names}
    able = [name for name in names if reasons[name] is None]
    if not able:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(
            f"implementation={implementation!r} cannot do this call: {listed}. Use implementation=None to let the"
            " library choose."
        )
    if able[0] != "mosaic_gpu":
        return _PORTABLE[able[0]]
    return _kernels(able[1] if len(able) > 1 else None)


def explain_choice(problem: Problem, implementation: Any, dropout: bool = False) -> str:
    """One line for each implementation: what it would do with `problem`."""
    names = _names(implementation, dropout)
    reasons = {name: supports(name, problem, dropout) for name in NAMES}
    chosen, second, *_ = [*(name for name in names if reasons[name] is None), None, None]
    lines = []
    for name, reason in reasons.items():
        if name == chosen:
            verdict = "runs this call" + _remark(name, problem, dropout)
        elif reason is not None:
            verdict = f"cannot: {reason}"
        elif name == second and chosen == "mosaic_gpu" and not support.cuda_devices():
            verdict = f"runs this call on this machine's {jax.default_backend()}"
        else:
            verdict = "could; comes later in the order" if name in names else "could, but only when named"
        lines.append(f"{name}: {verdict}")
    return "\n".join(lines)


def _remark(chosen, problem, dropout):
    if dropout:
        return ", dropout in plain jnp with the T x S weights in memory"
    if chosen != "mosaic_gpu":
        return ""
    from pallas_fa.backends.hopper.backward.backward import supports_backward

    reason = "forward_mode=True" if problem.forward_mode else supports_backward(problem)
    gradients = f"; xla computes its gradients, because {reason}" if reason else ""
    return gradients if support.cuda_devices() else f" where it is lowered for a CUDA GPU{gradients}"


def _names(implementation, dropout=False) -> tuple[str, ...]:
    default = (*_DEFAULT, "reference") if dropout else _DEFAULT
    names = default if implementation is None else implementation
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
    def forward(q, k, v, arrays):
        return reference.attention(problem, q, k, v, with_float_arrays(score, arrays), mask)

    return jax.vjp(forward, q, k, v, float_arrays(score))[1]((d_out, d_lse))


_PORTABLE = {
    "xla": Implementation("xla", xla.forward, xla.backward),
    "reference": Implementation("reference", reference.attention, _reference_backward),
}


@functools.cache
def _kernels(elsewhere: str | None) -> Implementation:
    """The GPU kernels where the program is lowered for CUDA; implementation `elsewhere`, or an error, on other platforms."""
    from pallas_fa.backends import platforms
    from pallas_fa.sharding import partitioned

    other = _PORTABLE[elsewhere] if elsewhere else None

    def forward(problem, *operands):
        from pallas_fa.backends.hopper.forward.forward import forward as kernel

        fallback = other and functools.partial(other.forward, problem)
        return platforms.cuda_only(functools.partial(partitioned.forward(kernel), problem), fallback)(*operands)

    def backward(problem, *operands):
        from pallas_fa.backends.hopper.backward.backward import backward as kernel
        from pallas_fa.backends.hopper.backward.backward import supports_backward

        if supports_backward(problem) is not None:
            return xla.backward(problem, *operands)
        fallback = other and functools.partial(other.backward, problem)
        return platforms.cuda_only(functools.partial(partitioned.backward(kernel), problem), fallback)(*operands)

    return Implementation("mosaic_gpu", forward, backward)
