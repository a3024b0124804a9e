"""`normalise`: one call's arguments, checked, become a `Problem` (all that is static) and `Operands` (all arrays).

Every error that a caller can make in a call is raised here, in `arguments`, or in the constructors of masks and scores;
the rest of the library may trust what it gets.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from pallas_fa import masks, scores
from pallas_fa.arguments.arrays import float_array, refuse_shapes
from pallas_fa.arguments.dropout import check_dropout_key, check_dropout_rate
from pallas_fa.arguments.keywords import Arguments, complete
from pallas_fa.arguments.masks import as_mask, lengths_mask, segment_mask, window_mask
from pallas_fa.arguments.scores import bias_score, check_score, soft_cap_score, split_scale
from pallas_fa.arguments.settings import check_config, check_layout, check_precision
from pallas_fa.arguments.shapes import check_shapes
from pallas_fa.arguments.sinks import sink_logits
from pallas_fa.masks.base import all_of
from pallas_fa.masks.lengths import bind, lengths_of
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.layout import Layout, ordered, transpose
from pallas_fa.operands.pages import Paged
from pallas_fa.scores.base import chain, fixed, fixed_as, float_arrays, float_leaves, free, with_float_arrays
from pallas_fa.softmax.dropout import Dropout


class Operands(NamedTuple):
    """The arrays of one call, batch dims flattened: q [B,T,N,H], k [B,S,K,H], v [B,S,K,Hv], bound score and mask.

    q, k and v, like out and their gradients, have their dims in the order of the problem's layout; lse is always [B,T,N].
    k and v may both be `Paged`, in the layout "BTNH". Beside q, k and v all arrays are [B|1, N|1, T|1, S|1], or
    [B|1, N|1, T + S - 1] where they span the diagonals; sinks are [B|1, N, 1, 1]. Those of the mask and of dropout have no
    gradient.
    """

    q: Any
    k: Any
    v: Any
    score: scores.Score | None = None
    mask: masks.Mask | None = None
    sinks: Any = None
    dropout: Dropout | None = None

    @property
    def differentiable(self) -> tuple[Any, ...]:
        """The arrays that get gradients: q, k, v, float arrays of the score but fixed ones, and sinks if there are any."""
        sinks = () if self.sinks is None else (self.sinks,)
        return self.q, self.k, self.v, *float_arrays(self.score), *sinks

    def with_differentiable(self, arrays: Iterable[Any]) -> "Operands":
        """These operands with others in the places of `differentiable`."""
        q, k, v, *rest = arrays
        sinks = None if self.sinks is None else rest.pop()
        return self._replace(q=q, k=k, v=v, score=with_float_arrays(self.score, rest), sinks=sinks)

    def fixed(self, perturbed: "Operands") -> "Operands":
        """These operands, with no gradients of those arrays of the score for which `perturbed` has False."""
        is_perturbed = jax.tree.leaves(perturbed.score)
        numbers = (number for number, leaf in enumerate(float_leaves(self.score)) if not is_perturbed[leaf])
        return self._replace(score=fixed(self.score, numbers))

    def fixed_as(self, other: "Operands") -> "Operands":
        """These operands, with no gradients of those arrays of the score of which `other`, of the same score, has none."""
        return self._replace(score=fixed_as(self.score, other.score))

    def free(self) -> "Operands":
        """These operands, with gradients of all float arrays of the score."""
        return self._replace(score=free(self.score))

    def cotangent(self, gradients: Iterable[Any]) -> "Operands":
        """The cotangent of these operands, as JAX wants it, from the gradients of `differentiable`."""
        q, k, v, *rest = gradients
        sinks = None if self.sinks is None else rest.pop()
        leaves, structure = jax.tree.flatten(self.score)
        cotangents: list[Any] = [None] * len(leaves)  # which JAX takes for zeros of any type, and of symbolic sizes
        for i, x in zip(float_leaves(self.score), rest, strict=True):
            cotangents[i] = x
        score = jax.tree.unflatten(structure, cotangents)
        return Operands(q, k, v, score, sinks=sinks)


class Residuals(NamedTuple):
    """What the backward keeps of the forward: its operands and results, out [B,T,N,Hv] and lse [B,T,N]."""

    operands: Operands
    out: Any
    lse: Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static in one call; hashable. ShapeDtypeStructs are in the places of the arrays of `Operands`."""

    dims: Dims
    K: int
    H: int
    Hv: int
    dtype: np.dtype
    kv_dtype: np.dtype  # of keys and values: `dtype`, or one of 8 bits
    scale: float
    mask: masks.Mask | None
    score: scores.Score | None
    sinks: Any = None
    dropout: Dropout | None = None
    pages: Paged | None = None  # of the keys, where they are in pages
    values_in_keys: bool = False  # the values are the first columns of the keys, as in latent attention
    precision: Any = None
    deterministic_gradients: bool = False
    forward_mode: bool = False
    part_of_keys: bool = False  # whether a backward's out and lse are those of more keys than it gets
    layout: Layout = "BTNH"
    config: Any = None

    @classmethod
    def of(cls, operands: Operands, batch: tuple[int, ...], *, layout: Layout = "BTNH", **static: Any) -> "Problem":
        """The problem of `operands`, whose batch dims were `batch`; `static` is what no array tells."""
        _, T, N, H = ordered(layout, operands.q.shape)
        _, S, K, Hv = ordered(layout, operands.v.shape)
        dims, dtype, kv_dtype = Dims(batch, T, S, N), np.dtype(operands.q.dtype), np.dtype(operands.k.dtype)
        names = ("mask", "score", "sinks", "dropout")
        arrays = {x: _abstract(getattr(operands, x)) for x in names}
        arrays["pages"] = _abstract(operands.k) if isinstance(operands.k, Paged) else None
        return cls(dims, K, H, Hv, dtype, kv_dtype, layout=layout, **arrays, **static)

    def with_operands(self, operands: Operands) -> "Problem":
        """The same question about other operands: a part of the arrays, or another mask."""
        B = operands.q.shape[0]
        described = ("dims", "K", "H", "Hv", "dtype", "kv_dtype", "mask", "score", "sinks", "dropout", "pages")
        static = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in described}
        return Problem.of(operands, self.dims.batch if self.dims.B == B else (B,), **static)

    def in_btnh(self, operands: Operands) -> tuple["Problem", Operands]:
        """This problem and its operands in the layout "BTNH"."""
        if self.layout == "BTNH":
            return self, operands
        q, k, v = (transpose(self.layout, x) for x in (operands.q, operands.k, operands.v))
        return dataclasses.replace(self, layout="BTNH"), operands._replace(q=q, k=k, v=v)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.dims.N // self.K

    @property
    def has_narrow_keys(self) -> bool:
        """Whether keys and values have 8 bits and queries more, as those of a cache may."""
        return self.kv_dtype != self.dtype

    @property
    def acc_dtype(self) -> np.dtype:
        """float64 for float64, float32 for everything else."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


def normalise(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    whole: Callable[[Dims], Dims] = lambda dims: dims,
    **arguments: Unpack[Arguments],
) -> tuple[Problem, Operands]:
    """Checks the arguments of `dot_product_attention` and brings them to one form.

    Where q, k and v are a part of a problem, `whole` makes the sizes of all of it of theirs; masks and scores are bound
    to these.
    """
    given = complete(arguments)
    refuse_shapes(mask=mask, **arguments)
    q, k, v = (float_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    layout = check_layout(given["layout"])
    dims = check_shapes(q, k, v, layout)
    if given["forward_mode"] and k.dtype != q.dtype:
        raise ValueError(
            f"forward_mode=True cannot be given with query.dtype={q.dtype} and key.dtype={k.dtype}: keys of 8 bits are for"
            " inference. Leave it out, or convert them with `.astype`."
        )
    found = [
        lengths_mask(dims, given["query_seq_lengths"], given["key_value_seq_lengths"]),
        masks.Causal() if given["is_causal"] else None,
        window_mask(whole(dims), given["local_window_size"]),
        segment_mask(dims, given["query_segment_ids"], given["key_value_segment_ids"]),
        as_mask(mask),
    ]
    bound_mask = bind(all_of([m for m in found if m is not None]), whole(dims))

    scale, scale_score = split_scale(given["scale"], q.shape[-1], q.dtype)
    found = [scale_score, bias_score(bias), soft_cap_score(given["logits_soft_cap"]), check_score(given["score"])]
    bound_score = chain([x for x in found if x is not None])
    if bound_score is not None:
        bound_score = bound_score.bind(whole(dims), lengths_of(bound_mask))

    if len(dims.batch) != 1:
        q, k, v = (x.reshape((dims.B, *x.shape[-3:])) for x in (q, k, v))
    sinks = sink_logits(whole(dims), given["sinks"])
    operands = Operands(q, k, v, bound_score, bound_mask, sinks, _dropout(whole(dims), given))
    problem = Problem.of(
        operands,
        dims.batch,
        scale=scale,
        precision=check_precision(given["precision"], q.dtype),
        deterministic_gradients=bool(given["deterministic_gradients"]),
        forward_mode=bool(given["forward_mode"]),
        layout=layout,
        config=check_config(given["config"]),
    )
    return problem, operands


def _dropout(dims: Dims, given: dict[str, Any]) -> Dropout | None:
    rate = check_dropout_rate(given["dropout_rate"])
    if rate == 0:
        return None
    return Dropout.of(check_dropout_key(rate, given["dropout_key"]), rate, dims.B, dims.N, given["broadcast_dropout"])


def _abstract(tree: Any) -> Any:
    """`tree` with ShapeDtypeStructs in the places of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
