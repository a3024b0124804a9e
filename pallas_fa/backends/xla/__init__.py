"""Attention in plain JAX, in chunks: any platform, any float dtype, O(T) memory."""

from pallas_fa.backends.record import NO_DROPOUT, NO_TILES, Backend, Support
from pallas_fa.backends.xla import attention
from pallas_fa.problem import Problem


def _supports(problem: Problem) -> Support:
    if problem.dropout_rate:
        return Support.neither(NO_DROPOUT)
    return Support() if problem.config is None else Support.neither(NO_TILES.format(config=problem.config))


BACKEND = Backend("xla", _supports, attention.forward, attention.backward)
