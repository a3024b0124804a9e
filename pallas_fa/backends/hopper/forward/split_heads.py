"""How many heads have their keys in parts, and in how many, to fill the GPU (evidence: forward/split-heads).

Query blocks run in rounds of as many as there are multiprocessors, and the last round may be short, or the only one. The
keys of the last heads are then split over CTAs, as in Flash-Decoding (Dao et al., 2023).
"""

import dataclasses

import jax
import numpy as np

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.busy import busy
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.problem import Problem

_MOST_PARTS = 16
_MOST_PLACES = 2048  # past it, a short last round is little of the whole, and to look for better takes time
_FASTER = 0.97  # of the time without, to be worth it
# What the times below are made of.
_CTA_START, _NEXT_BLOCK = 1.5, 0.5  # us: the first, and another block of a CTA
_FLOPS = 4.8e6  # a us, of one multiprocessor
_MERGE, _BYTES = 4.0, 2.5e6  # us of the kernel that merges, and what it and the stores move a us


def why_not(problem: Problem, config: ForwardConfig) -> str | None:
    """Returns why the heads that `config` names can't have their keys in parts; None if they can."""
    count, N = config.split_heads, problem.dims.N
    if config.grouped_rows:
        return f"config={problem.config!r} splits the keys of rows that are grouped"
    if count > problem.dims.B * N or (count > N and count % N):
        return (
            f"split_heads={count} of {problem.dims.B} x {N} heads; it takes up to {N}, or a multiple of {N}: heads of the"
            " last batch entry, or whole entries"
        )
    return None


def with_split_heads(plan: ForwardPlan, gpu: Gpu) -> ForwardPlan:
    """Returns the plan with keys in parts where that is estimated to be faster; else `plan`."""
    c = plan.config
    if plan.group > 1 or plan.visit_lists or plan.by_tickets or c.kv_splits > 1 or plan.grid.ctas > _MOST_PLACES:
        return plan
    times = [(_time(p, gpu), i, p) for i, p in enumerate([plan, *_candidates(plan, gpu)])]
    best = min(times)
    return best[-1] if best[0] < _FASTER * times[0][0] else plan


def remark(plan: ForwardPlan) -> str | None:
    """Returns what is split, in words; None where nothing is."""
    heads, all_heads = plan.split_heads, plan.problem.dims.B * plan.problem.dims.N
    if not heads:
        return None
    of = "all heads" if heads == all_heads else f"the last {heads} of {all_heads} heads"
    return f"the keys of {of} are in {plan.config.kv_splits} parts, which fills the GPU"


def _candidates(plan, gpu):
    for count in sorted(_counts_of_heads(plan, gpu)):
        for parts in range(2, min(_MOST_PARTS, plan.kv_blocks) + 1):
            config = dataclasses.replace(plan.config, kv_splits=parts, split_heads=count)
            if config.persistent_ctas:
                config = dataclasses.replace(config, persistent_ctas=gpu.multiprocessors)
            candidate = dataclasses.replace(plan, config=config)
            if candidate.grid_of_parts.ctas <= _MOST_PLACES:
                yield candidate


def _counts_of_heads(plan, gpu):
    """Returns how many heads may have their keys in parts: all, or so many that the others take 1, 2 or 3 rounds fewer."""
    N, heads, of_head = plan.problem.dims.N, plan.whole_heads, plan.grid.ctas_per_head
    counts = {heads}
    if plan.problem.mask is None:  # all query blocks are the same work
        rounds = -(-plan.grid.ctas // gpu.multiprocessors)
        for fewer in range(max(rounds - 3, 1), rounds):
            count = heads - fewer * gpu.multiprocessors // of_head
            counts.add(count if count <= N else -(-count // N) * N)
    return counts


def _time(plan, gpu):
    """Returns how long the plan takes, in us."""
    c, problem = plan.config, plan.problem
    step = 2 * c.block_q * c.block_kv * (problem.H + problem.Hv / plan.column_parts) / _FLOPS
    start = _NEXT_BLOCK if c.persistent_ctas else _CTA_START
    steps = np.repeat(_steps(plan), plan.column_parts)
    whole = np.repeat(steps, plan.whole_heads)
    parts = np.repeat(np.ceil(steps / c.kv_splits), plan.split_heads * c.kv_splits)
    of_places = np.concatenate([whole, parts]) * step + start
    time = _busy_in_turn(of_places, plan.ctas) if c.persistent_ctas else busy(of_places, gpu.multiprocessors)
    if not plan.split_heads:
        return time
    rows = plan.split_heads * plan.blocks.count * c.block_q
    moved = rows * problem.Hv * (2 * c.kv_splits * 4 + problem.dtype.itemsize)
    return time + _MERGE + moved / _BYTES


def _busy_in_turn(times, ctas):
    """Returns how long CTAs are busy that take places in turn."""
    return np.bincount(np.arange(times.size) % ctas, weights=times).max()


def _steps(plan):
    """Returns the steps of each CTA of a head, those of the first to run first."""
    blocks, mask = plan.blocks, plan.problem.mask
    if mask is None or jax.tree.leaves(mask):  # which keys are visited is not known: all may be
        return np.full(blocks.ctas, plan.kv_blocks * blocks.count / blocks.ctas)
    sizes = plan.config.block_q, plan.problem.dims.T, plan.problem.dims.S, plan.config.block_kv
    found = schedule.visits_of_blocks(mask.kv_range, mask.full_kv_range, *sizes)
    counts = np.broadcast_to(np.asarray(found.last) - np.asarray(found.first), (1, 1, blocks.count))[0, 0]
    counts = counts[::-1] if blocks.last_first else counts
    return counts if not blocks.pairs else np.full(blocks.ctas, counts.sum() / blocks.ctas)
