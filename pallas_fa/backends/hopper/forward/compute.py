"""A compute warpgroup of the forward kernel: the online softmax of 64 queries over all key blocks that they visit."""

import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.dropout import HeadDropout
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.online_softmax import SUM_COLUMNS, online_softmax
from pallas_fa.backends.gpu.periodic_rows import load_repeated
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.gpu.schedule import is_equal
from pallas_fa.backends.gpu.softmax_by_sums import softmax_by_sums
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.forward import epilogue, work
from pallas_fa.backends.hopper.forward.logits import Logits
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import barriers
from pallas_fa.backends.hopper.ping_pong import PingPong
from pallas_fa.backends.hopper.wgmma import Wgmma
from pallas_fa.masks.lengths import lengths_of


class Compute:
    """What warpgroup `wg` does for one query block.

    Step i computes the logits of its key block and, while P V of step i - 1 is still under way, their softmax.
    """

    def __init__(self, plan: ForwardPlan, block: work.QueryBlock, wg: Any, gmem: Any, scratch: dict[str, Any]):
        self.plan, self.block, self.wg, self.gmem, self.scratch = plan, block, wg, gmem, scratch
        self.wgmma = Wgmma(plan.interpret, plan.tiles.q.parts)
        self.ping_pong = PingPong.of(barriers(plan, scratch), wg)
        self.k = plan.tiles.k.matrix(scratch["k_smem"])
        self.values = [(part, part.tiles.matrix(scratch[f"{part.name}_smem"])) for part in plan.value_rows]
        self.q_smem = plan.tiles.q.matrix(scratch["q_smem"])
        self.q_registers: Any = None  # the queries, where they are an operand in registers
        self.t0 = block.t0 + wg * 64
        self.block_steps = work.steps_of(plan, block, gmem)
        self.steps = work.steps_of_warpgroup(plan, block, self.block_steps, wg)
        self.logits = Logits(plan, block, self.block_steps, wg, self.t0, gmem, scratch)
        self.dropout = None
        if plan.problem.dropout is not None:
            self.dropout = HeadDropout.load(plan.problem.dropout, gmem.dropout, block.b, block.n, plan.interpret)
        # Read long before the epilogue: the compiler lets the last P V wait for it there (evidence: forward/sinks).
        self.sink = None if gmem.sinks is None else self._load_sink()

    def run(self) -> tuple[Any, Any]:
        """Returns (steps of the block, steps that use streamed arrays)."""
        plan, steps, end = self.plan, self.steps, self.block_steps.end
        ready = self.scratch["q_ready"]
        plgpu.barrier_wait(ready.at[self.wg] if plan.several_blocks else ready)
        if plan.skips_steps:
            pl.loop(0, steps.first)(self._skip)
            pl.when(steps.first < steps.end)(self._attend)
            pl.when(steps.first == steps.end)(self._release_queries)
            pl.loop(steps.end, end)(self._skip)
        else:
            self._attend()
        return end, work.array_steps(plan, self.block_steps, end)

    def _load_sink(self):
        """Returns the sink of the head; where rows are of several heads, those of the rows."""
        sinks, group = self.gmem.sinks, self.plan.group
        b = self.block.b if sinks.shape[0] > 1 else 0
        if group == 1:
            # Else its address takes scalar registers that the loop over keys needs (evidence: forward/sinks).
            sink = sinks[b, opaque(self.block.n, self.plan.interpret)]
            # It is one more logit: of the first part of the keys only.
            return jnp.where(self.block.parts[0] == 0, sink, -jnp.inf) if self.plan.split_heads else sink
        # Row i is of head i % group. A table of rows would be one more kernel before this one (evidence: forward/sinks).
        return load_repeated(sinks.at[b, pl.ds(self.block.n * group, group)], 64, self.plan.interpret)

    def _slot(self, i):
        return lax.rem(jnp.asarray(self.block.done + i, jnp.int32), self.plan.config.stages)

    def _skip(self, i):
        """Takes part in the barriers of a step that only other warpgroups compute."""
        self.ping_pong.wait_to_issue()
        self.ping_pong.let_next_issue()
        slot = self._slot(i)
        for name, pieces in (("k", self._k_pieces(slot)), ("v", [slot])):
            for piece in pieces:
                plgpu.barrier_wait(self.scratch[f"{name}_ready"].at[piece])
                plgpu.barrier_arrive(self.scratch[f"{name}_free"].at[piece])
        if self.plan.arrays.streamed:
            slot = self.logits.array_slot(i)
            plgpu.barrier_wait(self.scratch["arrays_ready"].at[slot])
            plgpu.barrier_arrive(self.scratch["arrays_free"].at[slot])

    def _k_pieces(self, slot):
        """Returns the numbers of the barriers of the pieces of a tile of keys."""
        count = self.plan.k_pieces
        return [slot * count + piece for piece in range(count)] if count > 1 else [slot]

    def _issue_products(self, x_acc, slot):
        """Issues Q K^T of the keys in a slot, each piece once it is there; the first is."""
        again = lambda x: opaque(x, self.plan.interpret) if self.plan.makes_descriptors_anew else x
        q = self.q_smem.at[again(self.wg)] if self.q_registers is None else self.q_registers
        k = self.k.at[again(slot)]
        _, *others = self._k_pieces(slot)
        if not others:
            self.wgmma.inner_products(x_acc, q, k)
            return
        for i, piece in enumerate([None, *others]):
            if piece is not None:
                plgpu.barrier_wait(self.scratch["k_ready"].at[piece])
            self.wgmma.matmul(x_acc, q.at[i], k.at[i], transpose_b=True)

    def _products(self, x_acc, slot, issued):
        """Returns Q K^T, and releases the keys, each piece once it is used. `issued`: matmuls issued later."""
        *others, last = self._k_pieces(slot)
        for i, piece in enumerate(others):
            self.wgmma.wait(issued + len(others) - i)
            plgpu.barrier_arrive(self.scratch["k_free"].at[piece])
        x = self.wgmma.result(x_acc, in_flight=issued)
        plgpu.barrier_arrive(self.scratch["k_free"].at[last])
        return x

    def _release_queries(self):
        if self.plan.several_blocks:
            if self.plan.arrays.of_kind("column"):
                plgpu.commit_smem()  # read by ordinary loads: order them before the next TMA write
            plgpu.barrier_arrive(self.scratch["q_free"].at[self.wg])

    def _attend(self):
        """The prologue, the mainloop (boundary blocks, full blocks, boundary blocks) and the epilogue."""
        if self.plan.config.q_in_registers and not self.plan.wide:
            self.q_registers = self.wgmma.left_operand(self.q_smem.at[self.wg])
        steps = self.steps
        carry = self._first_step(steps.first, not steps.starts_full)
        after_first = steps.first + 1
        boundary_step, full_step = (functools.partial(self._step, is_boundary=flag) for flag in (True, False))
        if not steps.starts_full and not is_equal(steps.boundary_end, after_first):
            carry = lax.fori_loop(after_first, steps.boundary_end, boundary_step, carry)
        if is_equal(steps.end, after_first):
            self._finish(*carry)
            return
        full_first = jnp.maximum(steps.boundary_end, after_first)
        full_end = steps.end if steps.full_end is None else jnp.clip(steps.full_end, full_first, steps.end)
        carry = lax.fori_loop(full_first, full_end, full_step, carry)
        if steps.full_end is not None:
            carry = lax.fori_loop(full_end, steps.end, boundary_step, carry)
        self._finish(*carry)

    def _first_step(self, i, is_boundary):
        """Returns (acc, its factor, maximum, partial sums, p). Nothing is accumulated yet.

        The factor is what the accumulators are to be multiplied by; None where a step leaves nothing to be done.
        """
        plan, scratch, slot, visited = self.plan, self.scratch, self._slot(i), self.logits.visited(i)
        plgpu.barrier_wait(scratch["k_ready"].at[self._k_pieces(slot)[0]])
        self.ping_pong.wait_to_issue()

        def first_products(x_acc):
            self._issue_products(x_acc, slot)
            self.ping_pong.let_next_issue()
            return self._products(x_acc, slot, issued=0)

        kept = self._kept(i, visited)
        x = self.wgmma.scoped(first_products, (64, plan.config.block_kv))
        if plan.zeroes_padding:
            pl.when(self.wg == 0)(lambda: self._zero_padding(slot))
        per_query = TILE.reduce(1)
        # The factor is that of all steps.
        x, self.factor = self.logits.apply(x, jnp.asarray(i, jnp.int32), is_boundary, visited)
        m, l = self._before_first_step()
        l, p, m, *_ = (*online_softmax(plan, x, self.factor, m, l, is_boundary), m)
        acc = (plgpu.layout_cast(jnp.zeros((64, plan.tiles.v.chunk), jnp.float32), TILE),) * plan.tiles.v.chunks
        factor = None
        if plan.rescales_under_qk:
            factor = plgpu.layout_cast(jnp.ones((64,), jnp.float32), per_query)
        return acc, factor, m, l, self._weights(p, kept)

    def _before_first_step(self):
        """Returns the maximum and the partial sums of no keys: of the sink alone where the softmax starts at it."""
        m = jnp.float32(-jnp.inf if self.plan.subtract_max else 0.0)
        l = plgpu.layout_cast(jnp.zeros((64, SUM_COLUMNS), jnp.float32), TILE)
        if self.sink is not None and self.plan.starts_at_sink:
            m = self.sink * (1 / self._unit)
            is_first = plgpu.broadcasted_iota(jnp.int32, l.shape, 1, layout=TILE) == 0
            weight = jnp.where(self.sink == -jnp.inf, 0.0, 1.0)
            weight = lax.broadcast_in_dim(weight, l.shape, [0]) if weight.ndim else weight
            l = jnp.where(is_first, weight, l)
        m = m if jnp.ndim(m) else plgpu.layout_cast(jnp.full((64,), m, jnp.float32), TILE.reduce(1))
        return m, l

    @property
    def _unit(self):
        """What the maximum is a multiple of (see `online_softmax`)."""
        return 1 / LOG2E if self.plan.problem.score is None else self.factor

    def _kept(self, i, visited):
        """Returns what dropout keeps of the probabilities of step i, which the epilogue scales; None without dropout."""
        if self.dropout is None:
            return None
        shape, s0 = (64, self.plan.config.block_kv), self.logits.first_key(i, visited)
        return self.dropout.draw(shape, self.t0, s0, rounded=True, by_factors=True)

    def _step(self, i, carry, is_boundary):
        """Logits and softmax of step i, while P V of step i - 1 is under way."""
        acc, factor, m, l, p = carry
        plan, scratch = self.plan, self.scratch
        k_slot, v_slot, visited = self._slot(i), self._slot(i - 1), self.logits.visited(i)

        def matmuls(x_acc):
            self._issue_products(x_acc, k_slot)
            like_p = plgpu.layout_cast(
                jnp.zeros(p[0].shape, jnp.float32 if is_boundary else plan.probability_dtype), TILE
            )
            like = (l, like_p, m, m) if plan.subtract_max else (l, like_p)
            # Without the barrier, the compiler rescales before Q K^T is issued.
            scaled = acc if factor is None else self._rescaled(acc, lax.optimization_barrier(factor))
            return self.wgmma.updated(functools.partial(sums, x_acc), scaled, like=like)

        def sums(x_acc, accs):
            plgpu.barrier_wait(scratch["v_ready"].at[v_slot])
            issued = self._weighted_sums(accs, p, v_slot)
            self.ping_pong.let_next_issue()
            x = self._products(x_acc, k_slot, issued)
            logits = self.logits.apply(x, i, is_boundary, visited)
            results = self._softmax(*logits, m, l, is_boundary)
            if plan.config.pin_softmax:
                scratch["pin_smem"][self.wg] = results[2 if plan.pins_maximum else 0]
            return results

        kept = self._kept(i, visited)  # slower between matmuls (evidence: library/dropout-by-philox)
        plgpu.barrier_wait(scratch["k_ready"].at[self._k_pieces(k_slot)[0]])
        self.ping_pong.wait_to_issue()
        acc, (l, p, *new_max) = self.wgmma.scoped(matmuls, (64, plan.config.block_kv))
        plgpu.barrier_arrive(scratch["v_free"].at[v_slot])
        # p is rounded only now: ptxas serialises all matmuls where operands in registers are made while one is in flight
        # (evidence: forward/probabilities-after-the-wait).
        if new_max:
            m, rescale = new_max
            if factor is None:
                acc = self._rescaled(acc, rescale)
            else:
                factor = rescale
        return acc, factor, m, l, self._weights(p, kept)

    def _softmax(self, x, factor, m, l, is_boundary):
        """Returns (partial sums, p), then (maximum, rescaling factor) where a maximum is subtracted."""
        plan = self.plan
        if is_boundary or not plan.maxima_by_sums:
            return online_softmax(plan, x, factor, m, l, is_boundary, plan.lag)
        dtype = plan.probability_dtype
        return softmax_by_sums(x, factor, m, l, lag=plan.lag, dtype=dtype, interpret=plan.interpret)

    def _rescaled(self, acc, factor):
        return epilogue.times_rows_unless_1(acc, factor, self.plan.interpret)

    def _weights(self, p, kept):
        """Returns probabilities as a left operand of matmuls, without those that are dropped."""
        parts = products.operand(self.plan.problem, p)
        return parts if kept is None else tuple(map(kept.select, parts))

    def _weighted_sums(self, accs, p, slot):
        """Issues P V, part by part of the values; returns how many matmuls these are."""
        issued = 0
        for part, v in self.values:
            columns = slice(part.first, part.first + part.count)
            weights = p if len(self.values) == 1 else tuple(x[:, columns] for x in p)
            issued += self.wgmma.weighted_sums(accs, weights, v.at[slot])
        return issued

    def _finish(self, acc, factor, m, l, p):
        """The last P V, and the stores."""
        plan, scratch = self.plan, self.scratch
        self._release_queries()
        slot = self._slot(self.steps.end - 1)
        if factor is not None:
            acc = epilogue.times_rows(acc, factor)
        plgpu.barrier_wait(scratch["v_ready"].at[slot])

        def matmuls(accs):
            self._weighted_sums(accs, p, slot)

        acc, _ = self.wgmma.updated(matmuls, acc)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        sink = None if plan.starts_at_sink else self.sink
        epilogue.store(plan, self.block, self.wg, self.gmem, scratch, acc, m, l, self._unit, sink)

    def _zero_padding(self, slot):
        """Zeroes the values past the key length in the first key block, then announces the block."""
        plan, v = self.plan, self.values[0][1].at[slot]  # zeroed values are in one part
        plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])
        _, mask = plan.arrays.with_scalars(self.logits.scalars())
        length = lengths_of(mask).kv_lengths
        start = self.steps.last * plan.config.block_kv

        @pl.when(start + plan.config.block_kv > length)
        def _():
            tiles = plan.tiles.v
            # In parts of 64 rows; the last two overlap where the block is no multiple.
            rows = sorted({min(row, plan.config.block_kv - 64) for row in range(0, plan.config.block_kv, 64)})
            for row, column in itertools.product(rows, range(0, tiles.chunk, tiles.piece)):
                for chunk in range(tiles.copies):
                    part = v.at[chunk, pl.ds(row, 64), pl.ds(column, tiles.piece)]
                    key = start + row + plgpu.broadcasted_iota(jnp.int32, (64, tiles.piece), 0, layout=TILE)
                    values = plgpu.load(part, layout=TILE)
                    part[...] = jnp.where(key < length, values, jnp.zeros((), values.dtype))

        plgpu.commit_smem()
        for _copy in range(plan.v_arrivals):
            plgpu.barrier_arrive(self.scratch["v_ready"].at[slot])
