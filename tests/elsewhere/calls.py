"""What is compiled: every configuration of the tables of tiles that fits the GPU, causal; the best ones unmasked.

Those by mma.sync for few queries are compiled with lengths; the best ones for keys in pages, too, which `Call.causal` says.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa import masks, scores
from pallas_fa.backends.gpu import grouped_rows, narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import fits
from pallas_fa.backends.gpu.support import LARGEST_HEAD_DIM
from pallas_fa.backends.hopper.backward import backward as hopper_backward
from pallas_fa.backends.hopper.backward.choose import choose as hopper_choose_backward
from pallas_fa.backends.hopper.backward.choose import choose_passes as hopper_choose_passes
from pallas_fa.backends.hopper.backward.table import BackwardFacts as HopperBackwardFacts
from pallas_fa.backends.hopper.backward.table import backward_configs as hopper_backward_configs
from pallas_fa.backends.hopper.config import Config as HopperConfig
from pallas_fa.backends.hopper.decode import decode as hopper_decode
from pallas_fa.backends.hopper.forward import forward as hopper_forward
from pallas_fa.backends.hopper.forward.choose import choose as hopper_choose_forward
from pallas_fa.backends.hopper.forward.plan import ForwardPlan as HopperForwardPlan
from pallas_fa.backends.hopper.forward.scratch import on_gpu as hopper_forward_scratch
from pallas_fa.backends.hopper.forward.table import ForwardFacts as HopperForwardFacts
from pallas_fa.backends.hopper.forward.table import forward_configs as hopper_forward_configs
from pallas_fa.backends.mma.backward import backward as mma_backward
from pallas_fa.backends.mma.backward.plan import FUSED, BackwardPlan, passes
from pallas_fa.backends.mma.backward.scratch import on_gpu as mma_backward_scratch
from pallas_fa.backends.mma.backward.table import BackwardFacts, backward_configs
from pallas_fa.backends.mma.config import Config
from pallas_fa.backends.mma.decode import decode as mma_decode
from pallas_fa.backends.mma.decode.plan import DecodePlan
from pallas_fa.backends.mma.decode.scratch import on_gpu as mma_decode_scratch
from pallas_fa.backends.mma.decode.table import DecodeFacts, decode_configs
from pallas_fa.backends.mma.forward import forward as mma_forward
from pallas_fa.backends.mma.forward.plan import ForwardPlan
from pallas_fa.backends.mma.forward.scratch import on_gpu as mma_forward_scratch
from pallas_fa.backends.mma.forward.table import ForwardFacts, forward_configs
from pallas_fa.mla import mla_decode_attention
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import Residuals, normalise

B, T, N = 2, 1024, 8


class Call(NamedTuple):
    """A program with one kernel: which, in words that name its tiles, and the function with its arguments."""

    kernel: str
    head_dim: int
    tiles: Any
    causal: bool
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def calls(gpu: Gpu, only_best: bool = False) -> Iterator[Call]:
    """Returns all calls for a GPU: those by mma.sync, and Hopper's where it is one."""
    are_best = (True,) if only_best else (True, False)
    for head_dim, best in itertools.product((64, 96, 128, 256, 512), are_best):
        causal = not best
        if head_dim <= LARGEST_HEAD_DIM and head_dim != 96:  # which kernels by mma.sync pad to 128
            yield from _mma(gpu, head_dim, causal)
            yield from _mma_decode(gpu, head_dim, best, jnp.bfloat16)
            if narrow_keys.converts(gpu):
                yield from _mma_decode(gpu, head_dim, best, jnp.float8_e4m3fn)
        if gpu.compute_capability == "9.0":
            yield from _hopper(gpu, head_dim, causal)
            if causal:
                yield from _hopper_prompts(gpu, head_dim, jnp.bfloat16)
            elif head_dim in (64, 128, 256):
                yield from _hopper_prompts(gpu, head_dim, jnp.float8_e4m3fn)
            if head_dim in (64, 128):
                yield from _hopper_dropout(gpu, head_dim, causal)
                yield from _hopper_windows(gpu, head_dim) if causal else _hopper_few_keys(gpu, head_dim)
                yield from _hopper_arrays(gpu, head_dim, causal)
            if head_dim == 64:
                yield _hopper_long_gradients(gpu, head_dim, causal)
            if head_dim == 128:
                yield from _hopper_long(gpu, head_dim, causal)
            if head_dim == 256:
                yield from _hopper_by_gradient(gpu, head_dim, causal)
    if gpu.compute_capability == "9.0":
        yield _hopper_latent(gpu)
        for best in are_best:
            yield from _hopper_smaller_values(gpu, not best)
            yield from _hopper_in_turns(gpu, not best)


def _arrays(head_dim, batch=B, length=T):
    x = jax.ShapeDtypeStruct((batch, length, N, head_dim), jnp.bfloat16)
    return x, jax.ShapeDtypeStruct((batch, length, N), jnp.float32)


def _problem(head_dim, causal, config=None):
    x, _ = _arrays(head_dim)
    return _problem_of(lambda q: normalise(q, q, q, is_causal=causal, config=config), x)


def _problem_of(normalised, *shapes):
    """The problem in what `normalised` returns of arrays of these shapes."""
    found = []
    jax.eval_shape(lambda *arrays: found.extend(normalised(*arrays)), *shapes)
    return found[0]


def _operands(problem, q, k, v):
    causal = problem.mask is not None
    return normalise(q, k, v, is_causal=causal, config=problem.config)[1]


def _mma(gpu, head_dim, causal):
    x, row = _arrays(head_dim)
    memory = gpu.shared_memory // 1024
    wanted = slice(None if causal else 1)
    configs = forward_configs(ForwardFacts(head_dim, T, memory))
    plans = [ForwardPlan(_problem(head_dim, causal, Config(forward=tiles)), tiles) for tiles in configs]
    for plan in [x for x in plans if fits(mma_forward_scratch(x), gpu)][wanted]:
        run = lambda q, k, v, problem=plan.problem: mma_forward.forward(problem, _operands(problem, q, k, v), gpu)
        yield Call("mma forward", head_dim, plan.config, causal, run, (x, x, x))
    problem = _problem(head_dim, causal)
    rows = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    for kind in (FUSED, *passes(problem)):
        configs = backward_configs(BackwardFacts(kind.gives, head_dim, memory))
        plans = [BackwardPlan(problem, kind, tiles, gpu) for tiles in configs]
        plans = [x for x in plans if x.why_not_fused is None and fits(mma_backward_scratch(x), gpu)]
        for plan in plans[wanted]:
            run, args = functools.partial(_mma_pass, plan), (x, x, x, x, rows, rows)
            yield Call(f"mma backward {' '.join(kind.gives)}", head_dim, plan.config, causal, run, args)


def _mma_decode(gpu, head_dim, in_pages, kv_dtype):
    """One query of as many heads of a key head as the tiles have rows; with lengths, in pages of 16 for the best tiles."""
    tried, kv_bits = set(), 8 * jnp.dtype(kv_dtype).itemsize
    name = "mma decode" if kv_bits > 8 else f"mma decode {jnp.dtype(kv_dtype)}"
    for rows in (16, 32, 64):
        q, k = (
            jax.ShapeDtypeStruct((B, *x, head_dim), dtype)
            for x, dtype in (((1, rows), jnp.bfloat16), ((T, 1), kv_dtype))
        )
        args = q, k, k, jax.ShapeDtypeStruct((B,), jnp.int32)
        for tiles in decode_configs(DecodeFacts(rows, head_dim, gpu.shared_memory // 1024, kv_bits=kv_bits)):
            tiles = dataclasses.replace(tiles, kv_splits=2)
            problem = grouped_rows.of_problem(_few_queries(tiles, in_pages, *args, shapes=True)[0])
            if tiles in tried or not fits(mma_decode_scratch(DecodePlan(problem, tiles)), gpu):
                continue
            tried.add(tiles)
            yield Call(name, head_dim, tiles, in_pages, functools.partial(_mma_decoded, gpu, tiles, in_pages), args)
            if in_pages:
                break


def _mma_decoded(gpu, tiles, in_pages, *args):
    return mma_decode.decode(*_few_queries(tiles, in_pages, *args), gpu)


def _few_queries(tiles, in_pages, q, k, v, lengths, shapes=False):
    """(problem, operands); `shapes`: of shapes."""
    found = []

    def see(q, k, v, lengths):
        if in_pages:
            table = jnp.arange(B * T // 16, dtype=jnp.int32).reshape(B, -1)
            k, v = (Paged(x.reshape(-1, 16, *x.shape[2:]), table) for x in (k, v))
        found.extend(normalise(q, k, v, key_value_seq_lengths=lengths, config=Config(decode=tiles)))

    jax.eval_shape(see, q, k, v, lengths) if shapes else see(q, k, v, lengths)
    return found


def _mma_pass(plan, q, k, v, d_out, neg_lse, delta):
    return mma_backward.run(plan, _operands(plan.problem, q, k, v), d_out, neg_lse, delta)


def _hopper(gpu, head_dim, causal):
    x, row = _arrays(head_dim)
    in_tables = -(-head_dim // 64) * 64
    facts = [
        HopperForwardFacts(
            in_tables,
            in_tables,
            length,
            length,
            heads,
            uniform=not causal,
            scalar_ranges=causal,
            visit_table=False,
            packed=packed,
            split=False,
        )
        for length, packed in itertools.product((1024, 4096, 2**14), (False, True))
        for heads in (B * N, 1024)  # which fill the GPU once, and many times
    ]
    for tiles in dict.fromkeys(itertools.chain.from_iterable(hopper_forward_configs(x, gpu) for x in facts)):
        problem = _problem(head_dim, causal, HopperConfig(forward=tiles))
        if not fits(hopper_forward_scratch(HopperForwardPlan(problem, tiles)), gpu):
            continue
        run = lambda q, k, v, problem=problem: hopper_forward.forward(problem, _operands(problem, q, k, v), gpu)
        yield Call("hopper forward", head_dim, tiles, causal, run, (x, x, x))
    gives = ("dk", "dv", "dq") if head_dim <= 128 else ("dv",)
    facts = [
        HopperBackwardFacts(
            gives, in_tables, in_tables, head_dim, T, T, heads, 1, causal, False, False, split=False, band=causal
        )
        for heads in (B * N, 1024)  # which fill the GPU once, and many times
    ]
    for tiles in dict.fromkeys(itertools.chain.from_iterable(hopper_backward_configs(x, gpu) for x in facts)):
        problem = _problem(head_dim, causal, HopperConfig(backward=tiles))
        if hopper_backward.why_no_backward(problem, gpu) is None:
            run = functools.partial(_hopper_backward, problem, gpu)
            yield Call("hopper backward", head_dim, tiles, causal, run, (x, x, x, x, row, x, row))


def _hopper_long(gpu, head_dim, causal):
    """Sequences for which row sums take the place of maxima under a mask, too, in the tiles chosen for them."""
    x, _ = _arrays(head_dim, 4, 4096)
    plain = functools.partial(normalise, is_causal=causal)
    for name, normalised in ("long", plain), ("long, dropout", functools.partial(_with_dropout, causal)):
        yield _hopper_chosen(gpu, name, causal, normalised, x, x, x)


def _hopper_long_gradients(gpu, head_dim, causal):
    """Sequences for which, without a mask, the backward's accumulators start at the statistics."""
    x, row = _arrays(head_dim, 4, 4096)
    return _hopper_gradients(gpu, "long", causal, functools.partial(normalise, is_causal=causal), x, x, row)


def _hopper_arrays(gpu, head_dim, causal):
    """Masks with arrays, and a score that is one number in a tile, with the tiles chosen for so many keys."""
    x, _ = _arrays(head_dim, 4, 4096)
    arrays = {
        "lengths": (((4,), jnp.int32), ("key_value_seq_lengths",)),
        "key mask": (((4, 1, 1, 4096), jnp.bool_), ("mask",)),
        "segments": (((4, 4096), jnp.int32), ("query_segment_ids", "key_value_segment_ids")),
    }
    for name, (array, arguments) in arrays.items():
        normalised = lambda q, a, arguments=arguments: normalise(
            q, q, q, is_causal=causal, **dict.fromkeys(arguments, a)
        )
        yield _hopper_chosen(gpu, name, causal, normalised, x, jax.ShapeDtypeStruct(*array))
    scored = lambda q, a: normalise(q, q, q, is_causal=causal, score=scores.Custom(_constant_score, a))
    yield _hopper_chosen(gpu, "constant score", causal, scored, x, jax.ShapeDtypeStruct((1, N, 1, 1), jnp.float32))


def _constant_score(x, b, n, t, s, a):
    return jnp.broadcast_to(a, x.shape)


def _hopper_chosen(gpu, name, causal, normalised, *shapes):
    """The forward of what `normalised` returns of arrays of these shapes, queries first, with the tiles chosen for it."""
    tiles = hopper_choose_forward(_problem_of(normalised, *shapes), gpu).config
    run = lambda *arrays: hopper_forward.forward(*normalised(*arrays), gpu)
    return Call(f"hopper forward, {name}", shapes[0].shape[-1], tiles, causal, run, shapes)


def _hopper_latent(gpu):
    q, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 1, 128, 576), (64, 8192, 576)))
    run = functools.partial(mla_decode_attention, scale=0.07, implementation="mosaic_gpu")
    return Call("hopper latent decode", 576, "one set", False, run, (q, cache))


def _hopper_dropout(gpu, head_dim, causal):
    x, row = _arrays(head_dim)
    dropped = functools.partial(_with_dropout, causal)
    yield _hopper_chosen(gpu, "dropout", causal, dropped, x, x, x)
    yield _hopper_gradients(gpu, "dropout", causal, dropped, x, x, row)


def _hopper_by_gradient(gpu, head_dim, causal):
    """Without and with a soft cap; and the pass for dQ with each."""
    x, row = _arrays(head_dim)
    for name, keywords in (("by gradient", {}), ("by gradient, soft cap", dict(score=scores.SoftCap(50.0)))):
        normalised = functools.partial(normalise, is_causal=causal, **keywords)
        yield _hopper_gradients(gpu, name, causal, normalised, x, x, row)


def _hopper_gradients(gpu, name, causal, normalised, x, v, row):
    """The backward of what `normalised` returns of q and k like `x`, and v, with the tiles chosen for its first pass."""
    problem = _problem_of(normalised, x, x, v)
    kind = hopper_choose_passes(problem, gpu)[0]
    tiles = hopper_choose_backward(problem, kind, gpu).config

    def pull_back(q, k, v, out, lse, d_out, d_lse):
        problem, operands = normalised(q, k, v)
        return hopper_backward.backward(problem, Residuals(operands, out, lse), d_out, d_lse, gpu)

    return Call(f"hopper backward, {name}", x.shape[-1], tiles, causal, pull_back, (x, x, v, v, row, v, row))


def _hopper_smaller_values(gpu, causal):
    """Of latent attention in training: queries and keys of 192, values of 128."""
    (x, row), (v, _) = _arrays(192), _arrays(128)
    plain = functools.partial(normalise, is_causal=causal)
    yield _hopper_chosen(gpu, "values of 128", causal, plain, x, x, v)
    (kind,) = hopper_choose_passes(_problem_of(plain, x, x, v), gpu)
    facts = HopperBackwardFacts(kind.gives, 192, 128, 192, T, T, B * N, 1, causal, False, False, split=False)
    for tiles in hopper_backward_configs(facts, gpu):
        named = functools.partial(plain, config=HopperConfig(backward=tiles))
        yield _hopper_gradients(gpu, "values of 128", causal, named, x, v, row)


def _hopper_in_turns(gpu, causal):
    """Past H=128, so many queries that a CTA processes several blocks of them and stores the output in turns."""
    plain = functools.partial(normalise, is_causal=causal)
    for head_dim, value_dim in (192, 128), (256, 256):
        q, v = (jax.ShapeDtypeStruct((32, T, N, dim), jnp.bfloat16) for dim in (head_dim, value_dim))
        yield _hopper_chosen(gpu, "output in turns", causal, plain, q, q, v)


def _with_dropout(causal, q, k, v):
    return normalise(q, k, v, is_causal=causal, dropout_rate=0.1, dropout_key=np.array([0, 1], np.uint32))


def _hopper_windows(gpu, head_dim):
    """Of short windows, whose tiles depend on how many query heads a key head has."""
    for group in (8, 4, 1):
        q, k = (jax.ShapeDtypeStruct((B, T, heads, head_dim), jnp.bfloat16) for heads in (N, N // group))
        yield _hopper_chosen(gpu, "window", True, _in_window, q, k)


def _hopper_few_keys(gpu, head_dim):
    """Of cross attention, whose tiles depend on how few the keys are."""
    for keys in (80, 128, 256):
        shapes = [jax.ShapeDtypeStruct((B, length, N, head_dim), jnp.bfloat16) for length in (4 * T, keys)]
        yield _hopper_chosen(gpu, "few keys", False, _unmasked, *shapes)


def _hopper_prompts(gpu, head_dim, kv_dtype):
    """Against a cache with lengths, in pages of 16: parts of a prompt, and so few queries that heads share tiles."""
    pages = jax.ShapeDtypeStruct((B * 8192 // 16, 16, 2, head_dim), kv_dtype)
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, 8192 // 16), (B,)))
    where = "in pages" if kv_dtype == jnp.bfloat16 else f"in pages of {jnp.dtype(kv_dtype)}"
    for queries in (16, 32, 128, 512):
        q = jax.ShapeDtypeStruct((B, queries, N, head_dim), jnp.bfloat16)
        if queries > 32:
            yield _hopper_chosen(gpu, f"prompt {where}", True, _at_the_end, q, pages, table, lengths)
            continue
        tiles = hopper_decode.choose(_problem_of(_at_the_end, q, pages, table, lengths), gpu).config
        run = lambda *arrays: hopper_decode.decode(*_at_the_end(*arrays), gpu)
        yield Call(f"hopper decode {where}", head_dim, tiles, True, run, (q, pages, table, lengths))


def _at_the_end(q, pages, table, lengths):
    mask, k = masks.Causal(align="bottom_right"), Paged(pages, table)
    return normalise(q, k, k, mask=mask, key_value_seq_lengths=lengths)


def _unmasked(q, k):
    return normalise(q, k, k)


def _in_window(q, k):
    return normalise(q, k, k, is_causal=True, local_window_size=(127, 0))


def _hopper_backward(problem, gpu, q, k, v, out, lse, d_out, d_lse):
    residuals = Residuals(_operands(problem, q, k, v), out, lse)
    return hopper_backward.backward(problem, residuals, d_out, d_lse, gpu)
