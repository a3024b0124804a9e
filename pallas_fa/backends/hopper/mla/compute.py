"""The two compute warpgroups of the kernel for latent attention.

Both hold the same 64 query heads, and each half of the output's columns: all of it would not fit the registers of one. In a
step each computes the logits and probabilities of one of two key blocks, and hands its probabilities to the other through
shared memory. Both add P V of the first warpgroup's block, then of the second's. So the maximum passes from the first to the
second and back, and the second takes its exponentials while its first P V is under way. That two warpgroups share
probabilities is from FlashMLA (DeepSeek, 2025); there each begins with its own.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.layouts import PER_ROW, TILE
from pallas_fa.backends.gpu.online_softmax import SUM_COLUMNS, online_softmax
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.hopper.forward.epilogue import times_rows_unless_1
from pallas_fa.backends.hopper.mla.plan import HALF, HALVES, KEYS, PIECES, ROWS, MlaPlan
from pallas_fa.backends.hopper.mla.work import Work
from pallas_fa.backends.hopper.wgmma import Wgmma

_ROW_SUMS = 2  # where those of both warpgroups start in `rows_smem`, after the maxima


class Warpgroup:
    """What warpgroup `wg`, 0 or 1, does for the work of a CTA. Values lie in the first columns of keys."""

    def __init__(self, plan: MlaPlan, work: Work, wg: int, gmem: Any, scratch: dict[str, Any]):
        self.plan, self.work, self.wg, self.gmem, self.scratch = plan, work, wg, gmem, scratch
        self.wgmma = Wgmma(plan.interpret)
        self.half = HALVES[wg]

    def run(self) -> None:
        """Attends to all keys and stores the results."""
        plgpu.barrier_wait(self.scratch["q_ready"])
        self.q_rope = plgpu.load(self.scratch["p_smem"].at[1], layout=TILE)
        acc, l = (plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), TILE) for n in (HALF, SUM_COLUMNS))
        m = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), PER_ROW)
        carry = self._step(0, (acc, m, l), is_boundary=True)
        carry = lax.fori_loop(1, self.work.steps, lambda i, carry: self._step(i, carry, is_boundary=False), carry)
        self._finish(*carry)

    def _step(self, i, carry, is_boundary):
        step = self._first if self.wg == 0 else self._second
        return step(self._logits(i, is_boundary), carry, i, is_boundary)

    def _logits(self, i, is_boundary):
        """The products of the queries and this warpgroup's key block; -inf past the limit."""
        scratch, slot = self.scratch, self._slot(self.wg)

        def products(acc):
            for name in PIECES:  # in the order in which they arrive
                start, size = PIECES[name]
                plgpu.barrier_wait(scratch[f"{name}_ready"].at[slot])
                q = self.q_rope if name == "rope" else scratch["q_smem"].at[self._slot(0), :, pl.ds(start, size)]
                self.wgmma.matmul(acc, q, scratch[f"{name}_smem"].at[slot], transpose_b=True)
            return self.wgmma.result(acc, in_flight=0)

        x = self.wgmma.scoped(products, (ROWS, KEYS))
        plgpu.barrier_arrive(scratch["rope_free"].at[slot])
        if not is_boundary:
            return x
        s = self.work.key_block(i, slot) * KEYS + plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=TILE)
        return jnp.where(s < self.work.limit, x, -jnp.inf)

    def _first(self, x, carry, i, is_boundary):
        """A step of the first warpgroup."""
        acc, m, l = carry
        l, p, m, rescale = self._softmax(x, m, l, is_boundary)
        p = p.astype(self.plan.problem.dtype)
        hand_over = lambda: self._hand_over(p, m)
        acc, _ = self._plus_products(self._rescaled(acc, rescale), p, i, 0, is_boundary, hand_over)
        m, rescale = self._received(1, m, is_boundary)
        acc, _ = self._plus_products(self._rescaled(acc, rescale), None, i, 1, is_boundary)
        return acc, m, self._times(l, rescale)

    def _second(self, x, carry, i, is_boundary):
        """A step of the second warpgroup."""
        acc, m, l = carry
        m, rescale = self._received(0, m, is_boundary)
        l = self._times(l, rescale)

        def softmax():
            new_l, p, new_m, rescale = self._softmax(x, m, l, is_boundary)
            self._hand_over(p.astype(self.plan.problem.dtype), new_m)
            return new_l, new_m, rescale

        acc = self._rescaled(acc, rescale)
        acc, (l, m, rescale) = self._plus_products(acc, None, i, 0, is_boundary, softmax, like=(l, m, m))
        # Its own, too, from shared memory: ptxas serialises matmuls whose operands in registers are made while one is in
        # flight (evidence: forward/probabilities-after-the-wait).
        acc, _ = self._plus_products(self._rescaled(acc, rescale), None, i, 1, is_boundary)
        return acc, m, l

    def _softmax(self, x, m, l, is_boundary):
        lag = None if is_boundary else self.plan.lag
        return online_softmax(self.plan, x, self.plan.problem.scale, m, l, is_boundary, lag)

    def _plus_products(self, acc, p, i, slot, is_boundary, meanwhile=lambda: (), like=()):
        """Adds P V of a key block, calls `meanwhile` before it is done, then releases this warpgroup's half of the values.

        `p`: None for probabilities in shared memory. Returns (sums, results of `meanwhile`, which have the types of `like`).
        """
        self._zero_padding(i, slot, is_boundary)

        def body(accs):
            operand = self.scratch["p_smem"].at[self._slot(slot)] if p is None else p
            self.wgmma.matmul(accs[0], operand, self._values(slot))
            return meanwhile()

        (acc,), results = self.wgmma.updated(body, (acc,), like=like)
        plgpu.barrier_arrive(self.scratch[f"{self.half}_free"].at[slot])
        return acc, results

    def _values(self, slot):
        return self.scratch[f"{self.half}_smem"].at[self._slot(slot)]

    def _slot(self, slot):
        """`slot`, but such that compilers compute the descriptors of matmuls from it anew in each step (see `opaque`)."""
        return opaque(jnp.int32(slot), self.plan.interpret)

    def _hand_over(self, p, m):
        """Stores probabilities for matmuls, and the maxima that are subtracted in them."""
        self.scratch["rows_smem"][self.wg] = m
        self.scratch["p_smem"][self.wg] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["p_ready"].at[self.wg])

    def _received(self, wg, m, is_boundary):
        """Waits for what warpgroup `wg` hands over; returns (its maxima, the factor of sums whose maxima were `m`)."""
        plgpu.barrier_wait(self.scratch["p_ready"].at[wg])
        new_m = plgpu.load(self.scratch["rows_smem"].at[wg], layout=PER_ROW)
        # Both are -inf in a part without keys, whose sums are 0.
        shift = jnp.where(new_m == -jnp.inf, 0.0, new_m) if is_boundary else new_m
        return new_m, jnp.exp2(m - shift)

    def _rescaled(self, acc, factor):
        return times_rows_unless_1((acc,), factor, self.plan.interpret)[0]

    @staticmethod
    def _times(x, factor):
        return x * lax.broadcast_in_dim(factor, x.shape, [0])

    def _zero_padding(self, i, slot, is_boundary):
        """Zeroes this warpgroup's values past the limit, which may be NaN."""
        if not is_boundary:
            return
        start, limit = self.work.key_block(i, slot) * KEYS, self.work.limit

        @pl.when(start + KEYS > limit)
        def _():
            for column in range(0, HALF, 64):
                part = self._values(slot).at[:, pl.ds(column, 64)]
                key = start + plgpu.broadcasted_iota(jnp.int32, (KEYS, 64), 0, layout=TILE)
                values = plgpu.load(part, layout=TILE)
                part[...] = jnp.where(key < limit, values, jnp.zeros((), values.dtype))

        plgpu.commit_smem()

    def _finish(self, acc, m, l):
        """Divides by the row sums of both warpgroups, and stores output and log-sum-exp."""
        plan, work, rows = self.plan, self.work, self.scratch["rows_smem"]
        l = l.sum(axis=1)
        rows[_ROW_SUMS + self.wg] = l
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["done"])
        plgpu.barrier_wait(self.scratch["done"])  # and nothing uses keys any more
        total = l + plgpu.load(rows.at[_ROW_SUMS + 1 - self.wg], layout=PER_ROW)
        empty = total == 0
        acc = self._times(acc, jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, total)))
        out = self.scratch[f"out_{self.half}_smem"]
        out[...] = acc.astype(plan.out_dtype)
        if self.wg == 0:
            rows[0] = jnp.where(empty, -jnp.inf, m * (1 / LOG2E) + jnp.log(jnp.where(empty, 1.0, total)))
        plgpu.commit_smem()
        heads = pl.ds(work.row_block * ROWS, ROWS)
        columns = pl.ds(self.wg * HALF, HALF)
        plgpu.copy_smem_to_gmem(out, self.gmem.out.at[work.entry, heads, columns])
        if self.wg == 0:
            plgpu.copy_smem_to_gmem(rows.at[0], self.gmem.lse.at[work.entry, heads])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
