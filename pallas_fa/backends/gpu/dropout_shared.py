"""The random bits of a tile keys by queries, whose threads share their calls of the generator through shared memory.

A thread holds quarters of two calls for each 16 queries (see `dropout_bits`). The other quarters belong to three threads:
that of the keys s ^ 1, and in another warp those of the keys s ^ 16 and s ^ 17. The four have the same calls, eight for
each 64 queries. Each makes two of them and hands the decisions on: a byte to each of the four.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_fa.backends.gpu.dropout_numbers import (
    THREADS,
    at_least,
    bytes_of,
    constant,
    element,
    keys_of_rounds,
    numbers,
    per_thread,
    philox2x32,
    selected,
)
from pallas_fa.softmax.dropout import FAR, NEIGHBOUR

_COLUMNS = 64  # queries whose decisions are one word of a thread


class SharedDraw(NamedTuple):
    """The random bits of a tile [rows, columns], multiples of 64; the methods are bodies of `inline_mgpu`."""

    shape: tuple[int, int]
    threshold: int

    @property
    def words(self) -> int:
        """How many words of decisions a thread has."""
        return self.shape[0] // 64 * (self.shape[1] // _COLUMNS)

    def decisions(self, _: Any, rows: Any, columns: Any, key: Any, offset: Any, memory: Any) -> Any:
        """Returns words of decisions, by positions of rows and columns, the two seeds, and `words` * 128 words of memory."""
        rows, columns = rows.registers.reshape(-1, 2)[:, 0], columns.registers.reshape(-1)  # r + 8 after r
        key, offset = key.registers[()], offset.registers[()]
        round_keys = keys_of_rounds(key)
        # The low bits of a row are those of its key: tiles start at multiples of 32.
        row = element(rows[0], 0)
        is_odd, is_far = (arith.andi(row, constant(bit)) for bit in (NEIGHBOUR, FAR))
        # Of each 64 queries, a thread makes the calls of two blocks of 16, for those of its key's parity.
        first = arith.addi(is_odd, arith.shli(is_far, constant(1)))
        made = []
        for row in rows:
            s = arith.andi(element(row, 0), constant(~(NEIGHBOUR | FAR)))
            for block in range(0, len(columns), _COLUMNS // 8):
                word = constant(0)
                for call in range(2):
                    t = arith.addi(element(columns[block + 2 * call], 0), first)
                    random = philox2x32(arith.xori(t, offset), s, round_keys)
                    word = self._with_call(word, call, *random)
                made.append(word)
        return tuple(per_thread(x) for x in self._handed_on(made, memory, is_odd, is_far))

    def _with_call(self, word, call, first, second):
        """Adds four bits for each of the four threads, in bytes of keys: even, even and far, odd, odd and far."""
        for is_far in (False, True):
            for i, number in enumerate(numbers(first, second, is_far)):
                bits = constant(0x10001 << (8 * is_far + 4 * call + i))
                word = arith.ori(word, arith.andi(at_least(number, self.threshold), bits))
        return word

    def _handed_on(self, made, memory, is_odd, is_far):
        """Returns words of which each of the four threads has made a byte."""
        i32, quad = ir.IntegerType.get_signless(32), ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        thread, pointer = nvvm.read_ptx_sreg_tid_x(), mgpu.utils.memref_ptr(memory)
        # Of a thread's number, bits 0 and 1 are its columns, 2 to 4 its row of 8, 5 and 6 its 16 rows. The four differ in 2
        # and 5.
        part = lambda shift, mask: arith.andi(arith.shrui(thread, constant(shift)), constant(mask))
        place_of_four = arith.ori(arith.ori(part(2, 0x10), part(1, 0xC)), arith.andi(thread, constant(3)))
        place_of_four = arith.shli(place_of_four, constant(2))
        own_place = arith.ori(place_of_four, arith.ori(part(4, 2), part(2, 1)))
        at = lambda i, place: mgpu.utils.getelementptr(pointer, [arith.addi(place, constant(i * THREADS))], i32)
        for i, word in enumerate(made):
            llvm.store(word, at(i, own_place))
        mgpu.utils.warpgroup_barrier()
        byte = arith.ori(arith.shli(is_odd, constant(1)), arith.shrui(is_far, constant(FAR.bit_length() - 1)))
        both = arith.ori(byte, arith.shli(arith.addi(byte, constant(4)), constant(4)))  # of two words, as of `bytes_of`
        found = []
        for i in range(len(made)):
            words = llvm.load(quad, at(i, place_of_four), alignment=16)
            a, b, c, d = (element(words, j) for j in range(4))
            found.append(bytes_of(bytes_of(a, b, both), bytes_of(c, d, both), constant(0x5410)))
        return found

    def select(self, _: Any, x: Any, *words: Any) -> Any:
        """Returns the elements of `x` that are kept, and 0 for others, by words of decisions."""
        return selected(x, words, map(self._place, np.ndindex(x.shape[0] // 64, x.shape[1] // 8, 2)))

    def _place(self, at):
        """As of `selected`."""
        row, column, half = at
        word, place = divmod(column, _COLUMNS // 8)
        block, partner = divmod(place, 2)
        first = 16 * (block // 2) + 4 * (block % 2) + 2 * partner + half
        return at, row * (self.shape[1] // _COLUMNS) + word, (first, first + 8)
