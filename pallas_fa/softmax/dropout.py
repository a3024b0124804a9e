"""Dropout of probabilities: which elements are kept is a function of the key's bits and of global indices alone.

The words of the key, batch entry and query head make two words (`Dropout.of`), and these, query and key position the
random bits (`Dropout.keeps`). So every implementation, tile size, direction and shard drops the same elements, and the
backward stores no bits but generates them again.

A call of Philox2x32-7 gives 64 bits, which decide sixteen elements: those whose positions differ in the bit 8 of t and the
bits 1, 8 and 16 of s. On the tensor cores, one thread holds these as queries by keys; as keys by queries, four threads do.

Each element has a number of 15 bits (`numbers`). Any two of the sixteen are independent. Of the upper 7 bits, which decide
all but one time in 128, any three are, and 1813 of the 1820 fours; so are all eight with the same bit 16 of s.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import Node, is_static_int
from pallas_fa.softmax.philox import philox2x32

ROUNDS = 7
PARTNER = 8  # positions t and t ^ PARTNER share a call of the generator
NEIGHBOUR, FAR = 1, 16  # and so do key positions that differ in the bits NEIGHBOUR, PARTNER and FAR
QUERY_BLOCK, KEY_BLOCK = 16, 32  # aligned blocks of positions that share no call with others
_ROUNDS_OF_SEEDS = 10
DECISION_BITS = 15  # the low ones of each half of a word: two halves are compared in one instruction
_HALF = 16


@dataclasses.dataclass(frozen=True)
class Dropout(Node):
    """The dropout of one call.

    Attributes:
      seeds: two uint32 [B|1, N|1, 1, 1]: what the key makes of each batch entry and query head.
      threshold: an element is dropped if its 15 bits are less; 1..32767.
      first_query: the position of the first query in the whole problem: an int, or int32 [1, 1, 1, 1].
      first_key: that of the first key.
      aligned: whether they are known to be multiples of `QUERY_BLOCK` and `KEY_BLOCK`.
    """

    seeds: tuple[Any, Any]
    threshold: int
    first_query: Any = 0
    first_key: Any = 0
    aligned: bool = True

    @classmethod
    def of(cls, words: Any, rate: float, B: int, N: int, broadcast: bool) -> Self | None:
        """Returns the dropout of a call; None where the rate is less than half of 2^-15.

        The seeds of two heads of one call differ: (batch entry, query head) is encrypted by each word of the key in turn.

        Args:
          words: uint32 [words], the key.
          rate: in [0, 1), rounded to a multiple of 2^-15.
          B: batch entries.
          N: query heads.
          broadcast: whether all batch entries and heads share their bits.
        """
        threshold = min(round(rate * 2**DECISION_BITS), 2**DECISION_BITS - 1)
        if not threshold:
            return None
        B, N = (1, 1) if broadcast else (B, N)
        seeds = jnp.arange(B, dtype=jnp.uint32)[:, None], jnp.arange(N, dtype=jnp.uint32)[None, :]
        for i in range(words.shape[0]):
            seeds = philox2x32(*seeds, words[i], _ROUNDS_OF_SEEDS)
        key, offset = (jnp.broadcast_to(x, (B, N))[:, :, None, None] for x in seeds)
        return cls((key, offset), threshold)

    @property
    def scale(self) -> float:
        """1 / (1 - rate), for the rate that the threshold gives exactly."""
        return 2**DECISION_BITS / (2**DECISION_BITS - self.threshold)

    def moved(self, part: Part) -> "Dropout":
        """Returns this dropout at the positions of `part`, which start at 0; seeds are already those of the part.

        Where a traced position starts, it is taken to be a multiple of the part's size, as a shard's is.
        """
        starts, sizes = part.start[2:], part.size[2:]
        units = [start if is_static_int(start) else size for start, size in zip(starts, sizes, strict=True)]
        origins = (x if is_static_int(x) else i for x, i in zip(starts, part.origin[2:], strict=True))
        first_query, first_key = (
            old + new for old, new in zip((self.first_query, self.first_key), origins, strict=True)
        )
        aligned = self.aligned and units[0] % QUERY_BLOCK == 0 and units[1] % KEY_BLOCK == 0
        return dataclasses.replace(self, first_query=first_query, first_key=first_key, aligned=aligned)

    def keeps(self, t: Any, s: Any) -> Any:
        """Returns which elements are kept: bool, broadcast over seeds and indices.

        Args:
          t: query positions, int32 [.., t, 1], counted from the first query here.
          s: key positions, int32 [.., 1, s], likewise.
        """
        key, offset = self.seeds
        t, s = ((x + first).astype(jnp.uint32) for x, first in ((t, self.first_query), (s, self.first_key)))
        of_call = s & ~jnp.uint32(NEIGHBOUR | PARTNER | FAR)
        words = philox2x32((t & ~jnp.uint32(PARTNER)) ^ offset, of_call, key, ROUNDS)
        found = list(numbers(*words))
        for position, bit in ((s, FAR), (t, PARTNER), (s, PARTNER)):
            half = len(found) // 2
            found = [jnp.where((position & bit) != 0, *pair) for pair in zip(found[half:], found[:half], strict=True)]
        bits = jnp.where((s & NEIGHBOUR) != 0, found[0] >> _HALF, found[0])
        return self._decides(bits)

    def keeps_tile(self, t0: Any, T: int, s0: Any, S: int) -> Any:
        """Returns `keeps` of T queries from `t0` and S keys from `s0` on, in a sixteenth of the calls of the generator."""
        of_queries = _Blocks.of(t0, self.first_query, T, QUERY_BLOCK)
        of_keys = _Blocks.of(s0, self.first_key, S, KEY_BLOCK)
        t, s = of_queries.positions(step=1).reshape(1, 1, -1, 1, 1), of_keys.positions(step=2)[None, None, None]
        key, offset = (seed[..., None] for seed in self._computed().seeds)
        # Behind a barrier: XLA would compute the words for each element that they decide.
        words = lax.optimization_barrier(philox2x32(t ^ offset, s, key, ROUNDS))
        # Each [B|1, N|1, t, blocks of keys, s, 2]; then, by the bits FAR and PARTNER of s, [.., blocks, 4, s, 2].
        found = [jnp.stack([self._decides(x), self._decides(x >> _HALF)], -1) for x in numbers(*words)]
        by_query = [jnp.stack([found[far + query + near] for far in (0, 4) for near in (0, 1)], -3) for query in (0, 2)]
        lead = by_query[0].shape[:2]
        rows = jnp.stack([x.reshape(*lead, of_queries.count, PARTNER, -1) for x in by_query], -3)
        return of_keys.cut(of_queries.cut(rows.reshape(*lead, of_queries.count * QUERY_BLOCK, -1), 2), 3)

    def _computed(self):
        """This dropout with seeds behind a barrier: XLA would fuse their many rounds into what each element takes."""
        return dataclasses.replace(self, seeds=lax.optimization_barrier(self.seeds))

    def _decides(self, bits):
        return (bits & jnp.uint32(2**DECISION_BITS - 1)) >= jnp.uint32(self.threshold)

    def apply(self, x: Any, t: Any, s: Any) -> Any:
        """Returns x [B, N, t, s], scaled where it is kept, and 0 elsewhere; `t` and `s` as for `keeps`."""
        return self.scaled(x, self._computed().keeps(t, s))

    def scaled(self, x: Any, keeps: Any) -> Any:
        """Returns x [B, N, t, s], scaled where it is kept, and 0 elsewhere."""
        return jnp.where(keeps, x * np.asarray(self.scale, x.dtype), 0)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of positions that share calls and cover `size` positions, the first of which is `before` in the first block."""

    first: Any
    before: Any
    count: int
    size: int
    length: int

    @classmethod
    def of(cls, start: Any, origin: Any, size: int, length: int) -> Self:
        """Of the positions from `start` + `origin` on, in blocks of `length`; an unknown start is taken to be the worst."""
        if is_static_int(start) and is_static_int(origin):
            before = (start + origin) % length
            return cls(np.uint32(start + origin - before), before, -(-(before + size) // length), size, length)
        at = jnp.asarray(start + origin).astype(jnp.uint32).reshape(())
        before = at % length
        return cls(at - before, before.astype(jnp.int32), -(-(length - 1 + size) // length), size, length)

    def positions(self, step: int) -> Any:
        """Returns those without the bits that share calls, uint32 [blocks, PARTNER / step]."""
        starts = self.length * np.arange(self.count, dtype=np.int32)[:, None]
        return self.first + (starts + np.arange(0, PARTNER, step)).astype(np.uint32)

    def cut(self, x: Any, axis: int) -> Any:
        """Returns the positions that are covered from those of the blocks, along `axis` of x."""
        if is_static_int(self.before):
            return lax.slice_in_dim(x, self.before, self.before + self.size, axis=axis)
        return lax.dynamic_slice_in_dim(x, self.before, self.size, axis, allow_negative_indices=False)


def numbers(first: Any, second: Any) -> tuple[Any, ...]:
    """Returns eight words of two 16-bit numbers each, from two random words, uint32.

    They are in the order of 4 * (whether s has the bit `FAR`) + 2 * (whether t has the bit `PARTNER`) + (whether s has it).
    The lower half of a word is that of even s.
    """
    rotated = lambda x, bits: x >> bits | x << 32 - bits
    a, b, c = rotated(first, 8), rotated(second, 8), rotated(first, 24)
    near = first, a ^ second, second, b ^ first
    return *near, near[3] ^ a ^ c, near[1] ^ b, near[1] ^ first ^ c, b ^ c
