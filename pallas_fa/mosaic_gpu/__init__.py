"""Public names of the GPU kernels; the kernels are in `pallas_fa.backends`."""
