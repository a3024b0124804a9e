"""Public names of the GPU kernels; the kernels are in `pallas_fa.backends`."""

from pallas_fa.mosaic_gpu import config as config
