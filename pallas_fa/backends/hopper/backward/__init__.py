"""The backward kernels for Hopper."""
