"""The backward kernels by mma.sync."""
