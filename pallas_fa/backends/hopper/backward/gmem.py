"""Device memory of the backward kernel."""

from typing import Any, NamedTuple

from pallas_fa.backends.hopper.backward.plan import BackwardPlan


class Refs(NamedTuple):
    """Device memory by role.

    `arrays`: of score and mask. `visit_table`: None where visits are known while tracing, and a function where they follow
    from sequence lengths (see `StreamedVisits.of_part`). `dropout`: that of every head, or None. `ds_factors`: those
    of `float16_range.DsScale`, or None. `tickets`: the memory of `tickets`, or None. `dq_sums` and `added` are added to;
    `dq_claims` has a counter for each tile of `dq_sums` (see `first_store`), `array_claims` for each of
    `Order.ordered_sums`. Of `added`, gradients that are not shared are stored.
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
    ds_factors: Any
    tickets: Any
    dq_claims: Any
    dq_sums: Any
    array_claims: dict[int, Any]
    added: dict[int, Any]
    gradients: dict[str, Any]
    summed: dict[int, Any]


def named(plan: BackwardPlan, refs: tuple[Any, ...]) -> Refs:
    """Returns the operands and results of a pass, in the order of `backward`, by name."""
    queue, scores = list(refs), plan.score_gradients
    take = lambda count: [queue.pop(0) for _ in range(count)]
    stationary_qk, stationary_pv, streamed_qk, streamed_pv, neg_lse, delta = take(6)
    arrays = tuple(take(len(plan.arrays)))
    if plan.visits.from_lengths:
        visit_table = lambda b, n: plan.arrays.with_scalars(plan.arrays.scalars(arrays, b, n))[1]
    else:
        visit_table = None if plan.visits.known else queue.pop(0)
    dropout = None if plan.problem.dropout is None else queue.pop(0)
    ds_factors = queue.pop(0) if plan.scales_ds else None
    tickets = queue.pop(0) if plan.order.by_tickets else None
    dq = queue.pop(0) if plan.dq and plan.dq.start else None
    array_claims = dict(zip(plan.order.ordered_sums, take(len(plan.order.ordered_sums)), strict=True))
    in_refs = [i for i in scores.added if i not in plan.array_results]
    added = dict(zip(in_refs, take(len(in_refs)), strict=True))
    claims, sums = None, dq
    if plan.dq and plan.dq.is_result:
        claims, sums = dq, queue.pop(0)
    gradients = dict(zip(plan.kind.stored, take(len(plan.kind.stored)), strict=True))
    added |= dict(zip(plan.array_results, take(len(plan.array_results)), strict=True))
    summed = dict(zip(scores.summed, queue, strict=True))
    operands = stationary_qk, stationary_pv, streamed_qk, streamed_pv, neg_lse, delta
    of_dq = claims, sums
    return Refs(
        *operands, arrays, visit_table, dropout, ds_factors, tickets, *of_dq, array_claims, added, gradients, summed
    )
