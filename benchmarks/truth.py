"""Float64 truth for a slice of a workload, written apart from the library (but for the bits of dropout), and the errors.

The slice is the last key head with its group of query heads, of the last batch entry; of every entry where there is a
bias or sinks, whose gradients are sums over them. All query rows are computed where that is affordable, which gives every
gradient; else a few rows, which give the output and dq.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.patterns import PATTERNS
from benchmarks.workloads import Workload
from pallas_fa.softmax.dropout import Dropout

_BLOCK = 2**22  # logits in flight
_ROWS = 64  # query rows that are checked where all of them would be too many


@dataclasses.dataclass(frozen=True)
class Truth:
    """Rows `rows` of a slice in float64.

    out and dq [b, rows, G, dim], dk and dv [b, S, dim], d_bias [rows, G, S], d_sinks [G]. Of all rows also d_strip
    [G, T + S - 1].
    """

    workload: Workload
    rows: np.ndarray
    values: dict[str, np.ndarray]

    def errors(self, results: dict[str, Any]) -> dict[str, dict[str, float]]:
        """For each result that the truth covers: largest and mean absolute error over the truth's largest and mean."""
        found = {}
        for name, want in self.values.items():
            if name not in results:
                continue
            have = np.asarray(_cut(self.workload, self.rows, name, results[name]), np.float64)
            error = np.abs(have - want)
            found[name] = {
                "max": float(error.max() / max(np.abs(want).max(), 1e-30)),
                "mean": float(error.mean() / max(np.abs(want).mean(), 1e-30)),
            }
        return found


def _entries(w: Workload) -> int:
    return w.B if w.bias or w.relative or w.sinks else 1


def _cut(w, rows, name, x):
    b, group = _entries(w), w.N // w.K
    if name in ("out", "query", "key", "value") and w.layout != "BTNH":
        x = jnp.swapaxes(x, 1, 2)
    if name in ("out", "query"):
        return x[-b:][:, rows, -group:]
    if name in ("key", "value"):
        return x[-b:, :, -1]
    if name in ("sinks", "strip"):
        return x[-group:]
    return jnp.swapaxes(jnp.broadcast_to(x, (1, w.N, w.T, w.S))[0, -group:][:, rows], 0, 1)


def truth(w: Workload, arrays: dict[str, Any], d_out: Any, affordable: int) -> Truth:
    """Truth of `w` at `arrays`; every row where the slice has at most `affordable` logits."""
    b, group = _entries(w), w.N // w.K
    whole = b * group * w.T * w.S <= affordable
    rows = np.arange(w.T) if whole else np.unique(np.linspace(0, w.T - 1, _ROWS).astype(int))
    per_block = max(1, min(len(rows), _BLOCK // (b * group * w.S)))
    starts = range(0, len(rows), per_block)
    q, do = (_cut(w, rows, "query", x) for x in (arrays["query"], d_out))
    k, v = (_cut(w, rows, name, arrays[name]) for name in ("key", "value"))
    bias = _cut(w, rows, "bias", arrays["bias"]) if w.bias else None
    sinks = _cut(w, rows, "sinks", arrays["sinks"]) if w.sinks else jnp.full(group, -jnp.inf)
    if w.relative:
        bias = jnp.swapaxes(_cut(w, rows, "strip", arrays["strip"])[:, w.diagonals(rows)], 0, 1)
    lo, hi = (np.broadcast_to(x, (w.B, w.T))[-b:, rows] for x in w.bounds())
    dropout = Dropout.of(jnp.asarray(w.dropout_key()), w.dropout, w.B, w.N, broadcast=False)
    seeds = None if dropout is None else tuple(x[-b:, -group:] for x in dropout.seeds)
    parts = []
    with jax.enable_x64(True):
        k, v = (jnp.asarray(x).astype(jnp.float64) for x in (k, v))
        for i in starts:
            cut = slice(i, i + per_block)
            bias_i = None if bias is None else jnp.moveaxis(bias[cut], 0, 1)
            t, kind = jnp.asarray(rows[cut]), (w.soft_cap, w.pattern)
            multipliers = _multipliers(dropout, seeds, rows[cut], w.S)
            part = _rows(kind, t, q[:, cut], k, v, do[:, cut], bias_i, sinks, lo[:, cut], hi[:, cut], multipliers)
            parts.append({name: np.asarray(x) for name, x in part.items()})
    values = {name: np.concatenate([p[name] for p in parts], 1) for name in ("out", "query")}
    if whole:
        summed = ("key", "value", "sinks") if w.sinks else ("key", "value")
        values |= {name: np.sum([p[name] for p in parts], axis=0) for name in summed}
    if w.bias:
        values["bias"] = np.concatenate([p["bias"] for p in parts])
    if w.relative and whole:
        d_bias, index = np.concatenate([p["bias"] for p in parts]), w.diagonals().ravel()
        values["strip"] = np.stack([np.bincount(index, d_bias[:, g].ravel()) for g in range(group)])
    return Truth(w, rows, values)


def _multipliers(dropout, seeds, rows, S):
    """What dropout multiplies probabilities by, [b, G, rows, S]; the bits are the library's, and tested there."""
    if dropout is None:
        return 1.0
    keeps = dataclasses.replace(dropout, seeds=seeds).keeps(
        jnp.asarray(rows, jnp.int32)[:, None], jnp.arange(S)[None, :]
    )
    return keeps * dropout.scale


@jax.jit(static_argnums=0)
def _rows(kind, t, q, k, v, d_out, bias, sinks, lo, hi, dropout):
    """Outputs and gradients of some rows of queries.

    Args:
      kind: (soft cap, pattern).
      t: [t], the rows; q [b, t, G, H], k [b, S, H], v [b, S, Hv], bias [G, t, S] or None, sinks [G], lo and hi [b, t];
        dropout [b, G, t, S] or 1, what probabilities are multiplied by.
    """
    soft_cap, pattern = kind
    q, d_out = (x.astype(jnp.float64) for x in (q, d_out))
    scale = q.shape[-1] ** -0.5
    x = scale * jnp.einsum("btgh,bsh->bgts", q, k)
    x = x if bias is None else x + bias.astype(jnp.float64)
    slope = jnp.ones_like(x)
    if soft_cap:
        capped = jnp.tanh(x / soft_cap)
        x, slope = soft_cap * capped, 1 - capped**2
    s = lax.broadcasted_iota(lo.dtype, (1, 1, 1, k.shape[1]), 3)
    ok = (lo[:, None, :, None] <= s) & (s < hi[:, None, :, None])
    ok = ok if pattern is None else ok & PATTERNS[pattern](t[None, None, :, None], s)
    sinks = jnp.broadcast_to(sinks.astype(jnp.float64)[:, None, None], (*x.shape[:-1], 1))
    # A row may have no key and no sink.
    with_sinks = jnp.append(jnp.where(ok, x, -jnp.inf), sinks, axis=-1)
    p = jnp.where(with_sinks > -jnp.inf, jax.nn.softmax(with_sinks, axis=-1, where=with_sinks > -jnp.inf), 0)
    p, p_sinks = p[..., :-1], p[..., -1]
    dp = jnp.einsum("btgh,bsh->bgts", d_out, v) * dropout
    delta = jnp.sum(p * dp, axis=-1)
    ds = p * (dp - delta[..., None]) * slope
    results = {
        "out": jnp.einsum("bgts,bsh->btgh", p * dropout, v),
        "query": scale * jnp.einsum("bgts,bsh->btgh", ds, k),
        "key": scale * jnp.einsum("bgts,btgh->bsh", ds, q),
        "value": jnp.einsum("bgts,btgh->bsh", p * dropout, d_out),
        "sinks": -jnp.sum(p_sinks * delta, axis=(0, 2)),
    }
    return results if bias is None else results | {"bias": jnp.swapaxes(ds.sum(axis=0), 0, 1)}
