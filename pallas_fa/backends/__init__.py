"""The implementations, and the choice among them."""
