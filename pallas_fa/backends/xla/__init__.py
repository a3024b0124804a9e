"""Attention in plain JAX, in chunks: any platform, any float dtype, O(T) memory."""
