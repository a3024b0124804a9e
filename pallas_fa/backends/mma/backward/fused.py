"""The body of the fused pass: dK and dV of a block of keys, and its part of dQ, which is added up in device memory.

FlashAttention-2 (Dao, arXiv 2307.08691) in one kernel of five matmuls. In a step each warpgroup computes S^T = K Q^T and
dP^T = V dO^T of all keys of the CTA and its own queries. P^T and dS^T of all warpgroups go to shared memory, and each adds
P^T dO to its columns of dV and dS^T Q to those of dK. dQ^T = K^T dS^T of its own queries goes to device memory.
"""

from typing import Any

from jax.experimental import pallas as pl

from pallas_fa.backends.mma.backward.gmem import Refs
from pallas_fa.backends.mma.backward.kernel import Backward, Sums
from pallas_fa.backends.mma.backward.plan import BackwardPlan


class FusedBackward(Backward):
    """What a warpgroup does for its queries and its columns of one block of keys."""

    def __init__(self, plan: BackwardPlan, gmem: Refs, scratch: dict[str, Any]):
        super().__init__(plan, gmem, scratch)
        self.start = self.number * plan.config.block
        self.own = pl.ds(self.cta.wg * plan.config.width, plan.config.width)
        self.first_streamed, self.sharer, self.holder = self.own.start, self.cta.wg, 0

    def _no_sums(self):
        tiles, config = self.plan.tiles, self.plan.config
        of = lambda dim: self.mma.accumulator(config.rows, dim // config.wgs)
        return Sums(of(tiles.stationary_qk.padded_dim), of(tiles.stationary_pv.padded_dim), ())

    def _columns(self, smem):
        """This warpgroup's columns of a tile."""
        return smem.at[:, self._own_columns(smem.shape[1] // self.plan.config.wgs)]

    def _own_columns(self, count):
        return pl.ds(self.cta.wg * count, count)

    def _plus_products(self, at, slot, sums, release):
        plan, scratch = self.plan, self.scratch
        alone = plan.config.wgs == 1
        keys, queries, d_out = self._stationary("qk"), self._streamed("qk", slot), self._streamed("pv", slot)
        kept = at.kept(plan)  # before tiles of logits fill the registers
        drop = lambda x: x if kept is None else kept.select(x)
        s = self.mma.inner_products(keys, queries.at[self.own])
        tile, p = self._probabilities(at, s, slot)
        if alone:
            sums = sums._replace(pv=self.mma.plus_product(sums.pv, drop(p), d_out))
        else:
            self._share("p_smem", drop(p))
        dp = drop(self.mma.inner_products(self.values, d_out.at[self.own]))
        ds, *gradients = self._gradients_of_logits(tile, s, p, dp, slot)
        sums = sums._replace(arrays=self._plus_gradients(tile.at, gradients, sums.arrays))
        self._share("ds_smem", ds)
        if alone:
            sums = sums._replace(qk=self.mma.plus_product(sums.qk, ds, queries))
        self.cta.meet()
        if not alone:
            pv = self.mma.plus_products(sums.pv, scratch["p_smem"], self._columns(d_out))
            sums = sums._replace(pv=pv, qk=self.mma.plus_products(sums.qk, scratch["ds_smem"], self._columns(queries)))
        release()
        self._add_queries_gradient(at, keys, scratch["ds_smem"].at[self.cta.wg])
        return sums

    def _add_queries_gradient(self, at, keys, ds):
        plan, dim = self.plan, keys.shape[1]
        # Beside V and sums of so many columns, registers have no room for dQ^T at once.
        piece = 64 if plan.values_in_registers and dim > 128 else dim
        for first in range(0, dim, piece):
            columns = keys.at[:, pl.ds(first, min(piece, dim - first))]
            dq = self.mma.product_of_columns(columns, ds)
            plan.dq.add(self.gmem.dq, dq, at.b, at.n, self.number, at.streamed, first)

    def _share(self, name, x):
        """Rounds a tile of logits and stores it where the other warps, and warpgroups, read it."""
        self.scratch[name].at[self.cta.wg][...] = x.astype(self.plan.problem.dtype)

    def _store(self, sums):
        dtype = self.plan.problem.dtype
        dk, dv = self._stationary("qk"), self._stationary("pv")
        store_dv = lambda: self.cta.only(0, lambda: self._store_tile(self.plan.tiles.stationary_pv, dv, "dv"))
        self._columns(dv)[...] = self._values_gradient(sums).astype(dtype)
        if self.plan.values_in_registers:  # dK may take the same slot
            self.cta.meet()
            store_dv()
            self.cta.meet()
        self._columns(dk)[...] = self._qk_gradient(sums).astype(dtype)
        self.cta.meet()
        if not self.plan.values_in_registers:
            store_dv()
        self.cta.only(-1, lambda: self._store_tile(self.plan.tiles.stationary_qk, dk, "dk"))

    def _load_stationary(self):
        length = self._stationary_length()
        self.cta.only(-1, lambda: self._load_stationary_tile("pv", length))
        self.values = self._stationary("pv")
        if self.plan.values_in_registers:  # K may take the same slot
            self.cta.wait_for_copies()
            self.values = self.mma.left_operand(self.values)
            self.cta.meet()
        self.cta.only(0, lambda: self._load_stationary_tile("qk", length))

    def _statistic_ref(self, name, slot):
        return self.scratch[f"{name}_smem"].at[slot, self.own]
