"""For Flax: `attention_fn` for Flax's attention modules, and drop-in modules in `pallas_fa.nn.linen` and `.nnx`."""

try:
    import flax as _flax
except ModuleNotFoundError as e:
    if e.name != "flax":
        raise
    raise ImportError(
        "pallas_fa.nn needs Flax, which is not installed. Get it with `pip install 'pallas_fa[flax]'`."
    ) from e

from pallas_fa.nn import linen as linen
from pallas_fa.nn import nnx as nnx
from pallas_fa.nn.attention_fn import attention_fn as attention_fn  # last: the function takes the submodule's name

del _flax
