"""Dropout on a tile of probabilities in registers: `softmax.dropout`, with one call of the generator for four elements.

A thread of a tile in registers holds rows r and r + 8 of each 16, and columns c and c + 8 of each 16. Where tiles start at
multiples of 16, these four elements are {t, t ^ 8} x {s, s ^ 8}, whichever of the two the rows are. Elsewhere, as on a
shard of odd length, each element takes a call.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.layouts import PER_COLUMN, PER_ROW, TILE
from pallas_fa.softmax.dropout import PARTNER, ROUNDS, Dropout
from pallas_fa.softmax.philox import KEY_STEP, MULTIPLIER


def in_memory(dropout: Dropout) -> jax.Array:
    """Returns what a kernel reads of it, int32 [B|1, N|1, 4]: the two seeds, the first query and the first key."""
    lead = dropout.seeds[0].shape[:2]
    seeds = (lax.bitcast_convert_type(x, jnp.int32) for x in dropout.seeds)
    places = (jnp.asarray(x, jnp.int32) for x in (dropout.first_query, dropout.first_key))
    by_head = lambda x: jnp.broadcast_to(jnp.reshape(x, x.shape[:2]), lead)
    return jnp.stack([by_head(x) for x in (*seeds, *places)], axis=-1)


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

    def apply(self, x: Any, t0: Any, s0: Any, *, keys_by_queries: bool = False, negate: bool = False) -> Any:
        """Returns x where it is kept, elsewhere 0, or -x with `negate`.

        Args:
          x: float32 [rows, columns], rows a multiple of 64, queries by keys.
          t0: the first query of the tile, counted from the first here, as `s0` is.
          s0: its first key.
          keys_by_queries: x is [keys, queries].
          negate: see above.
        """
        t0, s0 = t0 + self.first_query, s0 + self.first_key
        row0, column0 = (s0, t0) if keys_by_queries else (t0, s0)
        rows = row0 + plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=PER_ROW)
        columns = column0 + plgpu.broadcasted_iota(jnp.int32, x.shape[1:], 0, layout=PER_COLUMN)
        if not self.by_fours:
            t, s = (columns, rows) if keys_by_queries else (rows, columns)
            keeps = elementwise.inline(self._keeps, *(_along(i, x.shape, i is rows) for i in (t, s)))
            return jnp.where(keeps, x, -x if negate else jnp.zeros_like(x))
        rows, columns = rows & ~PARTNER, columns & ~PARTNER
        if keys_by_queries:
            columns = columns ^ self.offset
        else:
            rows = rows ^ self.offset
        run: Any = plgpu.inline_mgpu(
            arg_types=(TILE, PER_ROW, PER_COLUMN, plgpu.Layout.WG_SPLAT),
            return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
        )(_Select(self.threshold, keys_by_queries, negate))
        return run(x, rows, columns, self.key)

    def _keeps(self, t, s):
        key, offset = (lax.convert_element_type(i, jnp.uint32) for i in (self.key, self.offset))
        return Dropout((key, offset), self.threshold).keeps(t, s)


def _along(i, shape, rows):
    return lax.broadcast_in_dim(i, shape, [0 if rows else 1])


class _Select(NamedTuple):
    """What `HeadDropout.apply` does with the registers of a thread."""

    threshold: int
    keys_by_queries: bool
    negate: bool

    def __call__(self, _: Any, x: Any, rows: Any, columns: Any, key: Any) -> Any:
        key = key.registers[()]
        round_keys = [arith.addi(key, _word(i * KEY_STEP)) for i in range(ROUNDS)]
        # Vectors of two columns: [rows / 64, columns / 8, 2], r + 8 after r.
        tiles = x.registers.reshape(x.shape[0] // 64, x.shape[1] // 8, 2).copy()
        rows, columns = rows.registers.reshape(-1, 2)[:, 0], columns.registers.reshape(-1)
        for registers, row in zip(tiles, rows, strict=True):
            self._drop(registers, _element(row, 0), columns, round_keys)
        return mgpu.FragmentedArray(_registers=tiles.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)

    def _drop(self, registers, row, columns, round_keys):
        """Does so for 64 rows, in place."""
        four = list(itertools.product(range(2), range(2)))
        for i in range(0, len(registers), 2):
            chosen = {place: [] for place in four}
            for lane in range(2):
                column = _element(columns[i], lane)
                words = _philox2x32(*((column, row) if self.keys_by_queries else (row, column)), round_keys)
                for of_column, of_row in four:
                    of_t, of_s = (of_column, of_row) if self.keys_by_queries else (of_row, of_column)
                    value = _element(registers[i + of_column, of_row], lane)
                    chosen[of_column, of_row].append(self._select(words[of_t], of_s, value))
            for of_column, of_row in four:
                like = registers[i + of_column, of_row].type
                registers[i + of_column, of_row] = vector.from_elements(like, chosen[of_column, of_row])

    def _select(self, word, high_half, value):
        word = word if high_half else arith.shli(word, _word(16))
        keeps = arith.cmpi(arith.CmpIPredicate.uge, word, _word(self.threshold << 16))
        zero = arith.constant(value.type, ir.FloatAttr.get(value.type, 0.0))
        return arith.select(keeps, value, arith.negf(value) if self.negate else zero)


def _philox2x32(first, second, round_keys):
    """As `philox.philox2x32`, with the hardware's product of 64 bits."""
    for key in round_keys:
        low, high = arith.mului_extended(first, _word(MULTIPLIER))
        first, second = arith.xori(arith.xori(high, key), second), low
    return first, second


def _word(x):
    """A constant of 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    x %= 2**32
    return arith.constant(i32, ir.IntegerAttr.get(i32, x - 2**32 if x >= 2**31 else x))


def _element(x, i):
    return vector.extract(x, dynamic_position=[], static_position=[i])
