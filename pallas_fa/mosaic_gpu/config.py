"""Tiles of the kernels, for `config=` of `pallas_fa.dot_product_attention`."""

from pallas_fa.backends.hopper.config import BackwardConfig as BackwardConfig
from pallas_fa.backends.hopper.config import Config as Config
from pallas_fa.backends.hopper.config import ForwardConfig as ForwardConfig
