"""Attention on arrays that `jit` shards: what each device computes, automatic and explicit mesh axes, exporting."""
