"""FlashAttention for JAX."""

from pallas_fa import context_parallel as context_parallel
from pallas_fa import masks as masks
from pallas_fa import scores as scores
from pallas_fa.api import dot_product_attention as dot_product_attention
from pallas_fa.api import explain as explain

__version__ = "0.1.0.dev0"
