"""Attention to keys and values in pages is attention to the rows that the table finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import cache, masks, scores
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.hopper.decode.choose import applies
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.backends.hopper.forward.forward import forward
from pallas_fa.cache.attention import in_pages as checked
from pallas_fa.problem import normalise
from tests import cases
from tests.accuracy import precision_of
from tests.cases import Case
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races

PAGE = 16


def in_pages(rng, key, value, lengths, page=PAGE, layout="PSKH"):
    """Pages of contiguous rows, and their table: in any order, among others; NaN and no page's number past the lengths.

    The first and the last page, for which numbers out of range stand, are NaN.
    """
    B, S = key.shape[:2]
    per_sequence = S // page
    count = B * per_sequence + 3
    table = 1 + rng.permutation(count - 2)[: B * per_sequence].reshape(B, per_sequence).astype(np.int32)
    filled = np.arange(S) < np.asarray(lengths)[:, None]
    pages = []
    for x in (key, value):
        made = np.full((count, page, *x.shape[2:]), np.nan, x.dtype)
        made[table] = np.where(filled[..., None, None], x, np.nan).reshape(B, per_sequence, page, *x.shape[2:])
        pages.append(made if layout == "PSKH" else np.moveaxis(made, 2, 0))
    unused = np.arange(per_sequence) * page >= np.asarray(lengths)[:, None]
    return *pages, np.where(unused, rng.choice([-1, count, 2**31 - 1, -(2**31)], table.shape), table).astype(np.int32)


def table_cases():
    """Every mask, with the scores in turn."""
    scores, sinks = [name for name in cases.SCORES if "partial" not in name], tuple(cases.SINKS)
    for i, mask in enumerate(name for name in cases.MASKS if "partial" not in name):
        (N, K), dtype = cases.HEADS[i % len(cases.HEADS)], cases.DTYPES[i % 3]
        score = scores[(3 * i + 1) % len(scores)]
        yield Case(37, 192, mask, score, dtype, N=N, K=K, H=16, Hv=24, sinks=sinks[i % len(sinks)])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("case", list(table_cases()), ids=str)
def test_is_attention_to_the_rows_of_the_table(case, implementation, rng, small_chunks):
    inputs = case.inputs()
    q, k, v = inputs.qkv
    keywords = inputs.keywords(inputs.arrays)
    lengths = np.asarray(keywords.pop("key_value_seq_lengths", np.array([192, 101])), np.int32)
    key_pages, value_pages, table = in_pages(rng, k, v, lengths)
    common = dict(implementation=implementation, return_residual=True, **keywords)
    with precision_of(case):
        want = pallas_fa.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **common)
        got = pallas_fa.paged_attention(q, key_pages, value_pages, table, lengths, **common)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        tolerance = 0 if implementation == "reference" else 1e-5 if case.dtype == "float32" else 2e-2
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=tolerance)


@pytest.mark.parametrize("page", [1, 16, 48, 64, 192])
@pytest.mark.parametrize("layout", ["PSKH", "KPSH"])
def test_page_sizes_and_layouts(page, layout, rng, small_chunks):
    q, k, v = (rng.standard_normal(x).astype(np.float32) for x in ((2, 64, 4, 8), (2, 192, 2, 8), (2, 192, 2, 16)))
    for lengths in ((192, 50), (0, 1), (1000, -3)):
        clipped = np.clip(lengths, 0, 192)
        pages = in_pages(rng, k, v, clipped, page, layout)
        mask = masks.Causal(align="bottom_right")
        got = pallas_fa.paged_attention(q, *pages, jnp.array(lengths), mask=mask, page_layout=layout)
        want = pallas_fa.dot_product_attention(q, k, v, mask=mask, key_value_seq_lengths=clipped)
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_number_of_no_page_means_the_nearest(rng):
    """Before a length, numbers out of range are those of the nearest page, of all page sizes."""
    q, pages = rng.standard_normal((1, 1, 2, 8)), rng.standard_normal((3, 4, 2, 8))
    table, nearest = np.array([[-1, 1, 9]]), np.array([[0, 1, 2]])
    attend = lambda table: pallas_fa.paged_attention(*(np.float32(x) for x in (q, pages, pages)), table, np.array([12]))
    np.testing.assert_array_equal(attend(table), attend(nearest))


def test_memory_is_that_of_a_chunk():
    """Neither the whole sequences nor the pages are copied: temporary memory is a small part of either."""
    B, S, K, H, page = 2, 65536, 2, 64, 64
    q, pages = jnp.zeros((B, 1, 4, H)), jax.ShapeDtypeStruct((B * S // page, page, K, H), jnp.float32)
    table, lengths = jnp.zeros((B, S // page), int), jnp.zeros(B, int)
    for layout in ("PSKH", "KPSH"):
        shape = pages.shape if layout == "PSKH" else (K, *pages.shape[:2], H)
        pages = jax.ShapeDtypeStruct(shape, jnp.float32)
        attend = jax.jit(lambda *x, layout=layout: pallas_fa.paged_attention(*x, page_layout=layout))
        analysis = attend.lower(q, pages, pages, table, lengths).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < B * S * K * H * 4 / 8
    whole = jax.ShapeDtypeStruct((B, S, K, H), jnp.float32)  # nor is a cache in one piece, whose padding is zeroed
    attend = jax.jit(lambda q, k, v, n: pallas_fa.dot_product_attention(q, k, v, key_value_seq_lengths=n))
    analysis = attend.lower(q, whole, whole, lengths).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < B * S * K * H * 4 / 8


def test_gradients_are_refused():
    args = jnp.zeros((1, 1, 1, 8)), *[jnp.zeros((2, 16, 1, 8))] * 2, jnp.zeros((1, 1), int), jnp.ones(1, int)
    with pytest.raises(NotImplementedError, match="keys and values in pages are for inference"):
        jax.grad(lambda q: pallas_fa.paged_attention(q, *args[1:]).sum())(args[0])


B, T, N, K, H = 2, 1, 4, 2, 8
RIGHT = dict(
    query=np.zeros((B, T, N, H), np.float32),
    key_pages=np.zeros((6, PAGE, K, H), np.float32),
    value_pages=np.zeros((6, PAGE, K, H), np.float32),
    page_table=np.zeros((B, 3), np.int32),
    lengths=np.zeros(B, np.int32),
)
# What is changed in `RIGHT`, and what the message says.
WRONG = {
    "table of floats": (dict(page_table=np.zeros((B, 3), np.float32)), "page_table.dtype=float32 must be an integer"),
    "table of one sequence": (dict(page_table=np.zeros(3, np.int32)), r"page_table.shape=\(3,\) must be \[B, pages"),
    "table of others": (dict(page_table=np.zeros((3, 3), np.int32)), "with B=2 sequences"),
    "lengths": (dict(lengths=np.zeros(3, np.int32)), r"lengths.shape=\(3,\) must be \[B\]=\(2,\)"),
    "no lengths": (
        dict(lengths=None),
        "^lengths is a NoneType; it must be an int array. Pass how many rows .* jnp.full",
    ),
    "no table": (dict(page_table=None), "^page_table is a NoneType; it must be an int array. PageAllocator.page_table"),
    "residual of text": (dict(return_residual="no"), "^return_residual='no' must be True or False"),
    "an array of rates": (dict(dropout_rate=np.zeros(2)), "for inference"),
    "softmax_scale": (dict(softmax_scale=1.0), "^softmax_scale=1.0 is not an argument here. Pass scale="),
    "float lengths": (dict(lengths=np.zeros(B)), "^lengths.dtype=float64 must be an integer"),
    "other value pages": (dict(value_pages=np.zeros((5, PAGE, K, H), np.float32)), "must agree but for the head dim"),
    "head dims": (dict(query=np.zeros((B, T, N, 16), np.float32)), "different head dims H"),
    "heads": (
        dict(query=np.zeros((B, T, 3, H), np.float32)),
        r"key_pages.shape=.*K=2: N must be a multiple of K.*page_layout",
    ),
    "dtypes": (
        dict(query=np.zeros((B, T, N, H), np.float16)),
        r"key_pages.dtype=float32 .*nothing is converted silently",
    ),
    "page layout": (dict(page_layout="PKSH"), "page_layout='PKSH' is not one of 'PSKH', 'KPSH'"),
    "page layouts": (dict(page_layout=np.array(["PSKH"] * 2)), "page_layout=array.* is not one of 'PSKH', 'KPSH'"),
    "empty pages": (dict(key_pages=np.zeros((6, 0, K, H), np.float32)), "no dim of size 0"),
    "batch dims": (
        dict(query=np.zeros((T, N, H), np.float32)),
        r"query.shape=\(1, 4, 8\) must be \[B, T, N, H\].*query\[:, None\]",
    ),
    "two batch dims": (dict(query=np.zeros((1, 2, T, N, H), np.float32)), r"must be \[B, T, N, H\]. Reshape it"),
    "lengths twice": (dict(key_value_seq_lengths=np.zeros(B, int)), "it is the argument lengths"),
    "layout": (dict(layout="BNTH"), "page_layout says"),
    "dropout": (dict(dropout_rate=0.1), "for inference"),
    "forward mode": (dict(forward_mode=True), "for inference"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name):
    changed, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        pallas_fa.paged_attention(**RIGHT | changed)


def test_neutral_values_of_what_is_refused():
    neutral = dict(
        layout="BTNH", dropout_rate=0.0, forward_mode=np.False_, return_residual=None, key_value_seq_lengths=None
    )
    assert not pallas_fa.paged_attention(**RIGHT, **neutral).any()


# ---- the kernel -----------------------------------------------------------------------------------------------------

BOTTOM_RIGHT = masks.Causal(align="bottom_right")
# (page size, layout, queries, keywords)
CALLS = {
    "16": (16, "PSKH", 1, {}),
    "32, drafts": (32, "KPSH", 5, {"mask": BOTTOM_RIGHT}),
    "64, window": (64, "PSKH", 3, {"mask": BOTTOM_RIGHT & masks.Window(65, None, align="bottom_right")}),
    "128, soft cap and sinks": (128, "PSKH", 2, {"logits_soft_cap": 5.0, "sinks": np.arange(4, dtype=np.float32)}),
    "256, bias": (256, "KPSH", 1, {"bias": np.linspace(-1, 1, 4 * 1024, dtype=np.float32).reshape(4, 1, 1024)}),
}
PROMPTS = {
    "16, a prompt": (16, "KPSH", 130, {"mask": BOTTOM_RIGHT}),
    "32, a part of a prompt, all of the table": (32, "PSKH", 200, {"mask": BOTTOM_RIGHT, "logits_soft_cap": 5.0}),
    "64, a prompt, window and sinks": (
        64,
        "PSKH",
        150,
        {"mask": BOTTOM_RIGHT & masks.Window(65, None, align="bottom_right"), "sinks": np.arange(4, dtype=np.float32)},
    ),
    "16, 20 queries": (16, "PSKH", 20, {"mask": BOTTOM_RIGHT}),
    "192, a prompt, alibi": (
        192,
        "PSKH",
        70,
        {"mask": BOTTOM_RIGHT, "score": scores.Alibi(np.full(4, 0.1, np.float32))},
    ),
}


def call_in_bfloat16(rng, page, layout, T, S, H=64):
    """(query, key pages, value pages, table, lengths), and the same in one piece, (query, key, value)."""
    q, k, v = (jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in ((2, T, 4, H), (2, S, 2, H), (2, S, 2, H)))
    lengths = np.array([70, S - 7], np.int32)
    return (q, *in_pages(rng, np.asarray(k), np.asarray(v), lengths, page, layout), lengths), (q, k, v)


@pytest.mark.parametrize(("name", "H"), [*((name, 64) for name in CALLS | PROMPTS), ("16", 512)])
def test_interpreted_kernel_is_right_and_free_of_races(name, H, rng):
    page, layout, T, keywords = (CALLS | PROMPTS)[name]
    S = 1024 if "bias" in keywords else -(-max(2 * 64 + 16, T if T > 64 else 16 * T) // page) * page
    (q, *pages, lengths), _ = call_in_bfloat16(rng, page, layout, T, S, H)
    key, value = checked(q, *pages, layout)
    problem, operands = normalise(q, key, value, key_value_seq_lengths=lengths, **keywords)
    assert_right_and_free_of_races(problem, operands, decode if applies(problem) else forward)


@pytest.mark.parametrize("H", [64, 72, 256])
@pytest.mark.parametrize(("page", "T"), [(16, 1), (32, 1), (64, 1), (256, 1), (16, 20), (16, 300), (192, 300)])
def test_lowers(page, T, H):
    shape = jax.ShapeDtypeStruct
    q, pages = shape((2, T, 8, H), jnp.bfloat16), shape((40, page, 2, H), jnp.bfloat16)
    call = lambda *x: pallas_fa.paged_attention(*x, implementation="mosaic_gpu")
    assert kernels(call, q, pages, pages, shape((2, 16), jnp.int32), shape((2,), jnp.int32)) == 1


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(page=48), "pages of 48 rows; it loads pages of 16, 32 or a multiple of 64"),
        (dict(T=200, page=48), "pages of 48 rows; it loads pages of 16, 32 or a multiple of 64"),
        (dict(H=60), "H=60 and Hv=60; it takes multiples of 8 of keys in pages"),
    ],
)
def test_what_the_kernel_does_not_take(changed, message):
    sizes = dict(page=16, T=1, H=64) | changed
    q = jnp.zeros((1, sizes["T"], 1, sizes["H"]), jnp.bfloat16)
    pages = jnp.zeros((2, sizes["page"], 1, sizes["H"]), jnp.bfloat16)
    arguments = q, pages, pages, jnp.zeros((1, 2), int), jnp.ones(1, int)
    with pytest.raises(NotImplementedError, match=message):
        pallas_fa.paged_attention(*arguments, implementation="mosaic_gpu")
    assert not pallas_fa.paged_attention(*arguments).any()  # XLA takes it


def test_the_kernel_is_the_default_on_hopper():
    shape = jax.ShapeDtypeStruct
    q, pages = shape((2, 1, 8, 64), jnp.bfloat16), shape((40, 16, 2, 64), jnp.bfloat16)
    arguments = q, pages, pages, shape((2, 16), jnp.int32), shape((2,), jnp.int32)
    assert kernels(pallas_fa.paged_attention, *arguments) == 1
    assert "mosaic_gpu: runs this call where it is lowered for a CUDA GPU" in cache.explain(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("name", CALLS | PROMPTS)
def test_the_compiled_kernel_reads_what_it_reads_of_one_piece(name, H, rng):
    # Hopper's kernels whatever the size of a page: small pages stay with them, and keys in one piece may not.
    reads_what_it_reads_of_one_piece(name, H, rng, "mosaic_gpu", config=Config())


def reads_what_it_reads_of_one_piece(name, H, rng, kernels, config=None):
    page, layout, T, keywords = (CALLS | PROMPTS)[name]
    (q, *pages, lengths), whole = call_in_bfloat16(rng, page, layout, T, 1024 if 1024 % page == 0 else 960, H)
    if page == 192:  # whose tiles have fewer keys
        config = Config(ForwardConfig(2, 64))
    options = dict(implementation=kernels, config=config, return_residual=True, **keywords)
    got = jax.jit(lambda *x: pallas_fa.paged_attention(*x, page_layout=layout, **options))(q, *pages, lengths)
    want = jax.jit(lambda *x: pallas_fa.dot_product_attention(*x, key_value_seq_lengths=lengths, **options))(*whole)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
