"""PyTorch's FlashAttention-2, as a peer: `mma.sync` and `cp.async`, the instructions of `pallas_fa:mma`.

It runs beside JAX in one process, on the same arrays (DLPack), and is timed as JAX's programs are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.measure import Bound, Program
from benchmarks.workloads import Workload


class PytorchProgram(Program):
    """`scaled_dot_product_attention` with the FLASH_ATTENTION backend, for one workload and direction."""

    def _compile(self):
        if lacking := _lacks(self.workload):
            raise NotImplementedError(f"torch:flash has no {lacking}")
        if self.repeats > 1:
            raise NotImplementedError("torch:flash has no programs of several calls")
        self.run = dict(forward=_forward, fwdbwd=_both, backward=_backward)[self.direction]

    def bind(self, inputs: list[tuple[dict[str, Any], Any]]) -> Bound[Program]:
        """The call on input sets (arrays, d_out), as functions without arguments."""
        import torch  # pyright: ignore[reportMissingImports]

        # [B, N, T, H], not copied.
        of = lambda x: torch.from_dlpack(x).transpose(1, 2)
        attend, arguments = functools.partial(_attend, torch, self.workload.causal), []
        for arrays, d_out in inputs:
            tokens = [of(arrays[name]).detach().requires_grad_() for name in ("query", "key", "value")]
            residuals = (attend(*tokens),) if self.direction == "backward" else ()
            arguments.append((torch, attend, tokens, of(d_out), *residuals))
        return Bound(self, arguments)

    def results(self, outputs: Any) -> dict[str, Any]:
        """Outputs by name, as arrays of JAX."""
        return {name: jax.dlpack.from_dlpack(x.transpose(1, 2).contiguous()) for name, x in outputs.tensors.items()}


class _Results:
    """Tensors by name, which `jax.block_until_ready` waits for."""

    def __init__(self, torch, **tensors):
        self._torch, self.tensors = torch, {name: x.detach() for name, x in tensors.items()}

    def block_until_ready(self):
        self._torch.cuda.synchronize()


def _attend(torch, causal, *tokens):
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*tokens, is_causal=causal, enable_gqa=True)


def _forward(torch: Any, attend: Callable[..., Any], tokens: Any, d_out: Any) -> _Results:
    with torch.no_grad():
        return _Results(torch, out=attend(*tokens))


def _both(torch: Any, attend: Callable[..., Any], tokens: Any, d_out: Any) -> _Results:
    out = attend(*tokens)
    return _Results(torch, out=out, **_gradients(torch, out, tokens, d_out))


def _backward(torch: Any, attend: Callable[..., Any], tokens: Any, d_out: Any, out: Any) -> _Results:
    return _Results(torch, **_gradients(torch, out, tokens, d_out, retain_graph=True))


def _gradients(torch, out, tokens, d_out, **options):
    return dict(zip(("query", "key", "value"), torch.autograd.grad(out, tokens, d_out, **options), strict=True))


def _lacks(w: Workload) -> str | None:
    """The first thing of a workload that this peer lacks, or is not here for."""
    lacks = {
        "unequal head dims": w.H != w.Hv,
        "soft cap": w.soft_cap,
        "layouts": w.layout != "BTNH",
        "biases": w.bias or w.relative,
        "sinks": w.sinks,
        "masks but a causal one of a square": w.T != w.S or w.mask not in ("full", "causal"),
    }
    return next((name for name, lacking in lacks.items() if lacking), None)
