"""The load warpgroup of the kernel for latent attention."""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper import pages
from pallas_fa.backends.hopper.mla.plan import HV, KEYS, PIECES, ROWS, H, MlaPlan
from pallas_fa.backends.hopper.mla.work import Work

# In the order in which the warpgroups release the pieces of a pair of key blocks.
_ORDER = ("rope", 0), ("left", 0), ("rope", 1), ("right", 0), ("left", 1), ("right", 1)


def load(plan: MlaPlan, work: Work, gmem: Any, scratch: dict[str, Any]) -> None:
    """Loads the queries, then the pieces of all key blocks, pair after pair."""
    query, rows = gmem.q.at[work.query], pl.ds(work.row_block * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(query.at[rows, pl.ds(HV, H - HV)], scratch["p_smem"].at[1], scratch["q_ready"])
    plgpu.copy_gmem_to_smem(query.at[rows, pl.ds(0, HV)], scratch["q_smem"].at[0], scratch["q_ready"])

    @pl.loop(0, work.steps)
    def _(i):
        places = [_places(plan, work, gmem, work.key_block(i, slot)) for slot in (0, 1)]  # before any wait
        for name, slot in _ORDER:
            pl.when(i > 0)(lambda name=name, slot=slot: plgpu.barrier_wait(scratch[f"{name}_free"].at[slot]))
            _load_piece(gmem, scratch, name, slot, places[slot])

    for name, slot in _ORDER:  # every completed phase is waited for, before the CTA ends
        plgpu.barrier_wait(scratch[f"{name}_free"].at[slot])


def _places(plan, work, gmem, key_block):
    """Returns the boxes of the rows of a key block: one of a sequence, or those of its pages."""
    rows, held = pl.ds(key_block * KEYS, KEYS), plan.problem.pages
    return (
        [pages.Box(work.b, rows, pl.ds(0, KEYS))] if held is None else pages.places(held, gmem.page_table, work.b, rows)
    )


def _load_piece(gmem, scratch, name, slot, places):
    start, size = PIECES[name]
    for entry, rows, of_piece in places:
        source = gmem.cache.at[entry, rows, pl.ds(start, size)]
        target = scratch[f"{name}_smem"].at[slot, of_piece]
        plgpu.copy_gmem_to_smem(source, target, scratch[f"{name}_ready"].at[slot])
