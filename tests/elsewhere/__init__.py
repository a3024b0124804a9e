"""Compiles the kernels for GPUs that are not there, by XLA's ahead-of-time compiler and ptxas."""
