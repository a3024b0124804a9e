"""Tiles of the tables for Hopper that several tests name."""

from pallas_fa.backends.hopper.config import BackwardConfig, ForwardConfig

# Of the backward at H=64 under masks, where CTAs take blocks by tickets.
BY_TICKETS = BackwardConfig(
    2, 128, l2_head_group=32, store_warps=1, statistics_last=True, dk_last=True, persistent_ctas=132, by_tickets=True
)
# Of the forward at H=128 under causal masks, where persistent CTAs take pairs of query blocks.
PAIRS_IN_TURN = ForwardConfig(
    2,
    l2_head_group=4,
    pin_softmax=False,
    q_block_pairs=1,
    ping_pong=True,
    persistent_ctas=132,
    rescale_under_qk=True,
)
# Of the forward at H=128 under causal masks and lengths, where CTAs take query blocks by tickets.
FORWARD_BY_TICKETS = ForwardConfig(
    2,
    l2_head_group=16,
    pin_softmax=False,
    ping_pong=True,
    persistent_ctas=132,
    by_tickets=True,
    rescale_under_qk=True,
    out_chunks=2,
)
