"""Device memory of the backward kernel."""

from typing import Any, NamedTuple

from pallas_fa.backends.mma.backward.plan import BackwardPlan


class Refs(NamedTuple):
    """Device memory by role.

    `arrays`: of score and mask. `visit_table`: None where visits are known while tracing. `dropout`: that of every head, or
    None. `added`: sums in device memory, by number of the array. `dq`: those of dQ, or None. `gradients`: by name.
    `summed`: by number.
    """

    stationary_qk: Any
    stationary_pv: Any
    streamed_qk: Any
    streamed_pv: Any
    neg_lse: Any
    delta: Any
    arrays: tuple[Any, ...]
    visit_table: Any
    dropout: Any
    added: dict[int, Any]
    dq: Any
    gradients: dict[str, Any]
    summed: dict[int, Any]


def named(plan: BackwardPlan, refs: tuple[Any, ...]) -> Refs:
    """Returns the operands and results of a pass, in the order of `run`, by name."""
    queue, scores, kind = list(refs), plan.score_gradients, plan.kind
    take = lambda count: [queue.pop(0) for _ in range(count)]
    stationary_qk, stationary_pv, streamed_qk, streamed_pv, neg_lse, delta = take(6)
    arrays = tuple(take(len(plan.arrays)))
    visit_table = None if plan.visits.known else queue.pop(0)
    dropout = None if plan.problem.dropout is None else queue.pop(0)
    added = dict(zip(scores.added, take(len(scores.added)), strict=True))
    dq = queue.pop(0) if kind.fused else None
    gradients = dict(zip(kind.stored, take(len(kind.stored)), strict=True))
    summed = dict(zip(scores.summed, queue, strict=True))
    operands = stationary_qk, stationary_pv, streamed_qk, streamed_pv, neg_lse, delta
    return Refs(*operands, arrays, visit_table, dropout, added, dq, gradients, summed)
