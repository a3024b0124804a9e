"""Masks: which query may attend to which key. `&` and `|` compose them."""

from pallas_fa.masks.band import Causal as Causal
from pallas_fa.masks.band import Window as Window
from pallas_fa.masks.base import And as And
from pallas_fa.masks.base import Mask as Mask
from pallas_fa.masks.base import Or as Or
from pallas_fa.masks.block_states import block_mask as block_mask
from pallas_fa.masks.blocks import BlockMask as BlockMask
from pallas_fa.masks.custom import Custom as Custom
from pallas_fa.masks.dense import Dense as Dense
from pallas_fa.masks.documents import from_cu_seqlens as from_cu_seqlens
from pallas_fa.masks.key_intervals import KeyIntervals as KeyIntervals
from pallas_fa.masks.lengths import Lengths as Lengths
from pallas_fa.masks.segments import Segments as Segments

__all__ = [
    "And",
    "BlockMask",
    "Causal",
    "Custom",
    "Dense",
    "KeyIntervals",
    "Lengths",
    "Mask",
    "Or",
    "Segments",
    "Window",
    "block_mask",
    "from_cu_seqlens",
]
