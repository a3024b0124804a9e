"""The forward kernel by mma.sync."""
