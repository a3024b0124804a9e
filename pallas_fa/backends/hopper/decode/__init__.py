"""Few queries against many keys, as in decoding: the forward kernel with its work cut in another way."""
