"""What is measured: this library's implementations and its peers, each as a function of one workload's arrays.

A name is `library:backend[+form]`: `pallas_fa:xla`, `pallas_fa:None` (the library chooses), `jax.nn:cudnn`,
`tokamax:mosaic`, `dew_flash_attn:fa3`, `cudnn:jax` (`cudnn.py`), `torch:flash` (`pytorch_flash.py`, which runs outside of
JAX). The form says how a peer is given the mask: without one, by the flags it has (causal, window) and a bool array for
what it has no flag for; `+dense`, all in one bool array; `+bias`, all in one additive array; for our own, `+intervals`, all
in one `masks.KeyIntervals`, as `masks.from_cu_seqlens` makes it, and `+blocks`, the mask as a block mask. Our own
`+deterministic` has gradients that are bitwise equal from run to run, and `+without` leaves out sinks, dropout and the soft
cap, and takes the same memory as an array of the usual layout: it is what the call with them is compared with.
`pallas_fa:mma+99KB` has the tiles for GPUs with less shared memory (`tiles_for_99_kb.py`).
"""

import dataclasses
import functools
import importlib.util
import operator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import cudnn, flash_attn3
from benchmarks.patterns import PATTERNS
from benchmarks.workloads import Workload

# Backends by library: those that `implementation=` of its function takes. Our own library is asked.
BACKENDS = {
    "pallas_fa": (),
    "jax.nn": ("None", "cudnn", "xla"),
    "einsum": ("xla",),  # what users write where jax.nn has no argument for it
    "tokamax": ("None", "mosaic", "triton", "cudnn", "xla", "xla_chunked"),
    "dew_flash_attn": ("fa3",),
    "cudnn": ("jax",),
    "torch": ("flash",),
}
# What takes workloads as they are: a function for each library.
_WITHOUT_FORMS = {"dew_flash_attn": flash_attn3.attend, "cudnn": cudnn.attend}
BY_HAND = ("tokamax", "dew_flash_attn", "torch")  # installed by hand
TOKENS = ("query", "key", "value")
MASK_FORMS = ("dense", "bias", "intervals")
FORMS = ("", *MASK_FORMS, "blocks", "deterministic", "without", "99KB")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a workload: `attend(workload, arrays, masks)`, with what `masks(workload)` returns."""

    library: str
    backend: str | None
    form: str
    config: Any = None  # tiles, of our kernels

    @property
    def name(self) -> str:
        return f"{self.library}:{self.backend}" + (f"+{self.form}" if self.form else "")

    def applies(self, workload: Workload) -> bool:
        """Whether this form says anything about `workload` that another form does not say already."""
        if self.form == "without":
            w = workload
            return w.sinks or w.dropout > 0 or w.layout != "BTNH" or w.soft_cap is not None
        masked = workload.causal or bool(workload.window or workload.documents or workload.pattern)
        return masked or self.form not in (*MASK_FORMS, "blocks")

    @property
    def computes_the_workload(self) -> bool:
        """Whether results can be compared with the truth: not `+without` a part of the call, nor with another's dropout."""
        return self.form != "without" and self.library != "cudnn"

    def masks(self, workload: Workload) -> dict[str, Any]:
        """The mask arrays that this implementation takes, or a mask that holds them; they get no gradients."""
        w = workload
        if self.library in _WITHOUT_FORMS:
            return {}
        if self.form == "intervals":
            if w.pattern:
                raise NotImplementedError("a pattern is no interval of keys for each query")
            from pallas_fa.masks import KeyIntervals

            return {
                "mask": KeyIntervals(*(jnp.broadcast_to(jnp.asarray(x, jnp.int32), (w.B, w.T)) for x in w.bounds()))
            }
        if self.form in MASK_FORMS:
            mask = w.dense()
            return {"mask": mask} if self.form == "dense" else {"bias": jnp.where(mask, 0, -1e30).astype(w.dtype)}
        if self.form == "blocks":
            from pallas_fa.masks import block_mask

            mask = _mask(w)
            return {} if mask is None else {"mask": block_mask(mask, w.T, w.S, batch=w.B)}
        if w.documents and self.library == "pallas_fa":
            return {"ids": w.ids()}
        if w.documents:
            return {"mask": w.dense(documents_only=True)}
        if w.dense_mask or (w.pattern and self.library != "pallas_fa"):
            return {"mask": w.dense()}
        return {"mask": w.dense(padding_only=True)} if w.padding is not None else {}

    def attend(self, workload: Workload, arrays: dict[str, Any], masks: dict[str, Any]) -> Any:
        """The output [B, T, N, Hv]. Raises what the library raises, and NotImplementedError for what it lacks."""
        w = workload
        if w.vmap:
            assert not masks
            one = dataclasses.replace(w, vmap=False, B=1)
            of_one = lambda arrays: self.attend(one, jax.tree.map(lambda x: x[None], arrays), {})[0]
            return jax.vmap(of_one)(arrays)
        if self.library == "einsum":
            return _einsum(w, arrays)
        if self.library in _WITHOUT_FORMS:
            return _WITHOUT_FORMS[self.library](w, arrays)
        keywords = self.keywords(w, arrays, masks)
        if w.layout == "BTNH" or self.form != "without":
            return _function(self.library)(**keywords, implementation=self.backend)
        tokens = {
            name: x.reshape(x.shape[0], x.shape[2], x.shape[1], -1) for name, x in arrays.items() if name in TOKENS
        }
        out = _function(self.library)(**keywords | tokens, implementation=self.backend)
        return out.reshape(w.out_shape().shape)

    def keywords(self, workload: Workload, arrays: dict[str, Any], masks: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the library's function, the implementation left out."""
        w = workload
        kwargs: dict[str, Any] = {name: arrays.get(name) for name in ("query", "key", "value", "bias")}
        kwargs |= {"mask": masks.get("mask")} | ({} if self.config is None else {"config": self.config})
        if "bias" in masks:
            if w.bias or w.relative:
                raise NotImplementedError("the workload's own bias takes the place of a mask given as bias")
            kwargs["bias"] = masks["bias"]
        if (w.sinks or w.layout != "BTNH") and self.library != "pallas_fa":
            raise NotImplementedError(f"{self.library} has no {'sinks' if w.sinks else 'layouts'}")
        if w.layout != "BTNH" and self.form != "without":
            kwargs["layout"] = w.layout
        if w.sinks and self.form != "without":
            kwargs["sinks"] = arrays["sinks"]
        if w.relative and self.library == "pallas_fa":
            from pallas_fa import scores

            kwargs["score"] = scores.RelativeBias(arrays["strip"])
        elif w.relative:
            kwargs["bias"] = arrays["strip"][None, :, w.diagonals()]
        if w.dropout and self.library != "pallas_fa":
            raise NotImplementedError(f"{self.library} has no dropout")
        if w.dropout and self.form != "without":
            kwargs |= {"dropout_rate": w.dropout, "dropout_key": w.dropout_key()}
        if self.form == "deterministic":
            kwargs["deterministic_gradients"] = True
        if w.pattern and self.library == "pallas_fa" and self.form in ("", "deterministic"):
            kwargs["mask"] = _mask(w)
        elif not w.pattern and not w.dense_mask and self.form not in (*MASK_FORMS, "blocks"):
            kwargs |= {"is_causal": w.causal, "local_window_size": w.window}
        if w.bias and not w.learned:
            kwargs["bias"] = jax.lax.stop_gradient(kwargs["bias"])
        if w.lengths is not None:
            lengths = jnp.asarray(w.real_keys(), jnp.int32)
            kwargs |= {"key_value_seq_lengths": lengths} | ({"query_seq_lengths": lengths} if w.T == w.S else {})
        if w.soft_cap and self.library == "jax.nn":
            raise NotImplementedError("jax.nn has no soft cap")
        if w.soft_cap and self.form != "without":
            kwargs["logits_soft_cap"] = w.soft_cap
        if "ids" in masks:
            kwargs |= {"query_segment_ids": masks["ids"], "key_value_segment_ids": masks["ids"]}
        if self.form == "99KB":
            from benchmarks import tiles_for_99_kb

            kwargs["config"] = tiles_for_99_kb.config(**kwargs)
        return kwargs


def _mask(w: Workload) -> Any:
    """All masks of a workload as one."""
    from pallas_fa import masks

    parts = [masks.Causal()] if w.causal else []
    parts += [masks.Window(*w.window)] if w.window else []
    parts += [masks.Custom(_PATTERNS[w.pattern])] if w.pattern else []
    parts += [masks.Segments(w.ids(), w.ids())] if w.documents else []
    parts += [masks.Dense(w.dense(padding_only=True))] if w.padding is not None else []
    return functools.reduce(operator.and_, parts) if parts else None


def _of_positions(pattern: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
    return pattern(t, s)


_PATTERNS = {name: functools.partial(_of_positions, pattern) for name, pattern in PATTERNS.items()}


def parse(name: str) -> Implementation:
    """The implementation called `name`."""
    library, _, rest = name.partition(":")
    backend, _, form = rest.partition("+")
    forms = FORMS if library == "pallas_fa" else ("",) if library in _WITHOUT_FORMS else ("", "dense", "bias")
    known = library in BACKENDS and form in forms
    if not known or not backend:
        raise ValueError(
            f"{name!r} is not library:backend[+form] with a library of {', '.join(BACKENDS)} and a form of"
            f" {', '.join(forms[1:]) or 'none'}. Write, for example, pallas_fa:xla or jax.nn:cudnn+dense."
        )
    if library == "pallas_fa":
        _check_ours(name, backend)
    elif backend not in BACKENDS[library]:
        raise ValueError(f"{name!r}: {backend!r} is not known. Of {library} are known {', '.join(BACKENDS[library])}.")
    return Implementation(library, None if backend == "None" else backend, form)


def available(name: str) -> Implementation:
    """The implementation called `name`, of a library that is installed here."""
    found = parse(name)
    if not installed(found.library):
        raise ValueError(f"{name!r}: {found.library} is not installed here. Install it, or name others.")
    return found


def installed(library: str) -> bool:
    return library not in BY_HAND or importlib.util.find_spec(library) is not None


def _check_ours(name: str, backend: str) -> None:
    """Raises ValueError, with the names that the library knows, where `backend` is none of them."""
    if backend == "None":
        return
    import pallas_fa

    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)
    try:
        pallas_fa.explain(x, x, x, implementation=backend)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def _einsum(w: Workload, arrays: dict[str, Any]) -> jax.Array:
    """Attention with a soft cap or another value head dim, as JAX users write it: the softmax in float32, heads alike."""
    others = dataclasses.replace(w, causal=False, soft_cap=None)
    if (not w.soft_cap and w.H == w.Hv) or others.mask != "full" or w.N != w.K:
        raise NotImplementedError("jax.nn has arguments for this call, or einsum lacks them")
    query, key, value = (arrays[name] for name in TOKENS)
    x = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * w.H**-0.5
    x = w.soft_cap * jnp.tanh(x / w.soft_cap) if w.soft_cap else x
    x = jnp.where(jnp.tri(w.T, w.S, dtype=bool), x, -jnp.inf) if w.causal else x
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x, axis=-1).astype(query.dtype), value)


def _function(library) -> Any:
    if library == "jax.nn":
        return jax.nn.dot_product_attention
    if library == "tokamax":
        import tokamax  # pyright: ignore[reportMissingImports]
        from absl import flags

        if not flags.FLAGS.is_parsed():
            flags.FLAGS(["benchmarks"])  # else Tokamax parses our command line and fails

        return tokamax.dot_product_attention
    import pallas_fa

    return pallas_fa.dot_product_attention
