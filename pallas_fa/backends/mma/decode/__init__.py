"""Few queries against many keys, as in decoding: warps share the queries and split the keys."""
