"""The random bits of a tile, by the registers of a thread, with one call of the generator for eight elements.

A thread of a tile in registers holds rows r and r + 8 of each 16, and columns c, c + 1, c + 8 and c + 9 of each 16, with c
even. As queries by keys these are {t, t ^ 8} x {s, s ^ 1, s ^ 8, s ^ 9}: the elements of one call. As keys by queries they
are halves of two calls, for two neighbouring queries, whose other halves belong to the thread that holds the key s ^ 1.
Each of the two threads makes one of the calls, and they exchange decisions.
"""

import collections
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_fa.softmax.dropout import DECISION_BITS, ROUNDS
from pallas_fa.softmax.philox import KEY_STEP, MULTIPLIER

THREADS = 128  # of a warpgroup
_BITS = 32  # of a word
_INFINITY = 0x7C00  # float16


class Draw(NamedTuple):
    """The random bits of a tile [rows, columns]; the methods are bodies of `inline_mgpu`.

    Decisions have a bit each, in words of 32 bits. In each half of a word are those of one of two neighbouring columns.
    """

    shape: tuple[int, int]
    keys_by_queries: bool
    threshold: int

    @property
    def words(self) -> int:
        """How many words of decisions a thread has."""
        return -(-math.prod(self.shape) // (_BITS * THREADS))

    @property
    def calls(self) -> list[tuple[int, int]]:
        """The calls of the generator in order, by tiles of 64 rows and 8 columns: (of rows, the first of two of columns)."""
        return list(itertools.product(range(self.shape[0] // 64), range(0, self.shape[1] // 8, 2)))

    def random(self, _: Any, rows: Any, columns: Any, key: Any, offset: Any) -> Any:
        """Returns two random words for each call, by positions of rows and columns, and the two seeds."""
        found = (word for first, second in self._random(rows, columns, key, offset) for word in (_here(first), second))
        return tuple(map(_per_thread, found))

    def decisions(self, _: Any, rows: Any, columns: Any, key: Any, offset: Any) -> Any:
        """Returns words of decisions, by positions of rows and columns, and the two seeds."""
        found = [_word(0)] * self.words
        for call, words in enumerate(self._random(rows, columns, key, offset)):
            numbers = _numbers(*words)
            for register, number in enumerate(self._numbers_by_register()):
                at, first = divmod(4 * call + register, _BITS // 2)
                bits = arith.andi(_at_least(numbers[number], self.threshold), _word(0x10001 << first))
                found[at] = arith.ori(found[at], bits)
        if not self.keys_by_queries:
            return tuple(_per_thread(_here(x)) for x in found)
        # The halves are of even and odd keys. A thread keeps that of its key's parity for the queries of that parity, and
        # gets those of the other queries.
        chosen = arith.select(self._is_odd(rows), _word(0x3276), _word(0x5410))
        return tuple(_per_thread(_bytes(x, _exchanged(x), chosen)) for x in found)

    def select(self, _: Any, x: Any, *words: Any) -> Any:
        """Returns the elements of float32 `x` that are kept, and 0 for others, by words of decisions."""
        bits = [_element(word.registers[0], 0) for word in words]
        results = self._by_tile(x.registers).copy()
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        chosen: Any = collections.defaultdict(list)
        for i, at in enumerate(self._places()):
            word, place = divmod(i, _BITS // 2)
            for lane in range(2):
                bit = arith.andi(bits[word], _word(1 << place + lane * _BITS // 2))
                keeps = arith.cmpi(arith.CmpIPredicate.ne, bit, _word(0))
                chosen[at].append(arith.select(keeps, _element(results[at], lane), zero))
        for at, values in chosen.items():
            results[at] = vector.from_elements(results[at].type, values)
        return mgpu.FragmentedArray(_registers=results.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)

    def masks(self, _: Any, *words: Any) -> Any:
        """Returns int16 with all bits set for elements that are kept, 0 for others, by random words; queries by keys."""
        words = tuple(_element(word.registers[0], 0) for word in words)
        numbers = [_numbers(*words[i : i + 2]) for i in range(0, len(words), 2)]
        layout = plgpu.Layout.WGMMA.to_mgpu()
        results = np.empty(layout.registers_shape(self.shape), object)
        by_tile = self._by_tile(results)
        i16 = ir.IntegerType.get_signless(16)
        for i, at in enumerate(self._places()):
            call, register = divmod(i, 4)
            number = numbers[call][self._numbers_by_register()[register]]
            one = vector.from_elements(_one_word(), [_at_least(number, self.threshold)])
            by_tile[at] = vector.bitcast(ir.VectorType.get((2,), i16), one)
        return mgpu.FragmentedArray(_registers=results, _layout=layout, _is_signed=True)

    def _random(self, rows, columns, key, offset):
        rows, columns = rows.registers.reshape(-1, 2)[:, 0], columns.registers.reshape(-1)  # r + 8 after r
        key, offset = key.registers[()], offset.registers[()]
        round_keys = [arith.addi(key, _word(i * KEY_STEP)) for i in range(ROUNDS)]
        for i, j in self.calls:
            row, column = _element(rows[i], 0), _element(columns[j], 0)
            t, s = row, column
            if self.keys_by_queries:
                parity = arith.andi(row, _word(1))
                t, s = arith.addi(column, parity), arith.xori(row, parity)
            yield _philox2x32(arith.xori(t, offset), s, round_keys)

    def _is_odd(self, rows):
        row = _element(rows.registers.reshape(-1)[0], 0)
        return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(row, _word(1)), _word(0))

    def _by_tile(self, registers):
        """Vectors of two columns: [rows / 64, columns / 8, 2], r + 8 after r."""
        return registers.reshape(self.shape[0] // 64, self.shape[1] // 8, 2)

    def _places(self):
        """Where the registers of a tile are in `_by_tile`: four for each call."""
        return [(i, j + of_column, of_row) for i, j in self.calls for of_column in range(2) for of_row in range(2)]

    def _numbers_by_register(self):
        """Which number of `_numbers` decides each of four registers."""
        return (0, 1, 2, 3) if self.keys_by_queries else (0, 2, 1, 3)


def _philox2x32(first, second, round_keys):
    """As `philox.philox2x32`, with the hardware's product of 64 bits."""
    for key in round_keys:
        low, high = arith.mului_extended(first, _word(MULTIPLIER))
        first, second = arith.xori(arith.xori(high, key), second), low
    return first, second


def _numbers(first, second):
    """As `dropout.numbers`."""
    swapped, reverse = _bytes(first, first, _word(0x2301)), _bytes(second, second, _word(0x0123))
    return first, arith.xori(swapped, second), second, arith.xori(reverse, first)


def _at_least(word, threshold):
    """Returns each half of `word` with all its bits set if its low 15 bits are at least the threshold, else with none.

    Float16 numbers >= 0 are in the order of their bits. NaN has the highest: it is at least any number, and where the
    threshold would itself be NaN the bits are inverted, of which those of less than a number are asked for.
    """
    if threshold <= _INFINITY:
        bits, text = word, "set.geu.u32.f16x2"
    else:
        bits, text, threshold = arith.xori(word, _word(0x7FFF7FFF)), "set.lt.u32.f16x2", 2**DECISION_BITS - threshold
    return _asm(f"{{ .reg .b32 x; abs.f16x2 x, $1; {text} $0, x, $2; }}", bits, _word(threshold * 0x10001))


def _bytes(x, y, which):
    """Returns the four bytes of x (numbers 0 to 3) and y (4 to 7) that the hexadecimal digits of `which` name."""
    return _asm("prmt.b32 $0, $1, $2, $3;", x, y, which)


def _here(x):
    """Returns `x`, computed before what follows: shuffled to the lane where it is, which compilers keep in its place."""
    return _asm("shfl.sync.bfly.b32 $0, $1, 0, 31, 0xffffffff;", x, has_side_effects=True)


def _exchanged(x):
    """Returns the `x` of the thread whose row differs in the lowest bit."""
    return _asm("shfl.sync.bfly.b32 $0, $1, 4, 31, 0xffffffff;", x, has_side_effects=True)


def _asm(text, *operands, has_side_effects=False):
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(("=r", *("r" for _ in operands)))
    return llvm.inline_asm(i32, list(operands), text, constraints, has_side_effects=has_side_effects)


def _word(x):
    """A constant of 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    x %= 2**32
    return arith.constant(i32, ir.IntegerAttr.get(i32, x - 2**32 if x >= 2**31 else x))


def _element(x, i):
    return vector.extract(x, dynamic_position=[], static_position=[i])


def _one_word():
    return ir.VectorType.get((1,), ir.IntegerType.get_signless(32))


def _per_thread(x):
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1).to_mgpu()
    registers = np.array([vector.from_elements(_one_word(), [x])], object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
