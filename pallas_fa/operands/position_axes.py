"""Along which axis of positions each axis of each value in a jaxpr lies: `labels_of_results`.

An axis is labelled by one of "BNTS" where its elements are those of the positions along that axis, "" where its size is
1, and `FREE` where it has nothing to do with positions: an axis of a closed-over array, or one that was stacked on.
`NotElementwiseError` is raised for an operation that mixes positions, or that isn't known not to.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

Labels = tuple[str, ...]
FREE = "*"

_NAMES = {"B": "the batch entries", "N": "the query heads", "T": "the queries", "S": "the keys"}
_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil"
    " clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2"
    " expm1 floor ge ge_to gt gt_to igamma igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt"
    " lt_to max min mul name ne neg nextafter not one_minus_square or pcast polygamma population_count pow pvary"
    " random_fold_in real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left"
    " shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor"
    " zeta".split()
)
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
_ALONG_AN_AXIS = {
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "rev": "dimensions",
    "sort": "dimension",
}
_REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)


class NotElementwiseError(Exception):
    """`args`: (which operation does what to positions, the name of that operation)."""


def inner_jaxpr(eqn: Any) -> Any:
    """The jaxpr that `eqn` calls (jit, custom_jvp, checkpoint and the like), or None."""
    name = _CALLS.get(eqn.primitive.name)
    return None if name is None else eqn.params[name]


def by_size(shape: Sequence[int], letters: dict[int, str]) -> Labels:
    """Labels of a value that is constant along axes as long as one of positions; `letters`: by their lengths."""
    return tuple("" if size == 1 else letters.get(size, FREE) for size in shape)


def of_constant(shape: Sequence[int]) -> Labels:
    """Labels of an array that has nothing to do with positions."""
    return by_size(shape, {})


def labels_of_results(jaxpr: Any, args: Iterable[Labels], letters: dict[int, str]) -> list[Any]:
    """Labels of the results of a closed `jaxpr` for arguments of these labels.

    In their place stands the error, for a result that is not elementwise: what no result needs may be anything.
    """
    values: dict[Any, Any] = {var: of_constant(var.aval.shape) for var in jaxpr.jaxpr.constvars}
    values.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    read = lambda x: of_constant(np.shape(x.val)) if isinstance(x, core.Literal) else values[x]
    for eqn in jaxpr.jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        try:
            outputs = _outputs(eqn, inputs if inner_jaxpr(eqn) is not None else without_errors(inputs), letters)
        except NotElementwiseError as e:
            outputs = [e] * len(eqn.outvars)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.jaxpr.outvars]


def without_errors(results: list[Any]) -> list[Labels]:
    """`results`; raises the first error that stands among them."""
    for x in results:
        if isinstance(x, NotElementwiseError):
            raise x
    return results


def _outputs(eqn, inputs, letters):
    name, params, shapes = eqn.primitive.name, eqn.params, [x.aval.shape for x in eqn.outvars]
    if (inner := inner_jaxpr(eqn)) is not None:
        return labels_of_results(inner, inputs, letters)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, inputs, letters)
    if name == "broadcast_in_dim":
        return [_broadcast(eqn, inputs[0], letters)]
    if name == "iota":
        labels = by_size(shapes[0], letters)
        return [_replaced(labels, params["dimension"], FREE if shapes[0][params["dimension"]] > 1 else "")]
    if not any(map(_has_positions, inputs)):
        return [of_constant(shape) for shape in shapes]
    if name == "optimization_barrier":
        return inputs
    if name in _ELEMENTWISE and not (name == "bitcast_convert_type" and eqn.invars[0].aval.shape != shapes[0]):
        return [_joined(name, inputs)] * len(shapes)
    if name in _ALONG_AN_AXIS:
        axes = params[_ALONG_AN_AXIS[name]]
        for labels in inputs:
            _check_free(name, labels, axes if isinstance(axes, tuple) else (axes,))
        return [_joined(name, inputs)] * len(shapes)
    if name in _REDUCTIONS:
        _check_free(name, inputs[0], params["axes"])
        return [tuple(x for axis, x in enumerate(inputs[0]) if axis not in params["axes"])]
    rule = _RULES.get(name)
    if rule is None:
        raise NotElementwiseError(f"it applies {name}, which is not known to be elementwise, to an argument", name)
    return [rule(eqn, *inputs)]


def _has_positions(labels):
    return any(x in _NAMES for x in labels)


def _replaced(labels, axis, label):
    return (*labels[:axis], label, *labels[axis + 1 :])


def _check_free(name, labels, axes):
    for axis in axes:
        if labels[axis] in _NAMES:
            raise NotElementwiseError(f"it applies {name} along {_NAMES[labels[axis]]}", name)


def _joined(name, inputs):
    """Labels of a value each of whose elements comes from those of `inputs` at its place."""
    joined = []
    for labels in zip(*(x for x in inputs if len(x)), strict=True):  # a scalar goes with any shape
        found = set(labels) - {""}
        if len(found) > 1:
            letter = min(found - {FREE})
            raise NotElementwiseError(
                f"its {name} lines {_NAMES[letter]} up with an axis of an array that is not an argument (it is closed over,"
                " or made inside)",
                "alignment",
            )
        joined.append(found.pop() if found else "")
    return tuple(joined)


# ---- operations that move elements ----------------------------------------------------------------------------------


def _broadcast(eqn, labels, letters):
    shape = eqn.outvars[0].aval.shape
    result = by_size(shape, letters)
    for axis, label in zip(eqn.params["broadcast_dimensions"], labels, strict=True):
        result = _replaced(result, axis, label) if label else result
    return result


def _reshape(eqn, labels):
    """Axes of size 1 may come and go."""
    shape = eqn.outvars[0].aval.shape
    carried = [(n, x) for n, x in zip(eqn.invars[0].aval.shape, labels, strict=True) if n != 1]
    if [n for n, _ in carried] != [n for n in shape if n != 1]:
        name = eqn.primitive.name
        raise NotElementwiseError(f"it applies {name} from {labels_text(labels)} to {len(shape)} axes", name)
    remaining = iter(carried)
    return tuple("" if n == 1 else next(remaining)[1] for n in shape)


def labels_text(labels: Labels) -> str:
    """Labels as they are shown in messages."""
    return "[" + ", ".join(x or "1" for x in labels) + "]"


def _transpose(eqn, labels):
    return tuple(labels[axis] for axis in eqn.params["permutation"])


def _cut(eqn, labels, *_):
    """slice, dynamic_slice: axes that stay whole, or free ones."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    _check_free(eqn.primitive.name, labels, cut)
    return tuple("" if size == 1 else label for size, label in zip(after, labels, strict=True))


def _pad(eqn, labels, _):
    padded = [axis for axis, config in enumerate(eqn.params["padding_config"]) if any(config)]
    _check_free("pad", labels, padded)
    return tuple(FREE if axis in padded else label for axis, label in enumerate(labels))


def _concatenate(eqn, *inputs):
    axis = eqn.params["dimension"]
    for labels in inputs:
        _check_free("concatenate", labels, (axis,))
    return _joined("concatenate", [_replaced(labels, axis, FREE) for labels in inputs])


def _stack(eqn, *inputs):
    joined, axis = _joined("stack", inputs), eqn.params["axis"]
    return (*joined[:axis], FREE if len(inputs) > 1 else "", *joined[axis:])


def _gather(eqn, operand, indices):
    """Of an array that has no positions, by indices that do."""
    if _has_positions(operand):
        raise NotElementwiseError("it indexes an argument (gather)", "gather")
    _check_free("gather", indices, (len(indices) - 1,))
    offsets, batch = eqn.params["dimension_numbers"].offset_dims, iter(indices[:-1])
    sizes = eqn.outvars[0].aval.shape
    return tuple((FREE if n > 1 else "") if axis in offsets else next(batch) for axis, n in enumerate(sizes))


def _dot_general(eqn, left, right):
    (left_sums, right_sums), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    _check_free("dot_general", left, left_sums)
    _check_free("dot_general", right, right_sums)
    batch = _joined("dot_general", [[left[i] for i in left_batch], [right[i] for i in right_batch]])
    rest = [x for i, x in enumerate(left) if i not in (*left_sums, *left_batch)]
    return (*batch, *rest, *(x for i, x in enumerate(right) if i not in (*right_sums, *right_batch)))


def _random_bits(eqn, keys):
    return keys + of_constant(eqn.outvars[0].aval.shape[len(keys) :])


_RULES = {
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "dynamic_slice": _cut,
    "gather": _gather,
    "pad": _pad,
    "random_bits": _random_bits,
    "random_unwrap": lambda eqn, keys: keys + of_constant(eqn.outvars[0].aval.shape[len(keys) :]),
    "random_wrap": lambda eqn, bits: bits[: eqn.outvars[0].aval.ndim],
    "reshape": _reshape,
    "slice": _cut,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}


# ---- control flow ---------------------------------------------------------------------------------------------------


def _cond(eqn, inputs, letters):
    branches = [without_errors(labels_of_results(branch, inputs[1:], letters)) for branch in eqn.params["branches"]]
    return [_joined("cond", results) for results in zip(*branches, strict=True)]


def _while(eqn, inputs, letters):
    params = eqn.params
    in_test, in_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = inputs[in_body:]
    without_errors(labels_of_results(params["cond_jaxpr"], [*inputs[:in_test], *carry], letters))
    results = without_errors(labels_of_results(params["body_jaxpr"], [*inputs[in_test:in_body], *carry], letters))
    return [_joined("while", pair) for pair in zip(carry, results, strict=True)]


def _scan(eqn, inputs, letters):
    body = eqn.params["jaxpr"]
    ranks = [x.aval.ndim for x in body.jaxpr.invars]
    for labels, rank in zip(inputs, ranks, strict=True):
        if len(labels) > rank:
            _check_free("scan", labels, (0,))
    slices = [x[len(x) - rank :] for x, rank in zip(inputs, ranks, strict=True)]
    results = without_errors(labels_of_results(body, slices, letters))
    stacked = [x.aval.ndim > len(labels) for x, labels in zip(eqn.outvars, results, strict=True)]
    carries = stacked.count(False)
    scanned = sum(len(labels) > rank for labels, rank in zip(inputs, ranks, strict=True))
    start = len(inputs) - scanned - carries
    carry = zip(inputs[start : start + carries], results[:carries], strict=True)
    steps = of_constant((eqn.params["length"],))
    return [*(_joined("scan", pair) for pair in carry), *(steps + labels for labels in results[carries:])]


_CONTROL_FLOW = {"cond": _cond, "while": _while, "scan": _scan}
