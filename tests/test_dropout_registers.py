"""Dropout in the kernels: what a thread does with its registers, and where the tiles of a shard start."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.softmax.dropout import Dropout
from tests.lowering import kernels


class _Words:
    """`arith`, `llvm` and `vector` on NumPy arrays that hold a value for each thread of a warpgroup."""

    class CmpIPredicate:
        ne = None

    addi = staticmethod(lambda a, b: (a + b) % 2**32)
    xori = staticmethod(lambda a, b: a ^ b)
    andi = staticmethod(lambda a, b: a & b)
    ori = staticmethod(lambda a, b: a | b)
    subi = staticmethod(lambda a, b: (a - b) % 2**32)
    shrui = staticmethod(lambda a, b: a >> b)
    mului_extended = staticmethod(lambda a, b: (a * b % 2**32, a * b // 2**32))
    cmpi = staticmethod(lambda predicate, a, b: a != b)
    select = staticmethod(np.where)
    constant = staticmethod(lambda type, x: x)
    bitcast = staticmethod(lambda type, x: x.astype(np.uint32).view(type))
    from_elements = staticmethod(lambda type, elements: np.stack(elements, -1))
    extract = staticmethod(lambda x, dynamic_position, static_position: x[..., static_position[0]])

    @staticmethod
    def inline_asm(type, operands, text, constraints, has_side_effects):
        words = [np.asarray(x, np.uint64).astype(np.uint32) for x in operands]
        if text.startswith("shfl"):  # the threads in order of what their numbers become
            return operands[0][np.arange(128) ^ int(re.search(r"\$1, (\d+)", text)[1])]  # type: ignore[index]
        if text.startswith("prmt"):
            x, y, which = np.broadcast_arrays(*words)
            of_both = np.stack([x, y], -1).view(np.uint8)
            places = np.stack([which >> 4 * i & 0xF for i in range(4)], -1).astype(int)
            return np.take_along_axis(of_both, places, -1).view(np.uint32)[..., 0].astype(np.uint64)
        # The low 15 bits of each half as a float16 number, as abs and set have it.
        test, answer = re.fullmatch(r"{ .*set\.(\w+)\.(\w+)\.f16x2 \$0, x, \$2; }", text).groups()  # type: ignore[union-attr]
        word, bound = (x[..., None].view(np.uint16) for x in words)
        x, bound = ((i & 0x7FFF).view(np.float16) for i in (word, bound))
        found = {"geu": ~(x < bound), "lt": x < bound}[test]
        yes = {"u32": 0xFFFF, "f16x2": 0x3C00}[answer]
        return np.where(found, yes, 0).astype(np.uint16).view(np.uint32)[..., 0].astype(np.uint64)

    # Shared memory is an array of words.
    read_ptx_sreg_tid_x = staticmethod(lambda: np.arange(256, 384, dtype=np.uint64))
    shli = staticmethod(lambda a, b: (a << b) % 2**32)

    @staticmethod
    def store(word, places):
        memory, at = places
        assert len(np.unique(at)) == 128
        memory[at.astype(int)] = word

    @staticmethod
    def load(type, places, alignment):
        memory, at = places
        assert not np.any(at % np.uint64(4)) and alignment == 16
        return memory[at.astype(int)[:, None] + np.arange(4)]


def in_numpy(monkeypatch):
    """Returns the modules of random bits in the kernels, whose operations on registers are now those of `_Words`.

    They are those of numbers, of draws by the registers of a thread, and of draws through shared memory.
    """
    from pallas_fa.backends.gpu import dropout_bits, dropout_numbers, dropout_shared

    modules = dropout_numbers, dropout_bits, dropout_shared
    types = dict(
        IntegerType=SimpleNamespace(get_signless=lambda bits: np.int16),
        F16Type=SimpleNamespace(get=lambda: np.float16),
        BF16Type=SimpleNamespace(get=lambda: jnp.bfloat16),
        VectorType=SimpleNamespace(get=lambda shape, element_type: element_type),
    )
    types["FloatAttr"] = SimpleNamespace(get=lambda type, x: x)
    utils = SimpleNamespace(
        memref_ptr=lambda memory: memory,
        getelementptr=lambda memory, at, type: (memory, at[0]),
        warpgroup_barrier=lambda: None,
    )
    fakes = dict.fromkeys(("arith", "llvm", "nvvm", "vector"), _Words) | dict(
        constant=lambda x: np.uint64(x % 2**32),
        ir=SimpleNamespace(**types),
        mgpu=SimpleNamespace(FragmentedArray=lambda _registers, **_: _registers, utils=utils),
        word_type=lambda: None,
        per_thread=lambda x: [np.asarray(x)[..., None]],
    )
    for module in modules:
        for name, fake in fakes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
    return modules


@pytest.mark.parametrize(("answer", "yes"), (("u32", 0xFFFF), ("f16x2", 0x3C00)))
@pytest.mark.parametrize("threshold", (1, 1000, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF))
def test_two_decisions_at_once(threshold, answer, yes, monkeypatch):
    """By a comparison of 16-bit floats, among which are denormal ones, infinity and NaN."""
    bits = np.arange(2**16, dtype=np.uint64)
    words = bits << np.uint64(16) | bits[::-1]
    found = in_numpy(monkeypatch)[0].at_least(words, threshold, answer)
    wanted = np.where((bits & 0x7FFF) >= threshold, yes, 0).astype(np.uint64)
    np.testing.assert_array_equal(found, wanted << np.uint64(16) | wanted[::-1])


@pytest.mark.parametrize("threshold", (10000, 0x7C80))
@pytest.mark.parametrize(
    ("keys_by_queries", "rounded", "width"),
    (
        (False, None, 160), (False, None, 144), (True, None, 144), (False, jnp.int16, 160), (False, jnp.float16, 160),
        (False, jnp.bfloat16, 160), (True, "shared", 64), (True, "shared", 128),
    ),
)  # fmt: skip
def test_what_a_thread_does_with_its_registers(keys_by_queries, rounded, width, threshold, monkeypatch):
    """The interpreter can't run it: here each register is an array of the values that 128 threads hold."""
    shape, seeds, first = (64, width), (0x12345678, 0x9ABCDEF0), np.uint64(192)
    first_column = np.uint64(width)  # that of the second tile
    (numbers, bits, shared), thread = in_numpy(monkeypatch), np.arange(128, dtype=np.uint64)
    row = lambda half: 16 * (thread // 32) + thread % 32 // 4 + 8 * half  # of the layout of wgmma's results
    column = lambda tile: 8 * tile + 2 * (thread % 4)[:, None] + np.arange(2, dtype=np.uint64)
    x = np.random.default_rng(0).random(shape)

    def registers(shape, contents):
        array = np.empty(len(contents), object)
        for i, values in enumerate(contents):
            array[i] = Register(values)
        return SimpleNamespace(registers=array.reshape(shape), shape=x.shape, layout=None)

    class Register(np.ndarray):
        type = SimpleNamespace(element_type=None)

        def __new__(cls, x):
            return np.asarray(x).view(cls)

    places = [(tile, half) for tile in range(shape[1] // 8) for half in range(2)]
    tiled = registers(
        (1, shape[1] // 8, 1, 1, 2), [x[row(h)[:, None].astype(int), column(tile).astype(int)] for tile, h in places]
    )
    rows = registers((1, 1, 2), [first + row(h)[:, None] for h in range(2)])
    columns = registers((shape[1] // 8, 1, 1), [first_column + column(tile) for tile in range(shape[1] // 8)])
    key, offset = (np.uint64(x) for x in seeds)
    memory = ()
    if rounded == "shared":
        draw, rounded = shared.SharedDraw(shape, threshold), None
        memory = (np.zeros(draw.words * 128, np.uint64),)
    else:
        draw = bits.Draw(shape, keys_by_queries, threshold)
    run = draw.random if rounded else draw.decisions
    found = run(None, rows, columns, *(SimpleNamespace(registers={(): seed}) for seed in (key, offset)), *memory)
    words = [SimpleNamespace(registers=word) for word in found]
    if rounded:
        kept = draw.answers(rounded, None, *words).reshape(-1)
        found = [np.where(of_pair, x, 0) for of_pair, x in zip(kept, tiled.registers.reshape(-1), strict=True)]
        yes = -1 if rounded == jnp.int16 else numbers.FACTORS[jnp.dtype(rounded).name]
        assert {float(i) for of_pair in kept for i in np.unique(of_pair)} == {0, yes}
    else:
        assert len(words) == -(-width // 64)  # bits of half as many elements
        found = draw.select(None, tiled, *words).reshape(-1)

    r, c = first + np.arange(shape[0]), first_column + np.arange(shape[1])
    t, s = (c[:, None], r[None]) if keys_by_queries else (r[:, None], c[None])
    keeps = np.asarray(
        Dropout(tuple(jnp.full((1, 1, 1, 1), x, jnp.uint32) for x in seeds), threshold).keeps(t, s)[0, 0]
    )
    want = np.where(keeps.T if keys_by_queries else keeps, x, 0)
    for (tile, h), got in zip(places, found, strict=True):
        np.testing.assert_array_equal(
            np.asarray(got, np.float64), want[row(h)[:, None].astype(int), column(tile).astype(int)]
        )


@pytest.mark.parametrize(("rows", "first_key"), ((32, 32), (16, 64), (24, 32), (32, 16)))
def test_where_a_shard_starts(rows, first_key):
    """The kernels share calls of the generator only where queries start at multiples of 16, and keys of 32."""
    from pallas_fa.operands.part import Part
    from pallas_fa.problem import normalise

    x = jnp.ones((1, rows, 2, 64), jnp.bfloat16)
    _, operands = normalise(x, x, x, dropout_rate=0.1, dropout_key=jax.random.key(0))
    moved = operands.dropout.moved(Part((0, 0, jnp.int32(3) * rows, first_key), (1, 2, rows, rows)))
    assert moved.aligned == (rows % 16 == 0 and first_key % 32 == 0)
    np.testing.assert_array_equal(moved.first_query, 3 * rows)
    assert moved.first_key == first_key


@pytest.mark.parametrize(
    ("T", "placement", "count"),
    (
        pytest.param(512, "contiguous", 2, marks=pytest.mark.full),
        pytest.param(512, "zigzag", 8, marks=pytest.mark.full),
        (96, "contiguous", 2),
    ),
)
def test_the_kernels_of_a_ring_lower(T, placement, count):
    """Also where shards start at no multiple of 16."""
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x = jnp.ones((1, T, 2, 64), jnp.bfloat16)

    def loss(q, key):
        attend = functools.partial(
            pallas_fa.context_parallel.ring_attention, axis_name="ring", placement=placement, is_causal=True,
            dropout_rate=0.1, implementation=("mosaic_gpu", "xla"),
        )  # fmt: skip
        run = jax.shard_map(
            lambda q, key: attend(q, q, q, dropout_key=key),
            mesh=mesh, in_specs=(P(None, "ring"), P()), out_specs=P(None, "ring"),
        )  # fmt: skip
        return jnp.sum(run(q, key).astype(jnp.float32))

    assert kernels(jax.grad(loss), x, jax.random.key(0)) == count
