"""Kernels for NVIDIA Hopper (compute capability 9.0): wgmma and TMA."""
