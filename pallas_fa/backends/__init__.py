"""The implementations of attention, and the choice among them."""
