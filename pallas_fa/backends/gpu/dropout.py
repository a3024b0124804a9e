"""Dropout on a tile of probabilities in registers: `softmax.dropout`, with one call of the generator for four elements.

A thread of a tile in registers holds rows r and r + 8 of each 16, and columns c and c + 8 of each 16. Where tiles start at
multiples of 16, these four elements are {t, t ^ 8} x {s, s ^ 8}, whichever of the two the rows are. Elsewhere, as on a
shard of odd length, each element takes a call.

What is kept is drawn before it is used, a bit for each element, so that the generator stays out of the softmax.
"""

import collections
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.layouts import PER_COLUMN, PER_ROW, TILE
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.softmax.dropout import DECISION_BITS, ROUNDS, Dropout
from pallas_fa.softmax.philox import KEY_STEP, MULTIPLIER

_THREADS = 128  # of a warpgroup
_PER_THREAD = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)  # a number for each
_BITS = 32  # of a word
_INFINITY = 0x7C00  # float16


def in_memory(dropout: Dropout) -> jax.Array:
    """Returns what a kernel reads of it, int32 [B|1, N|1, 4]: the two seeds, the first query and the first key."""
    lead = dropout.seeds[0].shape[:2]
    seeds = (lax.bitcast_convert_type(x, jnp.int32) for x in dropout.seeds)
    places = (jnp.asarray(x, jnp.int32) for x in (dropout.first_query, dropout.first_key))
    by_head = lambda x: jnp.broadcast_to(jnp.reshape(x, x.shape[:2]), lead)
    return jnp.stack([by_head(x) for x in (*seeds, *places)], axis=-1)


class Kept(NamedTuple):
    """Which elements of a tile are kept: `bits`, bool of its shape; or, for a tile as `packed` says, the words of it."""

    bits: Any
    packed: "_Packed | None" = None

    def select(self, x: Any) -> Any:
        """Returns float32 `x` where it is kept, elsewhere 0."""
        if self.packed is None:
            return jnp.where(self.bits, x, jnp.zeros_like(x))
        run: Any = plgpu.inline_mgpu(
            arg_types=(TILE, *(_PER_THREAD for _ in self.bits)),
            return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
        )(self.packed.select)
        return run(x, *self.bits)


class HeadDropout(NamedTuple):
    """The dropout of one batch entry and query head: scalars, and the threshold.

    `by_fours`: whether the generator is called once for four elements, which the interpreter can't run, and which needs
    tiles that start at multiples of 16; else once for each.
    """

    key: Any
    offset: Any
    first_query: Any
    first_key: Any
    threshold: int
    by_fours: bool

    @classmethod
    def load(cls, dropout: Dropout, gmem: Any, b: Any, n: Any, interpret: bool) -> "HeadDropout":
        """Loads that of batch entry `b` and query head `n` from `gmem`, a ref of `in_memory`."""
        lead = b if gmem.shape[0] > 1 else 0, n if gmem.shape[1] > 1 else 0
        key, offset, first_query, first_key = (gmem[(*lead, i)] for i in range(4))
        return cls(key, offset, first_query, first_key, dropout.threshold, dropout.aligned and not interpret)

    def draw(self, shape: tuple[int, int], t0: Any, s0: Any, *, keys_by_queries: bool = False) -> Kept:
        """Returns which elements of a tile are kept.

        Args:
          shape: [rows, columns], rows a multiple of 64, queries by keys.
          t0: the first query of the tile, counted from the first here, as `s0` is.
          s0: its first key.
          keys_by_queries: the tile is [keys, queries].
        """
        t0, s0 = t0 + self.first_query, s0 + self.first_key
        row0, column0 = (s0, t0) if keys_by_queries else (t0, s0)
        rows = row0 + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=PER_ROW)
        columns = column0 + plgpu.broadcasted_iota(jnp.int32, shape[1:], 0, layout=PER_COLUMN)
        if not self.by_fours:
            t, s = (columns, rows) if keys_by_queries else (rows, columns)
            along = lambda i: lax.broadcast_in_dim(i, shape, [0 if i is rows else 1])
            return Kept(elementwise.inline(self._keeps, along(t), along(s)))
        packed = _Packed(shape, keys_by_queries, self.threshold)
        word: Any = plgpu.ShapeDtypeStruct((_THREADS,), jnp.int32, layout=_PER_THREAD)
        run: Any = plgpu.inline_mgpu(
            arg_types=(PER_ROW, PER_COLUMN, plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
            return_type=(word,) * packed.words,
        )(packed.draw)
        # Opaque, so that the keys of the rounds do not fill registers across the loop.
        return Kept(run(rows, columns, opaque(self.key, interpret=False), self.offset), packed)

    def _keeps(self, t, s):
        key, offset = (lax.convert_element_type(i, jnp.uint32) for i in (self.key, self.offset))
        return Dropout((key, offset), self.threshold).keeps(t, s)


class _Packed(NamedTuple):
    """A bit for each of the elements of a tile that a thread holds, in words of 32 bits.

    Of two elements that are 8 keys apart, one has a bit in the low half of a word and the other 16 bits further up.
    """

    shape: tuple[int, int]
    keys_by_queries: bool
    threshold: int

    @property
    def words(self) -> int:
        """How many words a thread has."""
        return -(-math.prod(self.shape) // (_BITS * _THREADS))

    @property
    def _calls(self):
        """The calls of the generator in order: (64 rows, the first of two 8 columns, which of two columns)."""
        return list(itertools.product(range(self.shape[0] // 64), range(0, self.shape[1] // 8, 2), range(2)))

    def draw(self, _: Any, rows: Any, columns: Any, key: Any, offset: Any) -> Any:
        """Returns the words, by the registers of a thread: positions of rows and columns, and the two seeds."""
        rows, columns = rows.registers.reshape(-1, 2)[:, 0], columns.registers.reshape(-1)  # r + 8 after r
        key, offset = key.registers[()], offset.registers[()]
        round_keys = [arith.addi(key, _word(i * KEY_STEP)) for i in range(ROUNDS)]
        found = [_word(0)] * self.words
        for call, place in enumerate(self._calls):
            for of_t, word in enumerate(self._random(place, rows, columns, offset, round_keys)):
                number, first = divmod(2 * call + of_t, _BITS // 2)
                bits = arith.andi(_at_least(word, self.threshold), _word(0x10001 << first))
                found[number] = arith.ori(found[number], bits)
        like = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        layout = _PER_THREAD.to_mgpu()
        registers = [np.array([vector.from_elements(like, [_here(x)])], object) for x in found]
        return tuple(mgpu.FragmentedArray(_registers=x, _layout=layout, _is_signed=True) for x in registers)

    def _random(self, place, rows, columns, offset, round_keys):
        i, j, lane = place
        row, column = _element(rows[i], 0), _element(columns[j], lane)
        t, s = (column, row) if self.keys_by_queries else (row, column)
        return _philox2x32(arith.xori(t, offset), s, round_keys)

    def select(self, _: Any, x: Any, *words: Any) -> Any:
        """Returns the elements of x that are kept, and 0 for others."""
        bits = [_element(word.registers[0], 0) for word in words]
        # Vectors of two columns: [rows / 64, columns / 8, 2], r + 8 after r.
        results = x.registers.reshape(self.shape[0] // 64, self.shape[1] // 8, 2).copy()
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        chosen: Any = collections.defaultdict(list)
        for call, (i, j, lane) in enumerate(self._calls):
            for of_column, of_row in itertools.product(range(2), range(2)):
                of_t, of_s = (of_column, of_row) if self.keys_by_queries else (of_row, of_column)
                number, place = divmod(2 * call + of_t, _BITS // 2)
                bit = arith.andi(bits[number], _word(1 << place + of_s * _BITS // 2))
                keeps = arith.cmpi(arith.CmpIPredicate.ne, bit, _word(0))
                at = i, j + of_column, of_row
                chosen[at].append(arith.select(keeps, _element(results[at], lane), zero))
        for at, values in chosen.items():
            results[at] = vector.from_elements(results[at].type, values)
        return mgpu.FragmentedArray(_registers=results.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)


def _philox2x32(first, second, round_keys):
    """As `philox.philox2x32`, with the hardware's product of 64 bits."""
    for key in round_keys:
        low, high = arith.mului_extended(first, _word(MULTIPLIER))
        first, second = arith.xori(arith.xori(high, key), second), low
    return first, second


def _at_least(word, threshold):
    """Returns each half of `word` with all its bits set if its low 15 bits are at least the threshold, else with none.

    Float16 numbers >= 0 are in the order of their bits. NaN has the highest: it is at least any number, and where the
    threshold would itself be NaN the bits are inverted, of which those of less than a number are asked for.
    """
    if threshold <= _INFINITY:
        bits, text = word, "set.geu.u32.f16x2"
    else:
        bits, text, threshold = arith.xori(word, _word(0x7FFF7FFF)), "set.lt.u32.f16x2", 2**DECISION_BITS - threshold
    text = f"{{ .reg .b32 x; abs.f16x2 x, $1; {text} $0, x, $2; }}"
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [bits, _word(threshold * 0x10001)], text, "=r,r,r", has_side_effects=False)


def _here(x):
    """Returns `x`, computed before what follows: shuffled to the lane where it is, which compilers keep in its place."""
    i32, text = ir.IntegerType.get_signless(32), "shfl.sync.bfly.b32 $0, $1, 0, 31, 0xffffffff;"
    return llvm.inline_asm(i32, [x], text, "=r,r", has_side_effects=True)


def _word(x):
    """A constant of 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    x %= 2**32
    return arith.constant(i32, ir.IntegerAttr.get(i32, x - 2**32 if x >= 2**31 else x))


def _element(x, i):
    return vector.extract(x, dynamic_position=[], static_position=[i])
