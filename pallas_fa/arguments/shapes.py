"""The shapes and dtypes of query, key and value, which must fit one another."""

from typing import Any

from pallas_fa.operands.dims import Dims
from pallas_fa.operands.layout import Layout, ordered
from pallas_fa.operands.pytree import has_8_bits


def check_dtypes(**arrays: Any) -> None:
    """Raises ValueError unless queries, keys and values, by name and in this order, have dtypes that fit one another."""
    q, k, v = (x.dtype for x in arrays.values())
    if k != v or not dtypes_fit(q, k):
        first, second, third = (f"{name}.dtype={x.dtype}" for name, x in arrays.items())
        raise ValueError(
            f"{first}, {second} and {third} differ: they must be one dtype, or keys and values both one of 8 bits, since"
            " nothing is converted silently. Convert them with `.astype`."
        )


def dtypes_fit(q: Any, kv: Any) -> bool:
    """Whether keys and values of the dtype `kv` fit queries of the dtype `q`: the same, or one of 8 bits for wider ones."""
    return q == kv or (has_8_bits(kv) and q.itemsize > 1)


def check_shapes(q: Any, k: Any, v: Any, layout: Layout) -> Dims:
    """Returns the sizes of query, key and value; raises unless their shapes and dtypes fit one another in `layout`."""
    shapes = f"query.shape={q.shape}, key.shape={k.shape}, value.shape={v.shape}"
    length, heads = (-3, -2) if layout == "BTNH" else (-2, -3)
    other = "BNTH" if layout == "BTNH" else "BTNH"
    q_dims, k_dims, v_dims = (
        ", ".join(ordered(layout, x)) for x in (("*B", "T", "N", "H"), ("*B", "S", "K", "H"), ("*B", "S", "K", "Hv"))
    )
    rule = f"the layout is query [{q_dims}], key [{k_dims}], value [{v_dims}]"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3:
            one_head = f"For one head, pass `{name}[{':, None' if heads == -2 else 'None'}]`."
            remedy = one_head if x.ndim == 2 else "Add the missing dims with jnp.expand_dims."
            raise ValueError(f"{name}.shape={x.shape} has too few dims: {rule}. {remedy}")
        if not all(isinstance(x.shape[axis], int) for axis in (heads, -1)):
            raise ValueError(
                f"{name}.shape={x.shape} has a symbolic number of heads or head dim; {rule}, of which only *B, T and S may"
                " be symbolic. Export with known heads and head dims."
            )
    check_dtypes(query=q, key=k, value=v)
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(f"the batch dims differ: {shapes}; {rule}. Broadcast them to one batch with jnp.broadcast_to.")
    if k.shape[length] != v.shape[length]:
        raise ValueError(f"key and value have different lengths S: {shapes}; {rule}. Give each key one value.")
    if k.shape[heads] != v.shape[heads]:
        raise ValueError(f"key and value have different numbers of heads K: {shapes}; {rule}. Repeat the fewer heads.")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"query and key have different head dims H: {shapes}; {rule}. Project them to one head dim.")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"a head dim is 0: {shapes}. Head dims must be at least 1.")
    N, K = q.shape[heads], k.shape[heads]
    if K == 0 or N % K:
        raise ValueError(
            f"query has N={N} heads and key has K={K}: N must be a multiple of K, since query head n reads key"
            f" head n // (N // K); {shapes}. If heads and length are swapped, pass layout={other!r} or transpose: {rule}."
        )
    return Dims(batch=tuple(q.shape[:-3]), T=q.shape[length], S=k.shape[length], N=N)
