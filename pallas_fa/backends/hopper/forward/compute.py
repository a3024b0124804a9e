"""A compute warpgroup of the forward kernel: the online softmax of 64 queries over all tiles of keys that they visit."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import masks, scores
from pallas_fa.backends.gpu import elementwise, schedule
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.hopper.forward import work
from pallas_fa.backends.hopper.forward.plan import SUM_COLUMNS, ForwardPlan
from pallas_fa.backends.hopper.wgmma import Wgmma

_TILE, _PER_QUERY, _PER_KEY = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class Compute:
    """What warpgroup `wg` does for one block of queries."""

    def __init__(self, plan: ForwardPlan, block: work.Block, wg: Any, gmem: Any, scratch: dict[str, Any]):
        self.plan, self.block, self.wg, self.gmem, self.scratch = plan, block, wg, gmem, scratch
        self.k, self.v = (getattr(plan, name).views(scratch[f"{name}_smem"])[0] for name in ("k", "v"))
        self.q = plan.q.views(scratch["q_smem"])[0].at[wg]
        self.wgmma = Wgmma(plan.interpret)
        self.t0 = block.t0 + wg * 64
        self.block_steps = work.steps_of(plan, block, gmem.visit_table)
        self.steps = work.steps_of_warpgroup(plan, block, self.block_steps, wg)

    def run(self) -> tuple[Any, Any]:
        """Returns (steps of the block, steps that use streamed arrays)."""
        plan, steps, end = self.plan, self.steps, self.block_steps.end
        plgpu.barrier_wait(self.scratch["q_ready"])
        if plan.skips_steps:
            pl.loop(0, steps.first)(self._skip)
            pl.when(steps.first < steps.end)(self._attend)
            pl.when(steps.first == steps.end)(self._release_queries)
            pl.loop(steps.end, end)(self._skip)
        else:
            self._attend()
        return end, work.array_steps(plan, self.block_steps, end)

    def _slot(self, i):
        return lax.rem(jnp.asarray(self.block.done + i, jnp.int32), self.plan.config.stages)

    def _wait_turn(self):
        if self.plan.takes_turns:
            self.plan.turns(self.scratch).wait(self.wg)

    def _pass_turn(self):
        if self.plan.takes_turns:
            self.plan.turns(self.scratch).arrive(lax.rem(self.wg + 1, self.plan.config.compute_wgs))

    def _skip(self, i):
        """A step of the other warpgroups."""
        self._wait_turn()
        self._pass_turn()
        slot = self._slot(i)
        for name in ("k", "v"):
            plgpu.barrier_wait(self.scratch[f"{name}_ready"].at[slot])
            plgpu.barrier_arrive(self.scratch[f"{name}_free"].at[slot])
        if self.plan.streamed:
            slot = self._array_slot(i)
            plgpu.barrier_wait(self.scratch["arrays_ready"].at[slot])
            plgpu.barrier_arrive(self.scratch["arrays_free"].at[slot])

    def _release_queries(self):
        if self.plan.pairs:
            plgpu.barrier_arrive(self.scratch["q_free"])

    def _attend(self):
        if self.plan.config.q_in_registers:
            self.q = self.wgmma.left_operand(self.q)
        steps, cut_first = self.steps, not schedule.is_equal(self.steps.cut_end, 0)
        carry = self._first_step(steps.first, cut_first)
        after_first = steps.first + 1
        cut_step, full_step = (functools.partial(self._step, cut=cut) for cut in (True, False))
        if cut_first:
            carry = lax.fori_loop(after_first, steps.cut_end, cut_step, carry)
        full_first = jnp.maximum(steps.cut_end, after_first)
        full_end = steps.end if steps.full_end is None else jnp.clip(steps.full_end, full_first, steps.end)
        carry = lax.fori_loop(full_first, full_end, full_step, carry)
        if steps.full_end is not None:
            carry = lax.fori_loop(full_end, steps.end, cut_step, carry)
        self._finish(*carry)

    def _first_step(self, i, cut):
        """(acc, maximum, partial sums, p): nothing is accumulated yet."""
        plan, scratch, slot = self.plan, self.scratch, self._slot(i)
        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        self._wait_turn()

        def logits(x_acc):
            self.wgmma.inner_products(x_acc, self.q, self.k.at[slot])
            self._pass_turn()
            return self.wgmma.result(x_acc, in_flight=0)

        x = self.wgmma.scoped(logits, (64, plan.config.block_kv))
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        if plan.zeroes_padding:
            pl.when(self.wg == 0)(lambda: self._zero_padding(slot))
        m = plgpu.layout_cast(jnp.full((64,), -jnp.inf if plan.shifts else 0.0, jnp.float32), _PER_QUERY)
        l = plgpu.layout_cast(jnp.zeros((64, SUM_COLUMNS), jnp.float32), _TILE)
        x, self.factor = self._scored(x, jnp.asarray(i, jnp.int32), cut)  # the factor is that of all steps
        l, p, m, *_ = (*_softmax(plan, x, self.factor, m, l, cut), m)
        acc = (plgpu.layout_cast(jnp.zeros((64, plan.v.chunk), jnp.float32), _TILE),) * plan.v.chunks
        return acc, m, l, p.astype(plan.problem.dtype)

    def _step(self, i, carry, cut):
        """Logits and softmax of step i, and under them P V of step i - 1."""
        acc, m, l, p = carry
        plan, scratch = self.plan, self.scratch
        k_slot, v_slot = self._slot(i), self._slot(i - 1)

        def matmuls(accs, x_acc):
            self.wgmma.inner_products(x_acc, self.q, self.k.at[k_slot])
            plgpu.barrier_wait(scratch["v_ready"].at[v_slot])
            self.wgmma.weighted_sums(accs, p, self.v.at[v_slot])
            self._pass_turn()
            x = self.wgmma.result(x_acc, in_flight=len(accs))
            plgpu.barrier_arrive(scratch["k_free"].at[k_slot])
            results = _softmax(plan, *self._scored(x, i, cut), m, l, cut)
            if plan.config.pin_softmax:
                scratch["pin_smem"][self.wg] = results[0]
            return results

        plgpu.barrier_wait(scratch["k_ready"].at[k_slot])
        self._wait_turn()
        like_p = plgpu.layout_cast(jnp.zeros(p.shape, jnp.float32), _TILE)
        like = (l, like_p, m, m) if plan.shifts else (l, like_p)
        acc, (l, p, *shift) = self.wgmma.updated(matmuls, acc, (64, plan.config.block_kv), like=like)
        plgpu.barrier_arrive(scratch["v_free"].at[v_slot])
        # Rounded only now: ptxas serialises all matmuls where operands in registers are made while one is in flight.
        if shift:
            m, rescale = shift
            acc = _times_rows(acc, rescale)
        return acc, m, l, p.astype(plan.problem.dtype)

    def _finish(self, acc, m, l, p):
        """The last P V, the division by the row sums, and the stores."""
        plan, scratch, block = self.plan, self.scratch, self.block
        self._release_queries()
        slot = self._slot(self.steps.end - 1)
        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        acc, _ = self.wgmma.updated(lambda accs: self.wgmma.weighted_sums(accs, p, self.v.at[slot]), acc)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])

        total = l.sum(axis=1)
        empty = total == 0
        factor = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, total))
        unit = 1 / LOG2E if plan.problem.score is None else self.factor
        lse = jnp.where(empty, -jnp.inf, m * unit + jnp.log(jnp.where(empty, 1.0, total)))
        if plan.pairs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the block of queries before
        out_smem, out_copied = plan.out.views(scratch["out_smem" if plan.separate_out else "q_smem"])
        for chunk, x in enumerate(_times_rows(acc, factor)):
            out_smem[self.wg, chunk] = x.astype(plan.problem.dtype)
        scratch["lse_smem"][self.wg] = lse
        plgpu.commit_smem()
        rows = pl.ds(self.t0, 64)
        plan.out.store(out_copied.at[self.wg], self.gmem.out, block.b, rows, block.n)
        lse_rows = self.gmem.lse.at[block.b, block.n, rows]
        store_lse = lambda: plgpu.copy_smem_to_gmem(scratch["lse_smem"].at[self.wg], lse_rows)
        if plan.skips_steps or self.gmem.lse.shape[2] % plan.config.block_q == 0:
            store_lse()
        else:  # past the end lie the rows of the next head
            pl.when(self.t0 < plan.problem.dims.T)(store_lse)

    # ---- scores, masks and their arrays ----

    def _scored(self, x, i, cut):
        """(y, factor > 0) whose product are the logits of step i after score and mask, -inf where masked."""
        plan, problem, block = self.plan, self.plan.problem, self.block
        factor = problem.scale
        if problem.score is None and not cut:
            return _with_positive(x, factor)
        score, mask = self._arrays(x.shape, i, cut)
        t = self.t0 + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_TILE)
        s = (self.steps.last - i) * plan.config.block_kv + plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=_TILE)
        if problem.score is not None:
            apply = lambda x, t, s, score: scores.evaluate(score, x * problem.scale, block.b, block.n, t, s)
            x, factor = elementwise.inline_times(apply, x, t, s, score)
        x, factor = _with_positive(x, factor)
        if cut:
            if problem.dims.S % plan.config.block_kv:
                x = jnp.where(s < problem.dims.S, x, -jnp.inf)
            if problem.mask is not None:
                ok = elementwise.inline(lambda t, s, mask: mask.allowed(block.b, block.n, t, s), t, s, mask)
                x = jnp.where(jnp.broadcast_to(ok, x.shape), x, -jnp.inf)
        return x, factor

    def _arrays(self, shape, i, cut):
        """(score, mask) with their arrays for step i: scalars, or broadcast to the tile; None where not loaded."""
        plan, scratch = self.plan, self.scratch
        slot = self._array_slot(i) if plan.streamed and (plan.arrays_always or cut) else None
        if slot is not None:
            plgpu.barrier_wait(scratch["arrays_ready"].at[slot])
        loaded = [self._array(a, slot, shape) for a in range(len(plan.arrays))]
        if slot is not None:
            plgpu.commit_smem()  # read by ordinary loads: order them before the next TMA write
            plgpu.barrier_arrive(scratch["arrays_free"].at[slot])
        return jax.tree.unflatten(plan.tree, loaded)

    def _array_slot(self, i):
        step = self.block.arrays_done + work.array_steps(self.plan, self.block_steps, i)
        return lax.rem(jnp.asarray(step, jnp.int32), self.plan.config.stages)

    def _array(self, a, slot, shape):
        array = self.plan.arrays[a]
        if array.kind == "scalar":
            return self._scalar(a)
        smem = self.scratch[f"array{a}_smem"]
        if array.kind == "column":
            values = plgpu.load(smem.at[self.wg], layout=_PER_QUERY)
            return array.restore(lax.broadcast_in_dim(values, shape, [0]))
        if slot is None:
            return None
        if array.kind == "row":
            values = plgpu.load(smem.at[slot], layout=_PER_KEY)
            return array.restore(lax.broadcast_in_dim(values, shape, [1]))
        return array.restore(plgpu.load(smem.at[slot, self.wg], layout=_TILE))

    def _scalar(self, a):
        array = self.plan.arrays[a]
        return array.restore(self.gmem.arrays[a][array.index(self.block.b, self.block.n)])

    def _zero_padding(self, slot):
        """Zeroes the values past the key length in the first tile, then announces it."""
        plan, v = self.plan, self.v.at[slot]
        plgpu.barrier_wait(self.scratch["v_loaded"])
        leaves = [self._scalar(a) if array.kind == "scalar" else None for a, array in enumerate(plan.arrays)]
        _, mask = jax.tree.unflatten(plan.tree, leaves)
        length = masks.lengths_of(mask).kv_lengths
        start = self.steps.last * plan.config.block_kv

        @pl.when(start + plan.config.block_kv > length)
        def _():
            for row, column in itertools.product(range(0, plan.config.block_kv, 64), range(0, plan.v.chunk, 64)):
                for chunk in range(plan.v.chunks):
                    part = v.at[chunk, pl.ds(row, 64), pl.ds(column, 64)]
                    key = start + row + plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_TILE)
                    values = plgpu.load(part, layout=_TILE)
                    part[...] = jnp.where(key < length, values, jnp.zeros((), values.dtype))

        plgpu.commit_smem()
        for _chunk in range(plan.v.chunks):
            plgpu.barrier_arrive(self.scratch["v_ready"].at[slot])


def _times_rows(chunks, factor):
    return tuple(x * lax.broadcast_in_dim(factor, x.shape, [0]) for x in chunks)


def _with_positive(x, factor):
    """The product of both as one with a factor > 0: only then is the maximum of the product that of x, times it."""
    return (x, factor) if factor > 0 else (x * factor, 1.0)


def _softmax(plan, x, factor, m, l, cut):
    """Online softmax of the logits x * factor: (partial sums, p), then (maximum, rescaling factor); all float32.

    The maximum is that of the logits in base 2, and with a score, that of x: a bias such as -1e10 in place of a mask
    leaves no digits to multiply first and subtract then. A row may still be all -inf only under a mask, or where a score
    gave -inf.
    """
    base_2 = factor * LOG2E
    if not plan.shifts:
        p = jnp.exp2(x * base_2)
        return _with_columns_of(p, l), p
    has_score = plan.problem.score is not None
    new_m = jnp.maximum(m, x.max(axis=1) if has_score else x.max(axis=1) * base_2)
    shift = jnp.where(new_m == -jnp.inf, 0.0, new_m) if cut or has_score else new_m
    shifts = lax.broadcast_in_dim(shift, x.shape, [0])
    if has_score:
        p, rescale = jnp.exp2((x - shifts) * base_2), jnp.exp2((m - shift) * base_2)
    else:  # one instruction for product and difference; 4 to 6% faster at head dim 128
        p, rescale = jnp.exp2(x * base_2 - shifts), jnp.exp2(m - shift)
    return _with_columns_of(p, l * lax.broadcast_in_dim(rescale, l.shape, [0])), p, new_m, rescale


def _with_columns_of(p, l):
    """The partial sums l, with p added."""
    for column in range(0, p.shape[1], SUM_COLUMNS):
        l = l + p[:, column : column + SUM_COLUMNS]
    return l
