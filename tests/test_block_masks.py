"""Block masks, computed and given, against dense truth; what callers can get wrong."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_fa
from pallas_fa import masks
from pallas_fa.backends.gpu import visit_lists
from pallas_fa.backends.hopper.backward.choose import choose
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.config import BackwardConfig, Config, ForwardConfig
from pallas_fa.backends.xla import attention as xla
from pallas_fa.masks import BlockMask, Causal, Custom, Dense, Window, block_lists, block_mask
from pallas_fa.operands.part import Part
from pallas_fa.problem import normalise
from tests.cases import Case
from tests.interpreted_backward import GPU, is_right_and_free_of_races, xla_gradients
from tests.interpreted_backward import interpreted as interpreted_backward
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races, interpreted

pytestmark = pytest.mark.usefixtures("quick_compilation")
B, T, S, N, K, H = 2, 150, 203, 4, 2, 16


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


QKV = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H + 8)


def attend(mask, implementation, qkv=QKV):
    """(out, lse, gradients of a function of both)"""

    def loss(qkv):
        out, lse = pallas_fa.dot_product_attention(*qkv, mask=mask, implementation=implementation, return_residual=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, jnp.sin(lse), 0)), (out, lse)

    gradients, results = jax.jit(jax.grad(loss, has_aux=True))(qkv)
    return results, gradients


def close(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), got, want)


def natten(t, s, width=15, reach=2):
    near = lambda i, j: abs(i - j) <= reach
    return near(t // width, s // width) & near(t % width, s % width)


PATTERNS = {
    "natten": lambda b, n, t, s: natten(t, s),
    "dilated window": lambda b, n, t, s: (abs(t - s) <= 60) & ((t - s) % 4 == 0),
    "sinks and a window": lambda b, n, t, s: (s < 3) | ((t - 20 <= s) & (s <= t)),
    "per head": lambda b, n, t, s: jnp.where(n < 2, s <= t, natten(t, s)),
    "per batch entry, with empty rows": lambda b, n, t, s: (t // 40 + s // 50 + b) % 3 == 0,
}


def truth(fn):
    """bool [B, N, T, S]"""
    return np.broadcast_to(fn(*np.ogrid[:B, :N, :T, :S]), (B, N, T, S))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_computed_block_mask_is_its_mask(name, small_chunks):
    fn = PATTERNS[name]
    block, batch, heads = (32, 48), B if "batch" in name else (), N if "head" in name else None
    made = block_mask(Custom(fn), T, S, block, batch=batch, heads=heads)
    assert made.blocks.shape == (*((B,) if "batch" in name else ()), N if "head" in name else 1, 5, 5)
    want = attend(truth(fn), "reference")
    close(attend(made, "xla"), want)
    if name == "natten":
        close(attend(made, "reference"), want)
        close(attend(Custom(fn, ranges=made), "xla"), want)


@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_are_dense_masks(seed, small_chunks):
    rng = np.random.default_rng(seed)
    q, kv = rng.integers(5, 90, 2)
    shape = (*((B, N), (1, N), (1, 1))[seed], -(-T // q), -(-S // kv))
    blocks = rng.random(shape) < 0.3
    dense = blocks.repeat(q, 2)[:, :, :T].repeat(kv, 3)[..., :S]
    mask = BlockMask(blocks, (q, kv))
    if seed == 2:
        mask, dense = mask | Window(5, 0), dense | truth(lambda b, n, t, s: (s <= t) & (t - 5 <= s))
    want = attend(dense, "reference")
    for implementation in ("reference", "xla")[seed > 0 :]:
        close(attend(mask, implementation), want)


def test_it_travels_through_transformations(small_chunks):
    """It is a pytree that is built once, outside or inside of jit, and may have a value for each step of vmap or scan."""
    fn, blocks = PATTERNS["natten"], np.random.default_rng(0).random((3, 2, 3)) < 0.6
    attend = lambda mask: pallas_fa.dot_product_attention(*QKV, mask=mask, implementation="xla")
    want = attend(truth(fn))
    inside = jax.jit(lambda: attend(block_mask(Custom(fn), T, S, 64)))()
    outside = jax.jit(attend)(block_mask(Custom(fn), T, S, 64))
    for got in (inside, outside):
        np.testing.assert_allclose(got, want, atol=2e-6)
    many = lambda blocks: attend(BlockMask(blocks, (75, 80)))
    want = np.stack([many(x) for x in blocks])
    np.testing.assert_allclose(jax.vmap(many)(blocks), want, atol=2e-6)
    np.testing.assert_allclose(jax.lax.map(many, blocks), want, atol=2e-6)


def test_made_of_arrays_on_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    on = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    prefix, q = np.arange(1, 9).reshape(4, 2, 1, 1), normal(4, 8, 2, 8)
    rule = lambda prefix: Custom(in_prefix, prefix) | Dense(np.eye(8, dtype=bool))
    want = block_mask(rule(prefix), 8, 8, block=4, batch=4, heads=2)
    made = lambda prefix: block_mask(rule(prefix), 8, 8, block=4, batch=4, heads=2)
    of_two = lambda prefix: block_mask(rule(prefix), 8, 8, block=4, batch=(2, 2), heads=2)
    for run in (made, jax.jit(made)):
        got = run(on(prefix, "data", "model"))
        np.testing.assert_array_equal(got.blocks, want.blocks)
        qkv = (on(q, "data"),) * 3
        close(
            pallas_fa.dot_product_attention(*qkv, mask=got), pallas_fa.dot_product_attention(q, q, q, mask=rule(prefix))
        )
    got = of_two(on(prefix.reshape(2, 2, 2, 1, 1), None, None, "model"))
    np.testing.assert_array_equal(got.blocks.reshape(want.blocks.shape), want.blocks)


def in_prefix(b, n, t, s, prefix):
    return s < prefix


def test_blocks_of_other_arrays_compile_nothing(caplog):
    rule = lambda b, n, t, s, ids: (s <= t) | (ids == 1)
    make = lambda i: block_mask(Custom(rule, np.full((1, S), i)), T, S, block=32)
    make(0)
    with jax.log_compiles():
        every = make(1)
    assert not [x for x in caplog.messages if x.startswith("Compiling")]
    assert (every.blocks > 0).all()


def test_no_batch_dims():
    """`batch=()` says so; blocks of one entry or head are for others only where the mask's rule has no index."""
    by_entry, by_head = Custom(lambda b, n, t, s: s <= t + b), Custom(lambda b, n, t, s: s <= t + n)
    q = normal(8, 2, 8)
    close(
        pallas_fa.dot_product_attention(q, q, q, mask=block_mask(by_entry, 8, 8, block=4, batch=())),
        pallas_fa.dot_product_attention(q, q, q, mask=by_entry),
    )
    for made, what in (
        (block_mask(by_entry, 8, 8, block=4, batch=1), r"made for 1 batch entries.* has 2\. .*batch=2\)"),
        (block_mask(by_entry, 8, 8, block=4, batch=()), r"made for 1 batch entries.* has 2\. .*batch=2\)"),
        (block_mask(by_head, 8, 8, block=4, heads=1), r"made for 1 query heads.* has 2\. .*heads=2\)"),
    ):
        with pytest.raises(ValueError, match=what):
            pallas_fa.dot_product_attention(q[None].repeat(2, 0), *(q[None].repeat(2, 0),) * 2, mask=made)
    of_arrays = block_mask(Custom(in_prefix, np.full((1, 1, 1, 1), 5)), 8, 8, block=4, batch=1, heads=1)
    assert pallas_fa.dot_product_attention(*(q[None].repeat(2, 0),) * 3, mask=of_arrays).shape == (2, 8, 2, 8)


def test_second_derivatives():
    mask = BlockMask(np.random.default_rng(0).random((2, 3)) < 0.6, (75, 80))
    dense = Dense(np.asarray(mask.blocks).repeat(75, 0).repeat(80, 1)[:T, :S])

    def hessian_product(mask):
        loss = lambda q: jnp.sin(pallas_fa.dot_product_attention(q, *QKV[1:], mask=mask, implementation="xla")).sum()
        return jax.grad(lambda q: jnp.sum(jnp.sin(jax.grad(loss)(q))))(QKV[0])

    np.testing.assert_allclose(hessian_product(mask), hessian_product(dense), atol=1e-5)


def test_bottom_right_is_aligned_when_the_blocks_are_computed():
    """Not to the lengths of the call, or the states would be those of another mask."""
    mask = block_mask(Causal("bottom_right"), T, S, 64)
    kv = np.array([S, 60])
    call = functools.partial(pallas_fa.dot_product_attention, *QKV, key_value_seq_lengths=kv, implementation="xla")
    dense = truth(lambda b, n, t, s: s <= t + S - T)
    np.testing.assert_allclose(call(mask=mask), call(mask=dense), atol=2e-6)


# ---- kernels: their bodies are interpreted with the other masks ---------------------------------------------------------


@pytest.mark.parametrize("few", (512, 1), ids=("by sums", "by a sort"))
@pytest.mark.parametrize("descending", (True, False))
def test_lists_have_boundary_tiles_first(descending, few, monkeypatch):
    monkeypatch.setattr(block_lists, "_FEW", few)
    states = np.random.default_rng(0).integers(0, 3, (2, 3, 5, 9)).astype(np.int8)
    table = np.asarray(block_lists.of_states(states, descending))
    for at in np.ndindex(2, 3, 5):
        boundary, full = (np.flatnonzero(states[at] == state)[:: -1 if descending else 1] for state in (1, 2))
        counts, listed = table[at][:2], table[at][2:]
        assert counts.tolist() == [len(boundary), len(boundary) + len(full)]
        np.testing.assert_array_equal(listed[: counts[1]], [*boundary, *full])
        assert sorted(listed) == list(range(9)), "what an empty list starts with is a tile, too"


def _lists(mask, sizes, tiles, by_keys):
    """(count of boundary tiles, tiles) of each batch entry and row of tiles, and whether the mask had the lists."""
    form, table = (
        visit_lists.Form.of(mask, sizes, tiles, by_keys),
        visit_lists.table(mask, sizes, tiles, (True,) * 2, by_keys),
    )
    rows, table = -(-sizes[by_keys] // tiles[by_keys]), np.asarray(table)
    found = [visit_lists.in_table(table, b, 0, row, form) for b in range(table.shape[0]) for row in range(rows)]
    return [(int(x.boundary), [int(x.tile(i)) for i in range(int(x.count))]) for x in found], form.ready


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("tiles", [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256)])
def test_lists_of_blocks_are_those_of_their_tiles(tiles, by_keys):
    rng, (T, S) = np.random.default_rng(0), (256, 384)
    dense = np.kron(rng.random((2, 1, T // 64, S // 64)) < 0.5, np.ones((1, 1, 64, 64), bool))
    made = block_mask(Dense(dense & (rng.random((2, 1, T, S)) < 0.9999)), T, S, 128, batch=2)
    mask = normalise(np.zeros((2, T, 1, 1)), *(np.zeros((2, S, 1, 1)),) * 2, mask=made)[1].mask
    got, ready = _lists(mask, (T, S), tiles, by_keys)
    want, _ = _lists(dataclasses.replace(mask, lists=None), (T, S), tiles, by_keys)
    assert got == want
    assert ready == (tiles[1] < 256)


def test_lists_are_made_where_no_block_is_ragged_and_kept_by_the_whole():
    made = lambda T, S: jax.eval_shape(lambda: block_mask(Causal(), T, S))
    assert made(200, 256).lists is None and made(2**18, 2**18).lists is None
    rows, columns = made(256, 384).lists
    assert (rows.shape, columns.shape) == ((1, 2, 5), (1, 3, 4))
    bound: Any = normalise(*(jnp.zeros((1, 256, 1, 1)),) * 3, mask=block_mask(Causal(), 256, 256))[1].mask
    assert bound.moved(Part((0, 0, 0, 0), (1, 1, 256, 256))).lists is not None
    assert bound.moved(Part((0, 0, 128, 0), (1, 1, 128, 256))).lists is None


@pytest.mark.parametrize("warps", [1, 2])
def test_interpreted_kernels_read_the_lists_of_the_mask(warps):
    """Of all heads, the first key blocks go first."""
    q, k, v, d_out = (normal(1, length, 2, 128).astype(jnp.bfloat16) for length in (256, 384, 384, 256))
    mask = block_mask(Custom(lambda b, n, t, s: (s < 3) | ((t - 20 <= s) & (s <= t + 90))), 256, 384)
    tiles = Config(ForwardConfig(2, 64), BackwardConfig(store_warps=warps))
    problem, operands = normalise(q, k, v, mask=mask, config=tiles)
    assert_right_and_free_of_races(problem, operands)
    gpu = dataclasses.replace(GPU, multiprocessors=4)
    plan = choose(problem, passes(problem)[0], gpu, interpret=True)
    assert plan.order.grid.lead == 2 and plan.dq.claims_late == (warps == 2)
    residuals = *xla.forward(problem, operands), jnp.asarray(d_out), jnp.zeros((1, 256, 2))
    got, races = interpreted_backward(problem, operands, *residuals, gpu=gpu)
    assert not races
    for x, true in zip(got, xla_gradients(problem, operands, *residuals), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(true, np.float32), atol=2e-2, rtol=2e-2)


def test_ragged_tiles_are_full_only_where_the_kernel_tests_no_end():
    mask = normalise(*(jnp.zeros((1, 100, 1, 1)),) * 3, mask=BlockMask(np.ones((2, 2), bool), 64))[1].mask
    for tails, want in (((True, False), [[2, 1], [2, 1]]), ((False, True), [[2, 2], [1, 1]])):
        np.testing.assert_array_equal(visit_lists.tile_states(mask, (100, 100), (64, 64), tails)[0, 0], want)


def test_the_interpreted_backward_kernel_is_right():
    is_right_and_free_of_races(Case(113, 203, "blocks", "plain", "bfloat16", 2, 1, 128, 128, (1,)), {})


def test_the_kernel_reads_no_values_of_empty_blocks():
    blocks = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], bool)
    x = normal(1, 256, 1, 64).astype(jnp.bfloat16)
    poisoned = np.where(np.arange(256)[:, None, None] // 64 % 2 == 0, np.nan, x).astype(x.dtype)
    problem, operands = normalise(
        x, x, poisoned, mask=BlockMask(blocks, (128, 64)), config=Config(ForwardConfig(2, 64))
    )
    (out, _), races = interpreted(problem, operands)
    assert not races
    is_nan = np.isnan(np.asarray(out, np.float32))
    assert is_nan[:, :128].all() and not is_nan[:, 128:].any()


def _natten_of_heads(b, n, t, s):
    return natten(t, s, 20) & (s >= n)


_GIVEN = BlockMask(np.eye(16, dtype=bool) | (np.arange(16) < 2), 64)
KERNEL_MASKS = {
    "computed": lambda: block_mask(Custom(_natten_of_heads), 1000, 1024, heads=4),
    "given": lambda: _GIVEN & Causal(),
    "ranges": lambda: Custom(_natten_of_heads, ranges=_GIVEN),
}


@pytest.mark.parametrize(
    "name, deterministic", [("computed", False), ("computed", True), ("given", False), ("ranges", False)]
)
def test_kernels_lower(name, deterministic):
    mask = KERNEL_MASKS[name]()
    q, k = (jax.ShapeDtypeStruct((2, length, heads, 128), jnp.bfloat16) for length, heads in ((1000, 4), (1024, 2)))
    keywords = dict(mask=mask, deterministic_gradients=deterministic)
    explained = pallas_fa.explain(q, k, k, **keywords)
    assert "mosaic_gpu: runs this call" in explained and "gradients" not in explained
    loss = lambda qkv: pallas_fa.dot_product_attention(*qkv, **keywords, implementation="mosaic_gpu").sum()
    assert kernels(jax.grad(loss), (q, k, k)) == (3 if deterministic else 2)


def test_small_blocks_run_in_the_kernels_only_with_a_function():
    x, blocks = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16), BlockMask(np.eye(64, dtype=bool), 16)
    assert "blocks of 64 or more" in pallas_fa.explain(x, x, x, mask=blocks)
    with_function = Custom(lambda b, n, t, s: t // 16 == s // 16, ranges=blocks)
    assert "mosaic_gpu: runs this call" in pallas_fa.explain(x, x, x, mask=with_function)


@pytest.mark.parametrize("sizes", ((0, 256, 256), (2, 0, 256), (2, 256, 0), (0, 0, 0)), ids=str)
def test_of_nothing(sizes):
    """Empty batches and sequences run with a block mask, as they do without one."""
    entries, queries, keys = sizes
    q, k = jnp.ones((entries, queries, 2, 8)), jnp.ones((entries, keys, 2, 8))
    ids = masks.Segments(jnp.zeros((entries, queries), int), jnp.zeros((entries, keys), int))
    for mask in (Causal(), ids, Causal() & Custom(lambda b, n, t, s: s > n)):
        blocks = block_mask(mask, queries, keys, batch=(entries,), heads=2)
        out, pullback = jax.vjp(lambda q, mask=blocks: pallas_fa.dot_product_attention(q, k, k, mask=mask), q)
        assert out.shape == pullback(out)[0].shape == q.shape
        assert not out.any()


# ---- what callers can get wrong ----------------------------------------------------------------------------------------

_DEPENDS = "pass batch= and heads="
WRONG = {
    "an int array": (lambda: BlockMask(np.ones((2, 4), int)), "TypeError: BlockMask takes a bool array .* `blocks != 0`"),
    "a vector": (lambda: BlockMask(np.ones(4, bool)), "TypeError: BlockMask takes a bool array"),
    "a hole": (lambda: BlockMask([[True], [True, False]]), "TypeError: BlockMask takes a bool array .*got list"),
    "a function inside": (
        lambda: BlockMask(np.ones((2, 4), bool), mask=PATTERNS["natten"]),
        r"TypeError: mask is a function; it must be a Mask or None.*Custom\(fn\)",
    ),
    "an array inside": (
        lambda: BlockMask(np.ones((2, 4), bool), mask=np.ones((T, S), bool)),
        r"TypeError: mask is a ndarray; it must be a Mask or None.*Dense\(array\)",
    ),
    "no block": (lambda: BlockMask(np.ones((2, 4), bool), 0), "ValueError: block=0 must be"),
    "a function": (lambda: block_mask(PATTERNS["natten"], T, S), r"TypeError: .*function.*Custom\(fn\)"),
    "no mask": (lambda: block_mask(np.ones((T, S), bool), T, S), "TypeError: .*Dense"),
    "a negative length": (lambda: block_mask(Causal(), T, -1), "ValueError: S=-1 must be an int >= 0"),
    "a query as length": (lambda: block_mask(Causal(), QKV[0], S), "ValueError: T of type .* must be an int >= 0"),
    "no heads": (lambda: block_mask(Causal(), T, S, heads=0), "ValueError: heads=0 must be an int >= 1"),
    "an array of entries": (lambda: block_mask(Causal(), T, S, batch="2"), "ValueError: batch='2' must be"),
    "heads": (lambda: block_mask(Custom(PATTERNS["per head"]), T, S), "ValueError: .*on the head.*pass heads="),
    "entries": (lambda: block_mask(Custom(lambda b, n, t, s: s > b), T, S), "ValueError: .*batch entry.*pass batch="),
    "an array of heads": (lambda: block_mask(Dense(np.ones((N, T, S), bool)), T, S), f"ValueError: .*{_DEPENDS}"),
    "other lengths": (lambda: attend(block_mask(Causal(), T, S + 1), "xla"), r"ValueError: .*block_mask\(mask, 150, 203\)"),
    "other blocks": (lambda: attend(BlockMask(np.ones((2, 3), bool)), "xla"), r"ValueError: blocks.shape=.*end in \(2, 2\)"),
    "other heads": (lambda: attend(BlockMask(np.ones((3, 2, 2), bool)), "xla"), "ValueError: blocks.shape=.*broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert re.search(message, f"{error.type.__name__}: {error.value}", re.DOTALL), error.value


def test_states_take_a_byte_a_block():
    made = jax.eval_shape(lambda: block_mask(masks.Window(1000, 0), 2**17, 2**17))
    assert made.blocks.shape == (1, 1024, 1024) and made.blocks.dtype == jnp.int8
