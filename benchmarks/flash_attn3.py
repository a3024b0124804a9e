"""FlashAttention-3 inside JAX, as a peer: the wheel `dew-flash-attn-cu13`, installed by hand (docs/benchmarks.md)."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import Workload


def attend(w: Workload, arrays: dict[str, Any]) -> Any:
    """The output [B, T, N, Hv] of a workload; NotImplementedError for what it lacks. Documents are packed sequences."""
    lacks = {
        "unequal head dims": w.H != w.Hv,
        "causal mask aligned to the first key": w.causal and w.T != w.S,
        "patterns": w.pattern,
        "padding": w.padding is not None or w.lengths is not None,
        "masks as arrays": w.dense_mask,
        "soft cap": w.soft_cap,
        "layouts": w.layout != "BTNH",
        "dropout": w.dropout,
        "biases": w.bias or w.relative,
    }
    if found := [name for name, lacking in lacks.items() if lacking]:
        raise NotImplementedError(f"dew_flash_attn has no {found[0]}")
    from dew_flash_attn import flash_mha, flash_mha_varlen  # pyright: ignore[reportMissingImports]

    tokens = [arrays[name] for name in ("query", "key", "value")]
    options = {"is_causal": w.causal, "window_size": w.window or (-1, -1), "sinks": arrays.get("sinks")}
    if not w.documents:
        return flash_mha(*tokens, **options)
    in_a_row = np.append(np.arange(0, w.S, w.documents), w.S)
    starts = np.append((np.arange(w.B)[:, None] * w.S + in_a_row[:-1]).ravel(), w.B * w.S)
    packed = (x.reshape(-1, *x.shape[2:]) for x in tokens)
    out = flash_mha_varlen(*packed, jnp.asarray(starts, jnp.int32), w.documents, **options)
    return out.reshape(w.B, w.T, w.N, w.Hv)
