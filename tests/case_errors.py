"""Bad calls, the error that each raises, and what its message says: the argument, its value, the rule and the remedy."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa import masks, scores

B, T, S, N, K, H = 2, 5, 6, 4, 2, 8


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


GOOD = {"query": shape(B, T, N, H), "key": shape(B, S, K, H), "value": shape(B, S, K, H)}


def ints(*dims):
    return shape(*dims, dtype=jnp.int32)


def bools(*dims):
    return shape(*dims, dtype=jnp.bool_)


class OtherArray:
    """An array of a library that JAX does not know, which describes itself as NumPy's do."""

    shape, ndim, dtype = (B,), 1, np.dtype(np.float32)


# name: (arguments, error, what the message says: the argument, its value, the rule, the remedy)
BAD = {
    # shapes of query, key, value
    "heads not a multiple": (
        {"query": shape(B, T, 5, H)},
        ValueError,
        ("query", "key", "N=5", "K=2", "multiple", "(2, 5, 5, 8)", "transpose"),
    ),
    "fewer query heads than key heads": (
        {"query": shape(B, T, 1, H)},
        ValueError,
        ("N=1", "K=2", "multiple", "n // (N // K)"),
    ),
    "no key heads": (
        {"key": shape(B, S, 0, H), "value": shape(B, S, 0, H)},
        ValueError,
        ("K=0", "multiple", "(2, 6, 0, 8)"),
    ),
    "value heads": (
        {"value": shape(B, S, 4, H)},
        ValueError,
        ("key.shape=(2, 6, 2, 8)", "value.shape=(2, 6, 4, 8)", "different numbers of heads", "Repeat"),
    ),
    "head dims": (
        {"key": shape(B, S, K, 16)},
        ValueError,
        ("query.shape=(2, 5, 4, 8)", "key.shape=(2, 6, 2, 16)", "head dims", "Project"),
    ),
    "head dim of 0": (
        {"query": shape(B, T, N, 0), "key": shape(B, S, K, 0)},
        ValueError,
        ("head dim", "query.shape=(2, 5, 4, 0)", "at least 1"),
    ),
    "batch dims of the key": (
        {"key": shape(3, S, K, H)},
        ValueError,
        ("batch dims", "query.shape=(2, 5, 4, 8)", "key.shape=(3, 6, 2, 8)", "jnp.broadcast_to"),
    ),
    "batch dims of the value": ({"value": shape(S, K, H)}, ValueError, ("batch dims", "value.shape=(6, 2, 8)", "broadcast")),
    "lengths of key and value": (
        {"value": shape(B, 7, K, H)},
        ValueError,
        ("key.shape=(2, 6, 2, 8)", "value.shape=(2, 7, 2, 8)", "lengths", "one value"),
    ),
    "too few dims of the query": (
        {"query": shape(T, H)},
        ValueError,
        ("query.shape=(5, 8)", "too few dims", "[*B, T, N, H]", "query[:, None]"),
    ),
    "too few dims of the value": ({"value": shape(H)}, ValueError, ("value.shape=(8,)", "too few dims", "[*B, S, K, Hv]")),
    # dtypes of query, key, value
    "one other dtype": (
        {"key": shape(B, S, K, H, dtype=jnp.bfloat16)},
        ValueError,
        ("query.dtype=float32", "key.dtype=bfloat16", "value.dtype=float32", "one dtype", ".astype"),
    ),
    "integer query": (
        {"query": ints(B, T, N, H)},
        TypeError,
        ("query.dtype=int32", "float", ".astype"),
    ),
    "bool value": ({"value": bools(B, S, K, H)}, TypeError, ("value.dtype=bool", "float", ".astype")),
    "complex key": (
        {"key": shape(B, S, K, H, dtype=jnp.complex64)},
        TypeError,
        ("key.dtype=complex64", "float"),
    ),
    "dtype of powers of two": (
        {name: shape(*x.shape, dtype=jnp.float8_e8m0fnu) for name, x in GOOD.items()},
        TypeError,
        ("query.dtype=float8_e8m0fnu", "a float type with a sign", ".astype"),
    ),
    "long doubles": (
        {name: np.ones(x.shape, np.longdouble) for name, x in GOOD.items()},
        TypeError,
        ("query.dtype=float", "of at most 64 bits", ".astype"),
    ),
    "bias of another library": ({"bias": OtherArray()}, TypeError, ("bias=", "OtherArray", "[*B, N, T, S]")),
    "lengths of another library": ({"query_seq_lengths": OtherArray()}, TypeError, ("lengths is a OtherArray", "int")),
    "masked lengths": (
        {"query_seq_lengths": np.ma.masked_array([3, 4], [True, False])},
        TypeError,
        ("query_seq_lengths is a MaskedArray", "an int array", "JAX or NumPy"),
    ),
    "bias of powers of two": ({"bias": shape(T, S, dtype=jnp.float8_e8m0fnu)}, TypeError, ("bias.dtype=float8_e8m0fnu",)),
    "query of no array type": ({"query": "hello"}, TypeError, ("query", "str", "float array", "[*B,")),
    "query of None": ({"query": None}, TypeError, ("query=None", "float array", "Pass an array")),
    "key of None": ({"key": None}, TypeError, ("key=None", "float array", "Pass an array")),
    # mask
    "integer mask": (
        {"mask": ints(B, 1, T, S)},
        TypeError,
        ("mask.dtype=int32", "bool", "mask != 0", "bias="),
    ),
    "float mask": ({"mask": shape(T, S)}, TypeError, ("mask.dtype=float32", "bool", "bias=")),
    "mask not broadcastable": (
        {"mask": bools(B, 3, T, S)},
        ValueError,
        ("mask.shape=(2, 3, 5, 6)", "broadcastable", "(2, 4, 5, 6)", "Transpose or reshape"),
    ),
    "mask of key heads": ({"mask": bools(K, 1, S)}, ValueError, ("mask.shape=(2, 1, 6)", "broadcastable", "(2, 4, 5, 6)")),
    "mask [B, T, S]": (
        {"mask": bools(B, T, S)},
        ValueError,
        ("mask.shape=(2, 5, 6)", "broadcastable", "mask[:, None, :, :]"),
    ),
    "mask of too many dims": (
        {"mask": bools(1, B, N, T, S)},
        ValueError,
        ("mask.shape=(1, 2, 4, 5, 6)", "broadcastable", "(2, 4, 5, 6)"),
    ),
    "function as mask": ({"mask": len}, TypeError, ("mask=<built-in", "fn(b, n, t, s)", "masks.Custom(fn)")),
    # bias
    "complex bias": ({"bias": np.ones((T, S), np.complex64)}, TypeError, ("bias.dtype=complex64", "float", "mask=")),
    "bool bias": ({"bias": bools(T, S)}, TypeError, ("bias.dtype=bool", "float", "mask=", ".astype(jnp.float32)")),
    "function as bias": ({"bias": len}, TypeError, ("bias=<built-in", "scores.Custom(fn)", "score=")),
    "bias not broadcastable": (
        {"bias": shape(N, S, T)},
        ValueError,
        ("bias.shape=(4, 6, 5)", "broadcastable", "(2, 4, 5, 6)", "Transpose or reshape"),
    ),
    # numbers
    "soft cap of 0": ({"logits_soft_cap": 0.0}, ValueError, ("logits_soft_cap=0.0", "positive", "None")),
    "negative soft cap": ({"logits_soft_cap": -3}, ValueError, ("logits_soft_cap=-3", "positive", "None")),
    "infinite soft cap": ({"logits_soft_cap": math.inf}, ValueError, ("logits_soft_cap=inf", "1.3e+30", "None")),
    "soft cap of NaN": ({"logits_soft_cap": math.nan}, ValueError, ("logits_soft_cap=nan", "positive", "None")),
    "soft cap past float32": ({"logits_soft_cap": 1e300}, ValueError, ("logits_soft_cap=1e+300", "1.3e+30", "None")),
    "soft cap below float32": ({"logits_soft_cap": 1e-50}, ValueError, ("logits_soft_cap=1e-50", "7.9e-31", "Use None")),
    "soft cap past floats": ({"logits_soft_cap": 10**400}, ValueError, ("logits_soft_cap=1000", "1.3e+30", "Use None")),
    "traced soft cap": ({"logits_soft_cap": shape()}, TypeError, ("logits_soft_cap=", "float > 0", "scores.Custom")),
    "infinite scale": ({"scale": math.inf}, ValueError, ("scale=inf", "finite", "Leave it out", "0.3536")),
    "scale past float32": ({"scale": -1e300}, ValueError, ("scale=-1e+300", "finite", "float32", "Leave it out")),
    "scale past floats": ({"scale": 10**400}, ValueError, ("scale=1000", "finite", "Leave it out")),
    "scale of NaN": ({"scale": math.nan}, ValueError, ("scale=nan", "finite", "Leave it out")),
    "bias past integers": ({"bias": 10**400}, TypeError, ("bias=1000", "array", "Leave it out")),
    "scale of heads": ({"scale": shape(N)}, TypeError, ("scale=", "float32[4]", "scalar", "None", "multiply the query")),
    "scale of one value": ({"scale": shape(1)}, TypeError, ("scale=", "float32[1]", "scale.reshape(())")),
    "bool scale array": ({"scale": bools()}, TypeError, ("scale=", "bool", "Convert", "None")),
    "scale of powers of two": ({"scale": shape(dtype=jnp.float8_e8m0fnu)}, TypeError, ("scale=", "e8m0fnu", "Convert")),
    "scale of True": ({"scale": True}, TypeError, ("scale=True", "float", "Pass 1.0")),
    "window of True": ({"local_window_size": (True, 0)}, TypeError, ("local_window_size[0]=True", "int", "None")),
    "negative window": ({"local_window_size": (-1, 3)}, ValueError, ("local_window_size[0]=-1", "None", "offset=")),
    "negative window of one int": ({"local_window_size": -2}, ValueError, ("local_window_size[0]=-2", "None", "offset=")),
    "window of three": ({"local_window_size": (1, 2, 3)}, TypeError, ("local_window_size=(1, 2, 3)", "pair", "None")),
    "window of floats": ({"local_window_size": (1.5, 2)}, TypeError, ("local_window_size[0]=1.5", "int", "None")),
    "infinite window": ({"local_window_size": (math.inf, 0)}, TypeError, ("local_window_size[0]=inf", "None")),
    "window of one array per head": ({"local_window_size": np.ones(N, int)}, TypeError, ("local_window_size=", "[*B]")),
    "window of a float array": ({"local_window_size": (0, np.ones(B))}, TypeError, ("local_window_size[1].dtype=float64",)),
    "window per query": (
        {"local_window_size": (np.ones((B, 1, T, 1), int), 0)},
        ValueError,
        ("local_window_size[0].shape=(2, 1, 5, 1)", "positions", "[*B]"),
    ),
    "traced is_causal": ({"is_causal": bools()}, TypeError, ("is_causal=", "True or False")),
    "is_causal of 1": ({"is_causal": 1}, TypeError, ("is_causal=1", "True or False")),
    "return_residual of text": ({"return_residual": "no"}, TypeError, ("return_residual='no'", "True or False")),
    "return_residual of 1": ({"return_residual": 1}, TypeError, ("return_residual=1", "True or False", "Pass one")),
    "deterministic_gradients of 1": ({"deterministic_gradients": 1}, TypeError, ("deterministic_gradients=1", "True or")),
    "forward_mode of 1": ({"forward_mode": 1}, TypeError, ("forward_mode=1", "True or False")),
    # sequence lengths
    "query lengths per position": (
        {"query_seq_lengths": ints(B, T)},
        ValueError,
        ("query_seq_lengths.shape=(2, 5)", "[*B] = (2,)", "one int for each batch entry"),
    ),
    "query lengths of another batch": (
        {"query_seq_lengths": ints(3)},
        ValueError,
        ("query_seq_lengths.shape=(3,)", "[*B] = (2,)", "one int for each batch entry"),
    ),
    "key lengths past integers": (
        {"key_value_seq_lengths": [3, 10**400]},
        TypeError,
        ("key_value_seq_lengths", "64 bits", "smaller"),
    ),
    "scalar key lengths": (
        {"key_value_seq_lengths": ints()},
        ValueError,
        ("key_value_seq_lengths.shape=()", "[*B] = (2,)", "jnp.broadcast_to(x, (2,))"),
    ),
    "float key lengths": (
        {"key_value_seq_lengths": shape(B)},
        TypeError,
        ("key_value_seq_lengths.dtype=float32", "integer", ".astype(jnp.int32)"),
    ),
    "bool query lengths": (
        {"query_seq_lengths": bools(B)},
        TypeError,
        ("query_seq_lengths.dtype=bool", "integer", ".astype"),
    ),
    # segment ids
    "only query segment ids": (
        {"query_segment_ids": ints(B, T)},
        ValueError,
        ("key_value_segment_ids is None", "both or neither", "twice"),
    ),
    "only key segment ids": (
        {"key_value_segment_ids": ints(B, S)},
        ValueError,
        ("query_segment_ids is None", "both or neither", "twice"),
    ),
    "query segment ids of the wrong length": (
        {"query_segment_ids": ints(B, S), "key_value_segment_ids": ints(B, S)},
        ValueError,
        ("query_segment_ids.shape=(2, 6)", "[*B, T] = (2, 5)", "one int for each token"),
    ),
    "segment ids without a batch": (
        {"query_segment_ids": ints(B, T), "key_value_segment_ids": ints(S)},
        ValueError,
        ("key_value_segment_ids.shape=(6,)", "[*B, S] = (2, 6)", "broadcast_to(x, (2, 6))"),
    ),
    "float segment ids": (
        {"query_segment_ids": shape(B, T), "key_value_segment_ids": shape(B, S)},
        TypeError,
        ("query_segment_ids.dtype=float32", "integer", ".astype(jnp.int32)"),
    ),
    "segment ids of 64 bits": (
        {"query_segment_ids": np.full((B, T), 2**32), "key_value_segment_ids": np.zeros((B, S), int)},
        ValueError,
        ("query_segment_ids", "4294967296", "int64 as int32", "np.unique(ids, return_inverse=True)"),
    ),
    "segment ids of large Python ints": (
        {"query_segment_ids": [[0] * T] * B, "key_value_segment_ids": [[-(2**40)] * S] * B},
        ValueError,
        ("key_value_segment_ids", "-1099511627776", "int32", "np.unique"),
    ),
    "signed and unsigned segment ids": (
        {"query_segment_ids": ints(B, T), "key_value_segment_ids": shape(B, S, dtype=jnp.uint32)},
        ValueError,
        ("query_segment_ids.dtype=int32", "key_value_segment_ids.dtype=uint32", "Convert both"),
    ),
    "sinks of key heads": (
        {"sinks": shape(K)},
        ValueError,
        ("sinks.shape=(2,)", "[N] = (4,)", "[*B, N] = (2, 4)", "jnp.full((4,), sink)"),
    ),
    "sinks of rows": ({"sinks": shape(B, N, T)}, ValueError, ("sinks.shape=(2, 4, 5)", "[*B, N] = (2, 4)")),
    "sinks with more dims": ({"sinks": shape(N, 1, 1)}, ValueError, ("sinks.shape=(4, 1, 1)", "reshape(sinks, (4,))")),
    "one sink": ({"sinks": 0.5}, ValueError, ("sinks.shape=()", "[N] = (4,)", "all heads share")),
    "integer sinks": ({"sinks": ints(N)}, TypeError, ("sinks.dtype=int32", "float", ".astype(jnp.float32)")),
    # dropout
    "rate of 1": ({"dropout_rate": 1.0}, ValueError, ("dropout_rate=1.0", "[0, 1)", "Use 0.0")),
    "negative rate": ({"dropout_rate": -0.1}, ValueError, ("dropout_rate=-0.1", "[0, 1)")),
    "traced rate": ({"dropout_rate": shape()}, TypeError, ("dropout_rate", "[0, 1)", "float(rate)", "static_argnames")),
    "another's name of the rate": ({"dropout": 0.1}, TypeError, ("dropout=0.1", "dropout_key or dropout_rate")),
    "dropout without a key": ({"dropout_rate": 0.1}, ValueError, ("dropout_rate=0.1", "dropout_key=None", "jax.random.key")),
    "a seed as key": (
        {"dropout_rate": 0.1, "dropout_key": 3},
        TypeError,
        ("dropout_key=3", "int", "PRNG key", "jax.random.key(seed)"),
    ),
    "integers as key": (
        {"dropout_rate": 0.1, "dropout_key": ints(2)},
        TypeError,
        ("dropout_key.dtype=int32", "uint32", "jax.random.key"),
    ),
    "several typed keys": (
        {"dropout_rate": 0.1, "dropout_key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))},
        ValueError,
        ("dropout_key.shape=(3,)", "one key", "dropout_key[i]", "jax.vmap"),
    ),
    "several raw keys": (
        {"dropout_rate": 0.1, "dropout_key": shape(3, 2, dtype=jnp.uint32)},
        ValueError,
        ("dropout_key.shape=(3, 2)", "(2,) or (4,)", "jax.vmap"),
    ),
    "a score as sinks": ({"sinks": scores.SoftCap(2)}, TypeError, ("sinks is a SoftCap", "[N]", "score=")),
    # the rest
    "function as score": ({"score": jnp.tanh}, TypeError, ("score", "scores.Custom(fn)", "scores.Bias(array)")),
    "array as score": ({"score": np.ones((T, S))}, TypeError, ("score", "ndarray", "scores.Bias(array)")),
    "config of a dict": ({"config": {"forward": 1}}, TypeError, ("config={'forward': 1}", "dict", "Config(", "None")),
    "unknown precision": ({"precision": "perfect"}, ValueError, ("precision='perfect'", "'highest'", "jax.lax")),
    "precision in an array": ({"precision": jnp.ones(2)}, ValueError, ("precision=", "'highest'", "jax.lax")),
    "precision of a wrong type": ({"precision": 3.5}, ValueError, ("precision=3.5", "'highest'", "jax.lax")),
    # masks and scores against the call
    "array of a Segments mask": (
        {"mask": masks.Segments(np.zeros((B, S), int), np.zeros((B, S), int))},
        ValueError,
        ("q_ids.shape=(2, 6)", "[B, T]", "(2, 5)", "Reshape"),
    ),
    "array of a Segments mask over both sequences": (
        {"mask": masks.Segments(np.zeros((B, 1, T, S), int), np.zeros((B, S), int))},
        ValueError,
        ("q_ids.shape=(2, 1, 5, 6)", "varies over both", "[*B, T]"),
    ),
    "offsets of a Causal mask": (
        {"mask": masks.Causal(offset=np.zeros(3, int))},
        ValueError,
        ("offset.shape=(3,)", "[B]", "(2,)"),
    ),
    "offsets of a Causal mask per position": (
        {"mask": masks.Causal(offset=np.zeros((B, 1, T, 1), int))},
        ValueError,
        ("offset.shape=", "varies over positions", "[*B]"),
    ),
    "lengths of a Lengths mask per position": (
        {"mask": masks.Lengths(np.zeros((B, 1, T, 1), int))},
        ValueError,
        ("q_lengths.shape=", "varies over positions", "[*B]"),
    ),
    "array of a Custom mask": (
        {"mask": masks.Custom(lambda b, n, t, s, x: x, np.ones((3, T, S), bool))},
        ValueError,
        ("arrays[0].shape=(3, 5, 6)", "broadcastable", "(2, 4, 5, 6)"),
    ),
    "slopes of Alibi": (
        {"score": scores.Alibi(np.ones(K))},
        ValueError,
        ("slopes.shape=(2,)", "[B, N]", "(2, 4)"),
    ),
    "array of a Custom score": (
        {"score": scores.Custom(lambda x, b, n, t, s, a: x * a, np.ones((N, T)))},
        ValueError,
        ("arrays[0].shape=(4, 5)", "broadcastable", "(2, 4, 5, 6)"),
    ),
    "array of a Bias in a chain": (
        {"score": scores.SoftCap(2.0).then(scores.Bias(np.ones((3, 1, 1))))},
        ValueError,
        ("bias.shape=(3, 1, 1)", "broadcastable", "(2, 4, 5, 6)"),
    ),
}  # fmt: skip


def check(error, kind, says):
    assert isinstance(error.value, kind)
    message = str(error.value)
    missing = [part for part in says if part not in message]
    assert not missing, f"the message does not say {missing}:\n{message}"
    assert len(message) >= 40 and len(re.findall(r"\w+", message)) >= 8, f"in more than a few words:\n{message}"
