"""Multi-head latent attention with absorbed weights, in decoding: keys and values are one array, loaded once."""
