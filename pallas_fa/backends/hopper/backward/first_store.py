"""Sums of dQ in device memory that need no zeros before the kernel: the first CTA to have something for a tile stores it.

The CTAs that come later add to what was stored. Each tile has a counter, 0 before the kernel. The CTA that finds 0 there has
claimed the tile. Once its stores are done it publishes the tile through the counter, and the others wait for that before
they add. They wait for a CTA that runs, since it has claimed the tile.

No CTAs wait for each other in a circle, whichever run at the same time. Where one warp of a CTA claims tiles, it publishes
each before it claims the next, so no CTA waits for one that waits. Where two warps alternate, one may wait while a tile
that the other has claimed is still computed. There all CTAs visit the tiles in the same order, so a CTA that others wait for
can itself wait only for an earlier tile. Where they don't (`DqSums.claims_late`), a warp claims a tile once that lies in
shared memory, and then waits for nothing but its own stores; to ask before whether it is stored spares most claims.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.words import number_by, run_on

_STORED = 1 << 30  # what the counter of a stored tile has reached; there are fewer CTAs


def is_stored(counter: Any, interpret: bool) -> Any:
    """Returns whether the tile is stored and TMA may add to it, as far as the warp that calls can see; it claims nothing."""
    if interpret:
        return False

    text = """{
        .reg .pred p;
        .reg .b32 seen;
        mov.u32 seen, %laneid;
        setp.eq.u32 p, seen, 0;
        @p ld.acquire.gpu.global.u32 seen, [$1];
        shfl.sync.idx.b32 seen, seen, 0, 31, 0xffffffff;
        mov.u32 $0, seen;
        bar.warp.sync 0xffffffff;
        fence.proxy.async.global;
    }"""
    return number_by(text, counter) >= _STORED


def claim(counter: Any, interpret: bool) -> Any:
    """Returns whether the warp that calls is to store the tile; if not, once TMA may add to the tile.

    `counter`: ref of one int32 in device memory. In JAX's interpreter, which has no atomic operations, each CTA has tiles
    and counters of its own.
    """
    if interpret:
        counter[0] = 1
        return True

    text = f"""{{
        .reg .pred p;
        .reg .b32 seen;
        mov.u32 seen, %laneid;
        setp.eq.u32 p, seen, 0;
        @p atom.acquire.gpu.global.add.u32 seen, [$1], 1;
        shfl.sync.idx.b32 seen, seen, 0, 31, 0xffffffff;
        mov.u32 $0, seen;
        setp.eq.u32 p, seen, 0;
        @p bra claimed;
        wait:
        setp.ge.u32 p, seen, {_STORED};
        @p bra stored;
        ld.acquire.gpu.global.u32 seen, [$1];
        bra wait;
        stored:
        bar.warp.sync 0xffffffff;
        fence.proxy.async.global;
        claimed:
    }}"""
    return number_by(text, counter) == 0


def publish(counter: Any, interpret: bool) -> None:
    """Waits for the stores that the warp that calls has issued for a tile it claimed, and lets the others add."""
    plgpu.wait_smem_to_gmem(0)
    if interpret:
        return

    text = f"""{{
        .reg .pred p;
        .reg .b32 lane;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        @p red.release.gpu.global.add.u32 [$0], {_STORED};
    }}"""
    run_on(text, counter)
