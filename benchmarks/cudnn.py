"""cuDNN's dropout, as a peer: `jax.nn.dot_product_attention` has no argument for it, the function beneath it has.

Its seed is a constant of the program, and it draws its own bits: a result can't be compared with ours element by element.
"""

from typing import Any

from benchmarks.workloads import Workload


def attend(w: Workload, arrays: dict[str, Any]) -> Any:
    """The output [B, T, N, Hv] of a workload with dropout; NotImplementedError for what `jax.nn` has or this lacks."""
    if not w.dropout or w.mask not in (f"dropout({w.dropout:g})", f"causal dropout({w.dropout:g})") or w.T != w.S:
        raise NotImplementedError("cudnn:jax is here for dropout alone, with no mask or a causal one")
    # A peer, by the only way there is to call it.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention  # noqa: TID251

    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    mask = MaskType.CAUSAL if w.causal else MaskType.NO_MASK
    return dot_product_attention(query, key, value, scale=w.H**-0.5, mask_type=mask, dropout_rate=w.dropout)
