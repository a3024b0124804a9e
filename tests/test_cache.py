"""Caches as values: what append writes, in place, and nothing out of bounds; attention to what is there; the allocator."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.cache import KeyValueCache, OutOfPages, PageAllocator, PagedCache
from tests.test_sharding import mesh_of

RNG = np.random.default_rng(0)
B, S, N, K, H, PAGE = 3, 12, 4, 2, 8, 4


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def contiguous(length=S):
    return KeyValueCache.empty(B, length, K, H, 2 * H, jnp.float32)


def paged(pages=S // PAGE):
    """Pages in any order, more of them than the sequences have."""
    cache = PagedCache.empty(B, pages, 2 * B * pages, PAGE, K, H, 2 * H, jnp.float32)
    table = RNG.permutation(2 * B * pages)[: B * pages].astype(np.int32).reshape(B, pages)
    return dataclasses.replace(cache, page_table=jnp.asarray(table))


def rows_of(cache):
    """Keys and values [B, S, K, dim] of either cache."""
    if isinstance(cache, KeyValueCache):
        return np.asarray(cache.key), np.asarray(cache.value)
    table = np.asarray(cache.page_table)
    return tuple(np.asarray(x)[table].reshape(B, -1, *x.shape[2:]) for x in (cache.key_pages, cache.value_pages))


@pytest.mark.parametrize("make", [contiguous, paged])
def test_append_writes_the_real_rows_that_fit_and_nothing_else(make):
    cache, append = make(), jax.jit(lambda cache, *rows: cache.append(*rows))
    want, there, lost = tuple(x.copy() for x in rows_of(cache)), np.zeros(B, int), np.zeros(B, int)
    before = cache
    for T, real in ((5, (5, 0, 3)), (4, None), (4, (1, 4, 9)), (3, (3, 3, 1))):
        new = normal(B, T, K, H), normal(B, T, K, 2 * H)
        cache = append(cache, *new, None if real is None else jnp.array(real))
        for b in range(B):
            count = T if real is None else min(real[b], T)
            fits = min(count, S - there[b])
            for kept, rows in zip(want, new, strict=True):
                kept[b, there[b] : there[b] + fits] = rows[b, :fits]
            there[b] += fits
            lost[b] += count - fits
    for got, kept in zip(rows_of(cache), want, strict=True):
        np.testing.assert_array_equal(got, kept)
    np.testing.assert_array_equal(cache.lengths, there)
    np.testing.assert_array_equal(cache.dropped, lost)
    assert lost.any() and not before.lengths.any()
    if make is paged:  # pages of no sequence
        others = np.setdiff1d(np.arange(len(cache.key_pages)), cache.page_table)
        assert not np.asarray(cache.key_pages)[others].any()


def test_rows_without_a_page_are_dropped_with_all_behind_them():
    cache = paged()
    table = cache.page_table.at[0, 1].set(-1).at[1, 0].set(len(cache.key_pages)).at[2, 2].set(-7)
    cache = dataclasses.replace(cache, page_table=table)
    after = cache.append(normal(B, S, K, H), normal(B, S, K, 2 * H))
    np.testing.assert_array_equal(after.lengths, [PAGE, 0, 2 * PAGE])
    np.testing.assert_array_equal(after.dropped, [S - PAGE, S, S - 2 * PAGE])
    written = np.flatnonzero(np.asarray(after.key_pages).any(axis=(1, 2, 3)))
    np.testing.assert_array_equal(written, np.sort([table[0, 0], table[2, 0], table[2, 1]]))


@pytest.mark.parametrize("make", [contiguous, paged])
def test_arrays_may_be_those_of_numpy(make):
    """As of a cache that was kept in a file."""
    rows, query = (normal(B, 2, K, H), normal(B, 2, K, 2 * H)), normal(B, 2, N, H)
    cache = make()
    kept = jax.tree.map(np.asarray, cache).append(*rows)
    np.testing.assert_array_equal(kept.attend(query), cache.append(*rows).attend(query))


@pytest.mark.parametrize("make", [contiguous, paged])
def test_negative_lengths_write_nothing(make):
    cache = dataclasses.replace(make(), lengths=jnp.full(B, -2))
    after = cache.append(normal(B, 1, K, H), normal(B, 1, K, 2 * H))
    assert not any(x.any() for x in rows_of(after)) and after.dropped.tolist() == [1] * B


@pytest.mark.parametrize("make", [contiguous, paged])
def test_a_window_may_be_one_array_for_both_sides(make):
    """Of two sequences, where an array of two numbers could be taken for one number each."""
    cache = jax.tree.map(lambda x: x if make is paged and x.ndim == 4 else x[:2], make())
    cache = cache.append(normal(2, 5, K, H), normal(2, 5, K, 2 * H))
    q = normal(2, 1, N, H)
    want = cache.attend(q, local_window_size=(3, 0))
    np.testing.assert_array_equal(cache.attend(q, local_window_size=jnp.array([3, 0])), want)


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("loop", [False, True], ids=["call", "scan"])
def test_append_is_in_place(make, loop):
    """In the compiled program nothing copies an array as large as the keys, and outputs are the donated inputs."""
    cache = make(64)
    rows = normal(B, 2, K, H), normal(B, 2, K, 2 * H)

    @functools.partial(jax.jit, donate_argnums=0)
    def append(cache, key, value):
        if not loop:
            return cache.append(key, value)
        return jax.lax.scan(lambda cache, _: (cache.append(key, value), None), cache, length=3)[0]

    compiled = append.lower(cache, *rows).compile()
    whole = min(x.size for x in rows_of(cache))
    copied = re.findall(r"= \w+\[([\d,]*)\][^=]* (?:copy|copy-start|concatenate|pad)\(", compiled.as_text())
    assert not [dims for dims in copied if np.prod([int(x) for x in dims.split(",") if x]) >= whole]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache) if x.ndim > 2)


@pytest.mark.parametrize("make", [contiguous, paged])
def test_prompts_of_different_lengths_then_steps_are_the_whole_sequences(make):
    cache, prompts = make(), np.array([5, 2, 4])
    q, k, v = normal(B, S, N, H), normal(B, S, K, H), normal(B, S, K, 2 * H)
    arguments: dict = dict(local_window_size=(3, 0), logits_soft_cap=5.0)
    whole = pallas_fa.dot_product_attention(q, k, v, is_causal=True, **arguments)

    @jax.jit
    def step(cache, q, k, v, lengths):
        cache = cache.append(k, v, lengths)
        return cache.attend(q, lengths=lengths, **arguments), cache

    out, cache = step(cache, q[:, :5], k[:, :5], v[:, :5], prompts)
    for b, length in enumerate(prompts):
        np.testing.assert_allclose(out[b, :length], whole[b, :length], atol=1e-6)
        assert not np.any(out[b, length:])
    at = lambda x, i: jnp.stack([x[b, prompts[b] + i : prompts[b] + i + 3] for b in range(B)])
    for i in (0, 3):
        out, cache = step(cache, at(q, i), at(k, i), at(v, i), None)
        np.testing.assert_allclose(out, at(whole, i), atol=1e-6)
    np.testing.assert_array_equal(cache.lengths, prompts + 6)


def test_a_mask_of_drafts():
    """A tree of drafts: the third follows the first, not the second."""
    cache = contiguous().append(normal(B, 6, K, H), normal(B, 6, K, 2 * H))
    q, drafts = normal(B, 3, N, H), jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    seen = jnp.ones((3, S), bool).at[:, 3:6].set(drafts)
    out, lse = cache.attend(q, seen, return_residual=True)
    want = pallas_fa.dot_product_attention(
        q, cache.key[:, :6], cache.value[:, :6], mask=seen[:, :6], return_residual=True
    )
    np.testing.assert_allclose(out, want[0], atol=1e-6)
    np.testing.assert_allclose(lse, want[1], atol=1e-6)


@pytest.mark.parametrize(
    "kind, make", [(AxisType.Auto, paged), (AxisType.Explicit, contiguous), (AxisType.Explicit, paged)]
)
def test_sharded_caches(kind, make):
    """Heads over devices, and sequences, where they are no pages: keys stay where they are."""
    mesh, heads = mesh_of(kind, data=3, model=2), P("data", None, "model")
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    cache, rows = make(128), (normal(B, 1, N, H), normal(B, 1, K, H), normal(B, 1, K, 2 * H))
    of_keys = P(None, None, "model") if make is paged else heads
    sharded = jax.tree.map(lambda x: place(x, of_keys if x.ndim == 4 else P("data")), cache)

    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache.attend(q), cache

    compiled = jax.jit(step, donate_argnums=0).lower(sharded, *(place(x, heads) for x in rows)).compile()
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert all(np.prod([int(x) for x in dims.split(",")]) <= max(x.size for x in rows) for dims in gathered)
    got, want = compiled(sharded, *(place(x, heads) for x in rows)), step(cache, *rows)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


QUERY, ROWS = np.zeros((B, 1, N, H), np.float32), tuple(np.zeros((B, 1, K, x), np.float32) for x in (H, 2 * H))


def with_lengths(cache, lengths):
    return dataclasses.replace(cache, lengths=lengths)


WRONG = {
    "more rows than room": (lambda c: c.append(normal(B, 13, K, H), normal(B, 13, K, 2 * H)), r"T=13 rows.*room for 12"),
    "dtype": (lambda c: c.append(*(jnp.zeros((B, 1, K, x), jnp.bfloat16) for x in (H, 2 * H))), "key.dtype=bfloat16"),
    "heads": (lambda c: c.append(normal(B, 1, N, H), normal(B, 1, K, 2 * H)), r"key.shape=\(3, 1, 4, 8\).*\(3, 1, 2, 8\)"),
    "value head dim": (lambda c: c.append(normal(B, 1, K, H), normal(B, 1, K, H)), r"value.shape=\(3, 1, 2, 8\)"),
    "lengths": (lambda c: c.append(normal(B, 1, K, H), normal(B, 1, K, 2 * H), jnp.ones(2, int)), r"lengths.shape=\(2,\)"),
    "window of three": (lambda c: c.attend(normal(B, 1, N, H), local_window_size=(1, 2, 3)), "local_window_size=.*pair"),
    "negative window": (lambda c: c.attend(normal(B, 1, N, H), local_window_size=(-2, 0)), r"local_window_size\[0\]=-2"),
    "window of a batch": (lambda c: c.attend(QUERY, local_window_size=(np.ones(2, int), 0)), r"size\[0\].shape=\(2,\)"),
    "lengths of the cache": (lambda c: with_lengths(c, 3).append(*ROWS), r"the cache's lengths=3, but.*lengths=jnp.full"),
    "lengths of 64 bits": (lambda c: with_lengths(c, np.full(B, 2**32 + 1)).append(*ROWS), "holds 4294967297.*int32"),
    "their size": (lambda c: with_lengths(c, jnp.ones((B, 1), int)).attend(QUERY), r"lengths have the shape \(3, 1\)"),
    "their dtype": (lambda c: with_lengths(c, jnp.ones(B)).attend(QUERY), "the cache's lengths.*dtype float32, but must be"),
    "lengths past the room": (lambda c: with_lengths(c, np.array([3, 13, 2])).append(*ROWS), "hold 13, but .* 0 to 12"),
    "lengths before row 0": (lambda c: with_lengths(c, np.full(B, -2)).attend(QUERY), "hold -2, but must be from 0 to 12"),
    "other dropped": (lambda c: dataclasses.replace(c, dropped=jnp.zeros(2, int)).append(*ROWS), r"dropped have .*\(2,\)"),
    "no dropped": (lambda c: dataclasses.replace(c, dropped=None).append(*ROWS), r"dropped=None, .*, dropped=jnp.full"),
    "a hole in lengths": (lambda c: c.append(*ROWS, [1, None, 1]), r"lengths=\[1, None, 1\] must be an int array"),
    "no key": (lambda c: c.append(None, None), "key=None.*Pass an array"),
    "key beside the cache": (lambda c: c.attend(QUERY, key=ROWS[0]), r"key of shape \(3, 1, 2, 8\).*the cache has it"),
    "query without T": (lambda c: c.attend(QUERY[:, 0]), r"query.shape=\(3, 4, 8\) must be \[B, T, N, H\].*each is T=1"),
    "another batch": (lambda c: c.attend(QUERY[:2]), r"query.shape=\(2, 1, 4, 8\).*B=3 sequences of the cache"),
    "heads of the query": (lambda c: c.attend(QUERY[:, :, :3]), "N=3 heads, and the cache K=2.*transpose it"),
    "float lengths": (lambda c: c.append(normal(B, 1, K, H), normal(B, 1, K, 2 * H), jnp.ones(B)), "lengths.dtype"),
}  # fmt: skip


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name, make):
    call, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(call, make())


# What is done to the keys of a cache, and what the message says.
BROKEN = {
    "other rows": (
        lambda x: x[:, :-1],
        r"float32 \(.*\) and .*float32 \(.*\) must agree but for the head dim: .*replace both",
    ),
    "other sequences or pages": (lambda x: x[:-1], "must agree but for the head dim"),
    "other heads": (lambda x: x[:, :, :-1], "must agree but for the head dim"),
    "another dtype": (
        lambda x: x.astype(jnp.bfloat16),
        "bfloat16 .* and .* float32 .* must agree but for the head dim",
    ),
    "integers": (lambda x: x.astype(jnp.int8), r"dtype=int8 must be a float type. Make the cache with `empty`"),
    "layers": (lambda x: x[None], r"shape=\(1, .*, but must be an array \[.*, head dim\]. Make the cache with `empty`"),
    "a list": (lambda x: [1.0], "is a list, but must be an array"),
    "text": (lambda x: "keys", "is a str, but must be an array"),
    "nothing": (lambda x: None, "is a NoneType, but must be an array"),
}


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("name", BROKEN)
def test_keys_and_values_belong_together(name, make):
    change, message = BROKEN[name]
    cache, keys = make(), "key" if make is contiguous else "key_pages"
    cache = dataclasses.replace(cache, **{keys: change(getattr(cache, keys))})
    for call in (lambda: cache.append(*ROWS), lambda: cache.attend(QUERY)):
        with pytest.raises((ValueError, TypeError), match=f"^the cache's {keys}.*{message}"):
            call()


def test_wrong_sizes_and_arguments():
    rows = normal(B, 1, K, H), normal(B, 1, K, 2 * H)
    with pytest.raises(ValueError, match=r"page_table.shape=\(2, 4\) must be \[B, pages per sequence\], with B=3"):
        dataclasses.replace(paged(), page_table=jnp.zeros((2, 4), int)).append(*rows)
    with pytest.raises(TypeError, match="page_table.dtype=float32 must be an integer"):
        dataclasses.replace(paged(), page_table=jnp.zeros((B, 4))).append(*rows)
    with pytest.raises(ValueError, match="length=0 must be"):
        KeyValueCache.empty(1, 0, 1, 8)
    with pytest.raises(ValueError, match="page_size=0 must be"):
        PagedCache.empty(1, 1, 1, 0, 1, 8)
    with pytest.raises(ValueError, match="num_pages=True must be an int of at least 1"):
        PageAllocator(True, 16)
    with pytest.raises(ValueError, match="tokens=2.0 must be an int of at least 0"):
        PageAllocator(4, 16).allocate(2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="batch=2.0 must be an int"):
        KeyValueCache.empty(2.0, 4, 1, 8)  # pyright: ignore[reportArgumentType]
    for cache in (contiguous(), paged()):
        with pytest.raises(ValueError, match=r"^lengths.shape=\(2,\) must be \[B\]=\(3,\): how many of the queries"):
            cache.attend(normal(B, 1, N, H), lengths=jnp.ones(2, int))
        with pytest.raises(TypeError, match="^dropout_rate=.* must be a Python float"):
            cache.attend(normal(B, 1, N, H), dropout_rate=jnp.zeros(2))
        with pytest.raises(TypeError, match="^lengths.dtype=float32 must be"):
            cache.attend(normal(B, 1, N, H), lengths=jnp.ones(B))
    for dtype in ("int8", "bf16", None, 3):
        with pytest.raises(TypeError, match=f"dtype={dtype!r} must be a float dtype"):
            KeyValueCache.empty(1, 4, 1, 8, dtype=dtype)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="is_causal=True cannot be given here"):
        contiguous().attend(normal(B, 1, N, H), is_causal=True)


def test_sizes_may_be_those_of_numpy():
    size = np.uint8(200)
    allocator = PageAllocator(np.int64(4), size)
    sequence = allocator.allocate(np.int32(700))
    assert allocator.free_pages == 0 and allocator.fork(sequence, np.int16(600), 600)[1] == 600
    assert KeyValueCache.empty(np.int64(2), size, np.int16(1), np.array(8)).key.shape == (2, 200, 1, 8)
    assert PagedCache.empty(np.int64(2), np.int8(3), np.int8(4), size, 1, 8).key_pages.shape == (4, 200, 1, 8)


class Allocations(RuleBasedStateMachine):
    """Any sequence of calls, beside a model that says which (sequence, page of its rows) has which page."""

    sequences = Bundle("sequences")

    @initialize(num_pages=st.integers(1, 9), page_size=st.integers(1, 3))
    def start(self, num_pages, page_size):
        self.allocator, self.tokens = PageAllocator(num_pages, page_size), {}

    def pages(self, sequence):
        table = self.allocator.page_table([sequence], self.allocator.num_pages)[0]
        return [int(page) for page in table if page >= 0]

    def count(self, tokens):
        return -(-tokens // self.allocator.page_size)

    def attempt(self, needed, call):
        """Calls, and checks that it fails if and only if pages are missing, and that it changes nothing then."""
        free, before = self.allocator.free_pages, {s: self.pages(s) for s in self.tokens}
        try:
            result = call()
        except OutOfPages as error:
            assert needed > free and str(free) in str(error)
            assert self.allocator.free_pages == free and before == {s: self.pages(s) for s in self.tokens}
            return None
        assert needed <= free and self.allocator.free_pages == free - needed
        return result

    @rule(target=sequences, tokens=st.integers(0, 9))
    def allocate(self, tokens):
        sequence = self.attempt(self.count(tokens), lambda: self.allocator.allocate(tokens))
        if sequence is None:
            return multiple()
        assert sequence not in self.tokens
        self.tokens[sequence] = tokens
        return sequence

    @rule(sequence=sequences, tokens=st.integers(0, 9))
    def extend(self, sequence, tokens):
        before = self.pages(sequence)
        needed = max(0, self.count(tokens) - len(before))
        self.attempt(needed, lambda: self.allocator.extend(sequence, tokens))
        assert self.pages(sequence)[: len(before)] == before  # rows stay where they are

    @rule(target=sequences, sequence=sequences, shared=st.integers(0, 9), more=st.integers(0, 4))
    def fork(self, sequence, shared, more):
        before = self.pages(sequence)
        if self.count(shared) > len(before):
            with pytest.raises(ValueError, match="has pages for"):
                self.allocator.fork(sequence, shared, shared + more)
            return multiple()
        whole = shared // self.allocator.page_size
        needed = self.count(shared + more) - whole
        made = self.attempt(needed, lambda: self.allocator.fork(sequence, shared, shared + more))
        if made is None:
            return multiple()
        new, found = made
        assert found == whole * self.allocator.page_size and self.pages(new)[:whole] == before[:whole]
        assert not set(self.pages(new)[whole:]) & {page for s in self.tokens for page in self.pages(s)}
        self.tokens[new] = shared + more
        return new

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        self.allocator.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(ValueError, match="is not there"):
            self.allocator.free(sequence)

    @invariant()
    def every_page_is_free_or_someones(self):
        if not hasattr(self, "tokens"):
            return
        used = [self.pages(s) for s in self.tokens]
        assert all(len(set(pages)) == len(pages) for pages in used)
        assert len({page for pages in used for page in pages}) + self.allocator.free_pages == self.allocator.num_pages
        # A page of two sequences is at the same place in both, since they begin alike.
        places = {}
        for pages in used:
            for i, page in enumerate(pages):
                assert places.setdefault(page, i) == i


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_wrong_use_of_the_allocator():
    allocator = PageAllocator(4, 16)
    first = allocator.allocate(40)
    with pytest.raises(OutOfPages, match="2 more pages of 16 rows are needed.* only 1 are free"):
        allocator.allocate(17)
    with pytest.raises(ValueError, match="tokens=3 is less than shared=32"):
        allocator.fork(first, 32, 3)
    with pytest.raises(ValueError, match="pages_per_sequence=2, but sequence 0 has 3 pages"):
        allocator.page_table([first], 2)
    with pytest.raises(ValueError, match="tokens=-1"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="page_size=0"):
        PageAllocator(4, 0)
    wrong: dict = {
        r"sequence=\[0\] must be an int of at least 0. Pass one sequence": lambda a: a.free([first]),
        "sequence=None must be": lambda a: a.extend(None, 4),
        "sequence=7 is not there": lambda a: a.page_table([7], 2),
        "shared=None must be an int of at least 0": lambda a: a.fork(first, None, 4),
        "shared=-1 must be": lambda a: a.fork(first, -1, 4),
        "tokens='x' must be": lambda a: a.fork(first, 16, "x"),
        r"sequences=0 must be a list": lambda a: a.page_table(first, 3),
        r"sequences=\[0, 0\] names 0 more than once.*fork": lambda a: a.page_table([first, first], 3),
        "pages_per_sequence=-1 must be": lambda a: a.page_table([first], -1),
        "pages_per_sequence='3' must be": lambda a: a.page_table([first], "3"),
    }
    for message, call in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call(allocator)
    assert allocator.free_pages == 1
    np.testing.assert_array_equal(allocator.page_table({first: None}.keys(), 3)[0] >= 0, True)  # pyright: ignore[reportArgumentType]
