"""The two compute warpgroups of the kernel for latent attention.

Both hold the same 64 query heads, and each half of the output's columns: all of it would not fit the registers of one. In a
step each computes the logits and probabilities of one of two key blocks, and hands its probabilities to the other through
shared memory. The maximum passes from the first warpgroup to the second and back, so that the first takes its
exponentials, and issues its first P V, while the second's logits are still computed ("seesaw" scheduling of FlashMLA,
DeepSeek, 2025).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.hopper.mla.plan import HALF, HALVES, KEYS, PIECES, ROWS, MlaPlan
from pallas_fa.backends.hopper.mla.work import Work
from pallas_fa.backends.hopper.wgmma import Wgmma

TILE = plgpu.Layout.WGMMA
_PER_ROW = TILE.reduce(1)
_ROW_SUMS = 2  # where those of both warpgroups start in `rows_smem`, after the maxima


class Warpgroup:
    """What warpgroup `wg`, 0 or 1, does for the work of a CTA. Values lie in the first columns of keys."""

    def __init__(self, plan: MlaPlan, work: Work, wg: int, gmem: Any, scratch: dict[str, Any]):
        self.plan, self.work, self.wg, self.gmem, self.scratch = plan, work, wg, gmem, scratch
        self.wgmma = Wgmma(plan.interpret)
        self.half = HALVES[wg]
        self.unit = plan.problem.scale * LOG2E

    def run(self) -> None:
        """Attends to all keys and stores the results."""
        plgpu.barrier_wait(self.scratch["q_ready"])
        self.q_rope = plgpu.load(self.scratch["p_smem"].at[0], layout=TILE)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), TILE)
        per_row = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), _PER_ROW)
        carry = self._step(0, (zeros, per_row(-jnp.inf), per_row(0.0)), is_boundary=True)
        carry = lax.fori_loop(1, self.work.steps, lambda i, carry: self._step(i, carry, is_boundary=False), carry)
        self._finish(*carry)

    def _step(self, i, carry, is_boundary):
        step = self._first if self.wg == 0 else self._second
        return step(self._logits(i, is_boundary), carry, i, is_boundary)

    def _logits(self, i, is_boundary):
        """The products of the queries and this warpgroup's key block; -inf past the limit."""
        scratch, slot = self.scratch, self._slot(self.wg)

        def products(acc):
            for name in ("rope", self.half, HALVES[1 - self.wg]):  # in the order in which they arrive
                start, size = PIECES[name]
                plgpu.barrier_wait(scratch[f"{name}_ready"].at[slot])
                q = self.q_rope if name == "rope" else scratch["q_smem"].at[:, pl.ds(start, size)]
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
        own_m = jnp.maximum(m, x.max(axis=1) * self.unit)
        self._announce(own_m)
        p = self._exp2(x * self.unit, own_m, is_boundary)
        acc, p_operand = self._times(acc, self._exp2(m, own_m, is_boundary)), p.astype(self.plan.problem.dtype)
        self._zero_padding(i, 0, is_boundary)

        def body(accs):
            self.wgmma.matmul(accs[0], p_operand, self._values(0))
            new_m = self._announced()
            rescale = self._exp2(own_m, new_m, is_boundary)
            rescaled = self._times(p, rescale)
            self._hand_over(rescaled)
            return new_m, rescale, l * self._exp2(m, new_m, is_boundary) + rescaled.sum(axis=1)

        (acc,), (m, rescale, l) = self.wgmma.updated(body, (acc,), like=(m, m, l))
        plgpu.barrier_arrive(self.scratch["left_free"].at[0])
        acc = self._others_values(self._times(acc, rescale), i, is_boundary)
        return acc, m, l

    def _second(self, x, carry, i, is_boundary):
        """A step of the second warpgroup."""
        acc, m, l = carry
        new_m = jnp.maximum(self._announced(), x.max(axis=1) * self.unit)
        self._announce(new_m)
        p, rescale = self._exp2(x * self.unit, new_m, is_boundary), self._exp2(m, new_m, is_boundary)
        acc, p_operand = self._times(acc, rescale), p.astype(self.plan.problem.dtype)
        self._zero_padding(i, 1, is_boundary)

        def body(accs):
            self.wgmma.matmul(accs[0], p_operand, self._values(1))
            self._hand_over(p)

        (acc,), _ = self.wgmma.updated(body, (acc,))
        plgpu.barrier_arrive(self.scratch["right_free"].at[1])
        return self._others_values(acc, i, is_boundary), new_m, l * rescale + p.sum(axis=1)

    def _others_values(self, acc, i, is_boundary):
        """Adds P V of the other warpgroup's key block."""
        other = 1 - self.wg
        plgpu.barrier_wait(self.scratch["p_ready"].at[other])
        self._zero_padding(i, other, is_boundary)

        def body(accs):
            self.wgmma.matmul(accs[0], self.scratch["p_smem"].at[other], self._values(other))

        (acc,), _ = self.wgmma.updated(body, (acc,))
        plgpu.barrier_arrive(self.scratch[f"{self.half}_free"].at[other])
        return acc

    def _values(self, slot):
        return self.scratch[f"{self.half}_smem"].at[self._slot(slot)]

    def _slot(self, slot):
        """`slot`, but such that compilers compute the descriptors of matmuls from it anew in each step (see `opaque`)."""
        return opaque(jnp.int32(slot), self.plan.interpret)

    def _announce(self, m):
        """Lets the other warpgroup see the maxima."""
        self.scratch["rows_smem"][self.wg] = m
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["max_ready"].at[self.wg])

    def _announced(self):
        other = 1 - self.wg
        plgpu.barrier_wait(self.scratch["max_ready"].at[other])
        return plgpu.load(self.scratch["rows_smem"].at[other], layout=_PER_ROW)

    def _hand_over(self, p):
        """Stores probabilities for the other warpgroup's matmul."""
        self.scratch["p_smem"][self.wg] = p.astype(self.plan.problem.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["p_ready"].at[self.wg])

    @staticmethod
    def _exp2(x, m, is_boundary):
        """2^(x - m), 0 where both are -inf: before the first keys, and in a part without keys."""
        shift = jnp.where(m == -jnp.inf, 0.0, m) if is_boundary else m
        return jnp.exp2(x - (lax.broadcast_in_dim(shift, x.shape, [0]) if x.ndim > 1 else shift))

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
        rows[_ROW_SUMS + self.wg] = l
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["done"])
        plgpu.barrier_wait(self.scratch["done"])  # and nothing uses keys any more
        total = l + plgpu.load(rows.at[_ROW_SUMS + 1 - self.wg], layout=_PER_ROW)
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
