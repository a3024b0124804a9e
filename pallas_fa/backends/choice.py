"""Chooses the backend that runs a problem, and explains why the others do not."""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from pallas_fa.backends import hopper, mma, reference, xla
from pallas_fa.backends.gpu.device import Gpu, cuda_devices, has_rocm
from pallas_fa.backends.record import Backend
from pallas_fa.masks import Causal
from pallas_fa.masks.base import parts_of
from pallas_fa.operands.pytree import is_static_int
from pallas_fa.problem import Problem


def backends() -> tuple[Backend, ...]:
    """Returns all backends, in the order in which `implementation=None` tries them."""
    return kernels_for(Gpu.visible()), mma.backend(Gpu.visible(), "mma"), xla.BACKEND, reference.BACKEND


def kernels_for(gpu: Gpu) -> Backend:
    """Returns the record named "mosaic_gpu": Hopper's kernels on compute capability 9.0, those by mma.sync elsewhere."""
    is_hopper = "9.0" in gpu.compute_capability.split(", ")
    by_mma = mma.backend(gpu, "mosaic_gpu")
    return hopper.backend(gpu, by_mma) if is_hopper else by_mma


_LET_CHOOSE = "Use implementation=None to let the library choose."


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backends that run one problem.

    Attributes:
      backend: runs the forward.
      gradients: runs the backward; None where the tiles that the call names can't, for the reason `no_gradients`.
      elsewhere: runs both on platforms for which these two do not lower; None to raise there.
    """

    backend: Backend
    elsewhere: Backend | None
    gradients: Backend | None
    no_gradients: str | None


def choose(problem: Problem, implementation: str | Sequence[str] | None) -> Choice:
    """Returns the first backend of `implementation` that supports `problem`.

    Args:
      problem: the problem.
      implementation: a name, a sequence of names to try in order, or None for the default order.

    Raises:
      NotImplementedError: no backend supports the problem; the message has every reason.
      ValueError, TypeError: `implementation` names no backend.
    """
    remembered = isinstance(implementation, (str, tuple, type(None)))  # a list can't be hashed
    return (_choose if remembered else _choose.__wrapped__)(problem, implementation, backends())


@functools.lru_cache(maxsize=256)
def _choose(problem, implementation, known) -> Choice:
    named = _named(problem, implementation, known)
    reasons = {backend.name: backend.supports(problem).forward for backend in named}
    able = [backend for backend in named if reasons[backend.name] is None]
    if not able:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        remedies = ["Leave config out." if problem.config is not None else "", _LET_CHOOSE if implementation else ""]
        raise NotImplementedError(
            f"implementation={implementation!r} cannot do this call: {listed}. {' '.join(filter(None, remedies))}".strip()
        )
    chosen = able[0]
    elsewhere = next((backend for backend in able[1:] if backend.platform is None), None)
    return Choice(chosen, elsewhere, *_gradients(problem, chosen, implementation, known))


def _gradients(problem, backend, implementation, known):
    """Returns (the backend that runs the backward, why it is not `backend`).

    It is `backend` where that supports the backward, unless nobody named it or its tiles and another is faster; else the
    first of the default order that does. Where the call names tiles for the backward, no other takes its place: None.
    """
    own, names_tiles = backend.supports(problem), getattr(problem.config, "backward", None) is not None
    reason = own.backward or (own.gradients_only_named if implementation is None and not names_tiles else None)
    if reason is None:
        return backend, None
    if names_tiles:
        return None, reason
    free = dataclasses.replace(problem, config=None)  # other tiles are of no concern to other backends
    others = (x for x in _named(free, None, known) if x != backend and x.supports(free).backward is None)
    return next(others, None), reason


def explain(problem: Problem, implementation: str | Sequence[str] | None) -> str:
    """Returns one line for each backend: whether it runs `problem`, and why not."""
    known = backends()
    named = _named(problem, implementation, known)
    able = [backend for backend in named if backend.supports(problem).forward is None]
    chosen, second, *_ = [*able, None, None]
    lines = []
    for backend in known:
        reason = backend.supports(problem).forward
        if backend == chosen:
            verdict = "runs this call" + _remark(problem, backend, implementation, known)
        elif reason is not None:
            verdict = f"cannot: {reason}"
        elif backend == second and chosen is not None and not _runs_here(chosen):
            here = f"runs this call on this machine's {jax.default_backend()}"
            verdict = "; ".join(filter(None, (here, backend.memory(problem))))
        elif backend in named:
            verdict = "could; comes later in the order"
        else:
            why = backend.supports(problem).only_named
            verdict = "could, but only when named" + (f": {why}" if why else "")
        lines.append(f"{backend.name}: {verdict}")
    if has_rocm() and chosen is not None and chosen.platform is not None:
        lines.append(
            "note: this machine's GPUs run ROCm, for which Pallas Mosaic GPU has no compiler: xla runs this call on them"
            " unless a kernel is named."
        )
    if problem.dims.T == 1 < problem.dims.S and any(map(_is_top_left, parts_of(problem.mask, Causal))):
        lines.append(
            "note: with one query, is_causal=True (Causal() aligned top-left) reads key 0 only. To read a cache of keys,"
            ' pass mask=masks.Causal(align="bottom_right") with key_value_seq_lengths, or no causal mask.'
        )
    return "\n".join(lines)


def _is_top_left(causal):
    return is_static_int(causal.offset) and causal.offset == 0


def _runs_here(backend):
    return backend.platform is None or bool(cuda_devices())


def _remark(problem, backend, implementation, known):
    where = "" if _runs_here(backend) else f" where it is lowered for a {backend.platform.upper()} GPU"
    support, (gradients, reason) = backend.supports(problem), _gradients(problem, backend, implementation, known)
    words = support.remark, backend.memory(problem), support.only_named
    where = "; ".join([where, *filter(None, words)])
    if backend.platform is None:
        return where
    if problem.forward_mode:
        return f"{where}; xla computes its gradients, because forward_mode=True"
    if gradients is None:
        return f"{where}; without gradients, because {reason}"
    return where + (f"; {gradients.name} computes its gradients, because {reason}" if reason else "")


def _named(problem, implementation, known) -> tuple[Backend, ...]:
    known = {backend.name: backend for backend in known}
    if implementation is None:
        return tuple(x for x in known.values() if x.by_default and x.supports(problem).only_named is None)
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"implementation={implementation!r} must be None, a name or a tuple of names of {tuple(known)}."
        )
    for name in names:
        if name not in known:
            raise ValueError(
                f"implementation={implementation!r}: {name!r} is not known. Known are {', '.join(map(repr, known))}, a"
                " tuple of them to be tried in order, or None for the default order."
            )
    return tuple(known[name] for name in names)
