"""The maths of one tile of logits, and of merging partial results: the same for every implementation."""
