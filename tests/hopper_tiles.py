"""Tiles of the tables for Hopper that several tests name."""

from pallas_fa.backends.hopper.config import BackwardConfig

# Of the backward at H=64 under masks, where CTAs take blocks by tickets.
BY_TICKETS = BackwardConfig(
    2, 128, l2_head_group=32, store_warps=1, statistics_last=True, dk_last=True, persistent_ctas=132, by_tickets=True
)
