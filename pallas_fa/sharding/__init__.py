"""Partitions attention over the devices of a mesh: automatic and explicit mesh axes, platforms, export."""
