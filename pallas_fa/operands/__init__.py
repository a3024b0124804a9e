"""Binds arrays to [B, N, T, S]: sizes, pytrees, offsets, and the part of a problem that one device computes."""
