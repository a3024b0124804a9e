"""Dropout on a tile of probabilities in registers: `softmax.dropout`, with one call of the generator for sixteen elements.

Where tiles start at multiples of 32, a thread calls it so (see `dropout_bits`). Elsewhere, as on a shard of odd length, each
element takes a call. What is random is drawn before it is used, so that the generator stays out of the softmax.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.dropout_bits import Draw
from pallas_fa.backends.gpu.dropout_numbers import FACTORS, THREADS
from pallas_fa.backends.gpu.dropout_shared import SharedDraw
from pallas_fa.backends.gpu.layouts import PER_COLUMN, PER_ROW, TILE
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.softmax.dropout import Dropout

_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # a number for each


def in_memory(dropout: Dropout) -> jax.Array:
    """Returns what a kernel reads of it, int32 [B|1, N|1, 4]: the two seeds, the first query and the first key."""
    lead = dropout.seeds[0].shape[:2]
    seeds = (lax.bitcast_convert_type(x, jnp.int32) for x in dropout.seeds)
    places = (jnp.asarray(x, jnp.int32) for x in (dropout.first_query, dropout.first_key))
    by_head = lambda x: jnp.broadcast_to(jnp.reshape(x, x.shape[:2]), lead)
    return jnp.stack([by_head(x) for x in (*seeds, *places)], axis=-1)


class KeptElements(NamedTuple):
    """Which elements of a tile are kept, as a bool tile."""

    keeps: Any
    by_factors: bool = False

    def select(self, x: Any) -> Any:
        """Returns `x` where it is kept, elsewhere 0; where `by_factors`, times the factor of its dtype."""
        return jnp.where(self.keeps, _times_factor(x, self.by_factors), jnp.zeros_like(x))


class KeptBits(NamedTuple):
    """Which elements of a tile are kept, as a bit for each."""

    draw: Draw | SharedDraw
    words: tuple[Any, ...]
    by_factors: bool = False

    def select(self, x: Any) -> Any:
        """Returns `x` where it is kept, elsewhere 0; where `by_factors`, times the factor of its dtype."""
        run: Any = plgpu.inline_mgpu(
            arg_types=(TILE, *(_PER_THREAD for _ in self.words)),
            return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE),
        )(self.draw.select)
        return run(_times_factor(x, self.by_factors), *self.words)


class KeptRounded(NamedTuple):
    """Which elements of a tile are kept, as random words: the decisions are made when 16-bit elements are selected.

    Two neighbours of a row are one register, and a comparison of two numbers gives the mask of it; or, where `by_factors`,
    a factor of each: a multiplication takes another unit than the generator (evidence: library/dropout-by-philox).
    """

    draw: Draw
    words: tuple[Any, ...]
    by_factors: bool

    def select(self, x: Any) -> Any:
        """Returns `x`, of finite 16-bit floats, where it is kept, elsewhere 0; where `by_factors`, times its factor."""
        if self.by_factors:
            return x * self._answers(x.shape, x.dtype)
        masks = self._answers(x.shape, jnp.int16)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int16) & masks, x.dtype)

    def _answers(self, shape, dtype):
        result: Any = plgpu.ShapeDtypeStruct(shape, dtype, layout=TILE)
        run: Any = plgpu.inline_mgpu(arg_types=tuple(_PER_THREAD for _ in self.words), return_type=result)(
            functools.partial(self.draw.answers, dtype)
        )
        return run(*self.words)


def _times_factor(x, by_factors):
    return x * jnp.asarray(FACTORS[x.dtype.name], x.dtype) if by_factors else x


type Kept = KeptElements | KeptBits | KeptRounded


class HeadDropout(NamedTuple):
    """The dropout of one batch entry and query head: scalars, and the threshold.

    `shares_calls`: whether the generator is called once for sixteen elements, which the interpreter can't run, and which
    needs queries and keys that are `Dropout.aligned`; else once for each.
    """

    key: Any
    offset: Any
    first_query: Any
    first_key: Any
    threshold: int
    shares_calls: bool

    @classmethod
    def load(cls, dropout: Dropout, gmem: Any, b: Any, n: Any, interpret: bool) -> "HeadDropout":
        """Loads that of batch entry `b` and query head `n` from `gmem`, a ref of `in_memory`."""
        lead = b if gmem.shape[0] > 1 else 0, n if gmem.shape[1] > 1 else 0
        key, offset, first_query, first_key = (gmem[(*lead, i)] for i in range(4))
        return cls(key, offset, first_query, first_key, dropout.threshold, dropout.aligned and not interpret)

    def draw(
        self,
        shape: tuple[int, int],
        t0: Any,
        s0: Any,
        *,
        keys_by_queries: bool = False,
        rounded: bool = False,
        by_factors: bool = False,
        memory: Any = None,
    ) -> Kept:
        """Returns which elements of a tile are kept.

        Args:
          shape: [rows, columns], rows a multiple of 64, queries by keys.
          t0: the first query of the tile, counted from the first here, as `s0` is.
          s0: its first key.
          keys_by_queries: the tile is [keys, queries].
          rounded: what is selected has 16-bit elements, of queries by keys.
          by_factors: kept elements are multiplied by the `FACTORS` of their dtype, which takes an instruction less; in
            bfloat16 only from the compute capability 9.0 on.
          memory: shared memory of this warpgroup, by which threads share their calls for a tile keys by queries (see
            `dropout_shared`). The warpgroup meets at a barrier before it draws again.
        """
        t0, s0 = t0 + self.first_query, s0 + self.first_key
        row0, column0 = (s0, t0) if keys_by_queries else (t0, s0)
        rows = row0 + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=PER_ROW)
        columns = column0 + plgpu.broadcasted_iota(jnp.int32, shape[1:], 0, layout=PER_COLUMN)
        if not self.shares_calls:
            t, s = (columns, rows) if keys_by_queries else (rows, columns)
            along = lambda i: lax.broadcast_in_dim(i, shape, [0 if i is rows else 1])
            return KeptElements(elementwise.inline(self._keeps, along(t), along(s)), by_factors)
        by_registers = Draw(shape, keys_by_queries, self.threshold)
        rounded = rounded and by_registers.in_words
        draw = by_registers if memory is None else SharedDraw(shape, self.threshold)
        words, of_thread = draw.decisions, draw.words
        if rounded:
            words, of_thread = by_registers.random, 2 * len(by_registers.calls)
        word: Any = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=_PER_THREAD)
        refs = () if memory is None else (memory,)
        run: Any = plgpu.inline_mgpu(
            arg_types=(
                PER_ROW,
                PER_COLUMN,
                plgpu.Layout.WG_SPLAT,
                plgpu.Layout.WG_SPLAT,
                *(plgpu.RefType() for _ in refs),
            ),
            return_type=(word,) * of_thread,
        )(words)
        # Opaque, so that the keys of the rounds do not fill registers across the loop.
        found = run(rows, columns, opaque(self.key, interpret=False), self.offset, *refs)
        return KeptRounded(by_registers, found, by_factors) if rounded else KeptBits(draw, found, by_factors)

    def _keeps(self, t, s):
        key, offset = (lax.convert_element_type(i, jnp.uint32) for i in (self.key, self.offset))
        return Dropout((key, offset), self.threshold).keeps(t, s)
