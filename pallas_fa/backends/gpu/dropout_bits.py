"""The random bits of a tile, by the registers of a thread, with one call of the generator for sixteen elements.

A thread of a tile in registers holds rows r and r + 8 of each 16, and columns c, c + 1, c + 8 and c + 9 of each 16, with c
even. As queries by keys, those of 32 columns are the elements of one call. As keys by queries it holds quarters of two
calls, for two neighbouring queries: those of its keys' bit `FAR`. Of each, the thread with the key s ^ 1 needs another
quarter. Each of the two threads makes one of the calls, and they exchange decisions.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_fa.backends.gpu.dropout_numbers import (
    THREADS,
    asm,
    at_least,
    bytes_of,
    constant,
    element,
    keys_of_rounds,
    numbers,
    per_thread,
    philox2x32,
    selected,
    word_type,
)
from pallas_fa.softmax.dropout import FAR, KEY_BLOCK, NEIGHBOUR, QUERY_BLOCK

_BITS = 32  # of a word


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
        """The calls of the generator in order, by tiles of 64 rows and 8 columns: (of rows, the first of columns)."""
        return list(itertools.product(range(self.shape[0] // 64), range(0, self.shape[1] // 8, self._columns)))

    @property
    def _columns(self) -> int:
        """How many tiles of 8 columns a call decides here: those of all its keys, of half of them, or of its queries."""
        return (KEY_BLOCK if self.in_words else QUERY_BLOCK) // 8

    @property
    def in_words(self) -> bool:
        """Whether the tile, of queries by keys, holds all keys of each call: then there are `answers`."""
        return not self.keys_by_queries and self.shape[1] % KEY_BLOCK == 0

    def random(self, _: Any, rows: Any, columns: Any, key: Any, offset: Any) -> Any:
        """Returns two random words for each call, by positions of rows and columns, and the two seeds."""
        found = (word for first, second in self._random(rows, columns, key, offset) for word in (_here(first), second))
        return tuple(map(per_thread, found))

    def decisions(self, _: Any, rows: Any, columns: Any, key: Any, offset: Any) -> Any:
        """Returns words of decisions, by positions of rows and columns, and the two seeds."""
        found = [constant(0)] * self.words
        random = self._random(rows, columns, key, offset)
        for i, number in enumerate(self._numbers(random, self._halves(rows, columns))):
            at, first = divmod(i, _BITS // 2)
            bits = arith.andi(at_least(number, self.threshold), constant(0x10001 << first))
            found[at] = arith.ori(found[at], bits)
        if not self.keys_by_queries:
            return tuple(per_thread(_here(x)) for x in found)
        # The halves are of even and odd keys. A thread keeps that of its key's parity for the queries of that parity, and
        # gets those of the other queries.
        is_odd = _all_or_none(rows.registers.reshape(-1)[0], NEIGHBOUR)
        chosen = arith.xori(constant(0x5410), arith.andi(is_odd, constant(0x3276 ^ 0x5410)))
        return tuple(per_thread(bytes_of(x, _exchanged(x), chosen)) for x in found)

    def select(self, _: Any, x: Any, *words: Any) -> Any:
        """Returns the elements of `x` that are kept, and 0 for others, by words of decisions."""
        places = []
        for i, at in enumerate(self._places()):
            word, first = divmod(i, _BITS // 2)
            places.append((at, word, (first, first + _BITS // 2)))
        return selected(x, words, places)

    def answers(self, dtype: Any, _: Any, *words: Any) -> Any:
        """Returns which elements are kept, by random words; queries by keys.

        `dtype`: int16, with all bits set for elements that are kept, or a 16-bit float, with `FACTORS` for them; else 0.
        """
        name = jnp.dtype(dtype).name
        types = dict(int16=lambda: ir.IntegerType.get_signless(16), float16=ir.F16Type.get, bfloat16=ir.BF16Type.get)
        pair = ir.VectorType.get((2,), types[name]())
        random = [element(word.registers[0], 0) for word in words]
        layout = plgpu.Layout.WGMMA.to_mgpu()
        results = np.empty(layout.registers_shape(self.shape), object)
        by_tile = self._by_tile(results)
        of_tile = self._numbers(zip(random[::2], random[1::2], strict=True), self._both_halves())
        for at, number in zip(self._places(), of_tile, strict=True):
            answer = at_least(number, self.threshold, "u32" if name == "int16" else "f16x2")
            one = vector.from_elements(word_type(), [answer])
            by_tile[at] = vector.bitcast(pair, one)
        return mgpu.FragmentedArray(_registers=results, _layout=layout, _is_signed=True if name == "int16" else None)

    def _random(self, rows, columns, key, offset):
        rows, columns = rows.registers.reshape(-1, 2)[:, 0], columns.registers.reshape(-1)  # r + 8 after r
        key, offset = key.registers[()], offset.registers[()]
        round_keys = keys_of_rounds(key)
        for i, j in self.calls:
            row, column = element(rows[i], 0), element(columns[j], 0)
            t, s = row, column
            if self.keys_by_queries:
                t, s = arith.addi(column, arith.andi(row, constant(NEIGHBOUR))), arith.andi(row, constant(~NEIGHBOUR))
            if not self.in_words:
                s = arith.andi(s, constant(~FAR))
            yield philox2x32(arith.xori(t, offset), s, round_keys)

    def _numbers(self, random, halves):
        """Yields words of two numbers in the order of `_places`, from two words for each call and the halves it decides."""
        for (first, second), are_far in zip(random, halves, strict=True):
            for is_far in are_far:
                found = numbers(first, second, is_far)
                yield from found if self.keys_by_queries else (found[i] for i in (0, 2, 1, 3))

    def _halves(self, rows, columns):
        """The halves that each call decides (see `_numbers`), by positions of rows and columns."""
        if self.in_words:
            return self._both_halves()
        if self.keys_by_queries:
            return [(_all_or_none(rows.registers.reshape(-1)[0], FAR),)] * len(self.calls)
        return [(_all_or_none(columns.registers.reshape(-1)[j], FAR),) for _, j in self.calls]

    def _both_halves(self):
        return [(False, True)] * len(self.calls)

    def _by_tile(self, registers):
        """Vectors of two columns: [rows / 64, columns / 8, 2], r + 8 after r."""
        return registers.reshape(self.shape[0] // 64, self.shape[1] // 8, 2)

    def _places(self):
        """Where the registers of a tile are in `_by_tile`, call by call."""
        return [(i, j + column, row) for i, j in self.calls for column in range(self._columns) for row in range(2)]


def _all_or_none(positions, bit):
    """Returns all bits set if the first of a thread's `positions` has that bit, else none."""
    shifted = arith.shrui(element(positions, 0), constant(bit.bit_length() - 1))
    return arith.subi(constant(0), arith.andi(shifted, constant(1)))


def _here(x):
    """Returns `x`, computed before what follows: shuffled to the lane where it is, which compilers keep in its place."""
    return asm("shfl.sync.bfly.b32 $0, $1, 0, 31, 0xffffffff;", x, has_side_effects=True)


def _exchanged(x):
    """Returns the `x` of the thread whose row differs in the lowest bit."""
    return asm("shfl.sync.bfly.b32 $0, $1, 4, 31, 0xffffffff;", x, has_side_effects=True)
