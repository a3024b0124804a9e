"""Which problems the kernel for latent attention can do. Importing this imports no part of Pallas."""

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.support import why_not
from pallas_fa.backends.record import Support, no_gradients
from pallas_fa.problem import Problem

_H, _HV = 576, 512
_MULTIPLE = 8  # rows that TMA copies together


def supports(problem: Problem, gpu: Gpu) -> Support:
    """Returns what the kernel can do of `problem`, whose values are the first columns of its keys."""
    reason = _why_no_forward(problem, gpu)
    if reason:
        return Support.neither(reason)
    from pallas_fa.backends.hopper.mla.plan import MlaPlan

    splits = MlaPlan.of(problem, gpu).kv_splits
    remark = f"the keys are in {splits} parts" if splits > 1 else None
    no_backward = no_gradients(problem) or "its kernel for latent attention is for inference"
    return Support(None, no_backward, remark)


def _why_no_forward(problem, gpu):
    if (problem.H, problem.Hv) != (_H, _HV):
        return f"head dims H={problem.H} and Hv={problem.Hv} of latent attention; it takes {_H} and {_HV}"
    if reason := why_not(problem, _H):
        return reason
    if problem.scale <= 0:
        return f"scale={problem.scale} in latent attention; it takes factors above 0"
    for name, size in (("N", problem.dims.N), ("S", problem.dims.S)):
        if size % _MULTIPLE:
            return f"{name}={size} in latent attention; it takes multiples of {_MULTIPLE}"
    if gpu.compute_capability != "9.0":
        return f"a GPU of compute capability {gpu.compute_capability}; its kernels are for 9.0"
    if problem.pages is not None:
        from pallas_fa.backends.hopper import pages
        from pallas_fa.backends.hopper.mla.plan import KEYS

        return pages.why_not(problem.pages, KEYS)
    return None
