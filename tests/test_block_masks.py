"""Block masks, computed and given, against dense truth; what callers can get wrong."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks
from pallas_fa.masks import BlockMask, Causal, Custom, Dense, Window, block_mask

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
    for mask, implementation in ((made, "reference"), (made, "xla"), (Custom(fn, ranges=made), "xla")):
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), attend(mask, implementation), want)


@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_are_dense_masks(seed, small_chunks):
    rng = np.random.default_rng(seed)
    q, kv = rng.integers(5, 90, 2)
    shape = (*((B, N), (1, N), (1, 1))[seed], -(-T // q), -(-S // kv))
    blocks = rng.random(shape) < 0.3
    dense = blocks.repeat(q, 2)[:, :, :T].repeat(kv, 3)[..., :S]
    given = BlockMask(blocks, (q, kv))
    for mask, allowed in (
        (given, dense),
        (given | Window(5, 0), dense | truth(lambda b, n, t, s: (s <= t) & (t - 5 <= s))),
    ):
        want = attend(allowed, "reference")
        for implementation in ("reference", "xla"):
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), attend(mask, implementation), want)


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


_DEPENDS = "pass batch= and heads="
WRONG = {
    "an int array": (lambda: BlockMask(np.ones((2, 4), int)), "TypeError: BlockMask takes a bool array .* `blocks != 0`"),
    "a vector": (lambda: BlockMask(np.ones(4, bool)), "TypeError: BlockMask takes a bool array"),
    "no block": (lambda: BlockMask(np.ones((2, 4), bool), 0), "ValueError: block=0 must be"),
    "no mask": (lambda: block_mask(np.ones((T, S), bool), T, S), "TypeError: .*Dense"),
    "no length": (lambda: block_mask(Causal(), T, 0), "ValueError: .*S=0 must be"),
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
