"""The feature matrix of docs/support.md, made from what the backends' records answer.

usage: python -m tests.support_matrix        writes it into the page
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa import masks, scores
from pallas_fa.backends import choice
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import normalise

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "support.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
B, T, S, N, K = 64, 256, 320, 8, 2  # a batch whose blocks fill a GPU
IDS = (B, T), (B, S)
_INT, _FLOAT = jnp.int32, jnp.float32


def _call(
    *arrays: tuple[tuple[int, ...], Any], H: int = 64, Hv: int = 64, dtype: Any = jnp.bfloat16, keywords: Any = None
):
    """A call of q, k, v and these `arrays` (shape, dtype), whose keywords are `keywords(*arrays)`."""
    shapes = [((B, T, N, H), dtype), ((B, S, K, H), dtype), ((B, S, K, Hv), dtype), *arrays]
    return [jax.ShapeDtypeStruct(*x) for x in shapes], keywords or (lambda: {})


def _call_bnth():
    arrays = [jax.ShapeDtypeStruct((B, heads, length, 64), jnp.bfloat16) for heads, length in ((N, T), (K, S), (K, S))]
    return arrays, lambda: {"layout": "BNTH"}


def _call_in_pages(T, page):
    shape = jax.ShapeDtypeStruct
    paged = lambda: Paged(shape((20, page, K, 64), jnp.bfloat16), shape((B, 8), _INT))
    arrays = [shape((B, T, N, 64), jnp.bfloat16), paged(), paged(), shape((B,), _INT)]
    return arrays, lambda lengths: {"key_value_seq_lengths": lengths}


def _always(**keywords: Any):
    return _call(keywords=lambda: keywords)


def _distance(b, n, t, s):
    return abs(t - s) < 100


def _gain(x, b, n, t, s, gain):
    return x * gain


FEATURES = {
    "`bfloat16`, T != S, grouped heads": _always(),
    "`float16`": _call(dtype=jnp.float16),
    "`float32`": _call(dtype=jnp.float32),
    '`float32`, `precision="highest"`': _call(dtype=jnp.float32, keywords=lambda: {"precision": "highest"}),
    "head dims that are multiples of 8, up to 256; Hv != H": _call(H=192, Hv=128),
    "other head dims up to 256, here H=59, Hv=100": _call(H=59, Hv=100),
    "head dims up to 512": _call(H=512, Hv=512),
    "head dims past 512": _call(H=640, Hv=640),
    "`is_causal`, `masks.Causal`, `masks.Window`": _always(
        mask=masks.Causal(align="bottom_right") & masks.Window(128, 0)
    ),
    "a window per head, in an int array": _call(((B, N, 1, 1), _INT), keywords=lambda x: {"local_window_size": (x, 0)}),
    "`masks.from_cu_seqlens`, `masks.KeyIntervals`": _call(
        ((9,), _INT), keywords=lambda cu: {"mask": masks.from_cu_seqlens(cu, T=T, is_causal=True)}
    ),
    "sequence lengths": _call(((B,), _INT), keywords=lambda n: {"key_value_seq_lengths": n, "query_seq_lengths": n}),
    "segment ids": _call(
        *((shape, _INT) for shape in IDS),
        keywords=lambda q, k: {"query_segment_ids": q, "key_value_segment_ids": k},
    ),
    "a dense mask": _call(((B, 1, T, S), jnp.bool_), keywords=lambda x: {"mask": x}),
    "`masks.Custom`": _always(mask=masks.Custom(_distance)),
    "`masks.block_mask`, `masks.BlockMask`": _call(
        ((T // 64, S // 64), jnp.bool_), keywords=lambda x: {"mask": masks.BlockMask(x, 64)}
    ),
    "`logits_soft_cap`": _always(logits_soft_cap=30.0),
    "`scores.Alibi`, with a gradient to the slopes": _call(
        ((N,), _FLOAT), keywords=lambda x: {"score": scores.Alibi(x)}
    ),
    "a bias `[B, N, T, S]`, with its gradient": _call(((B, N, T, S), _FLOAT), keywords=lambda x: {"bias": x}),
    "a bias `[N, T, S]` shared by the batch, with its gradient": _call(
        ((N, T, S), _FLOAT), keywords=lambda x: {"bias": x}
    ),
    "`scores.RelativeBias`, with its gradient": _call(
        ((N, T + S - 1), _FLOAT), keywords=lambda x: {"score": scores.RelativeBias(x)}
    ),
    "`scores.Custom` with an array": _call(((N, 1, 1), _FLOAT), keywords=lambda x: {"score": scores.Custom(_gain, x)}),
    "`sinks`, with their gradient": _call(((N,), _FLOAT), keywords=lambda x: {"sinks": x}),
    '`layout="BNTH"`': _call_bnth(),
    "`deterministic_gradients=True`": _always(deterministic_gradients=True),
    "the same with a shared bias `[N, T, S]`": _call(
        ((N, T, S), _FLOAT), keywords=lambda x: {"bias": x, "deterministic_gradients": True}
    ),
    '`precision="highest"`': _always(precision="highest"),
    "keys in pages of 16, 32 or a multiple of 64 rows, T <= 16": _call_in_pages(T=1, page=64),
    "the same, T > 16": _call_in_pages(T=100, page=64),
    "keys in pages of any other size": _call_in_pages(T=1, page=40),
    "dropout": _call(((2,), jnp.uint32), keywords=lambda x: {"dropout_rate": 0.1, "dropout_key": x}),
}


@functools.cache
def matrix() -> str:
    """The table, in Markdown, with a note for each reason and remark."""
    names = [backend.name for backend in choice.backends()]
    rows, notes = [], {}
    note = lambda reason: notes.setdefault(reason, len(notes) + 1)
    for feature, (arrays, keywords) in FEATURES.items():
        problem = _problem(arrays, keywords)
        cells = []
        for backend in choice.backends():
            support = backend.supports(problem)
            if support.forward is not None:
                cells.append(f"no ({note(support.forward)})")
            else:
                remark = f" ({note(support.remark)})" if support.remark else ""
                who = "no gradients" if problem.pages else "gradients on xla"
                other = f"; {who} ({note(support.backward)})" if support.backward else ""
                named = f"; only when named ({note(support.only_named)})" if support.only_named else ""
                cells.append(f"yes{remark}{named}{other}")
        rows.append(f"| {feature} | {' | '.join(cells)} |")
    head = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "| --- " * (len(names) + 1) + "|"]
    listed = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([*head, *rows, "", *listed])


def _problem(arrays, keywords):
    problems = []
    jax.eval_shape(lambda q, k, v, *rest: problems.append(normalise(q, k, v, **keywords(*rest))[0]), *arrays)
    return problems[0]


def page_with(table: str) -> str:
    """The page, with `table` in its place."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(matrix()))
