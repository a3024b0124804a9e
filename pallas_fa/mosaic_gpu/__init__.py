"""Attention kernels for NVIDIA Hopper GPUs, in Pallas (Mosaic GPU)."""
