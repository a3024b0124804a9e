"""What all GPU kernels share."""
