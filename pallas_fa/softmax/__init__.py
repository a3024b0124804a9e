"""The maths of one tile of logits, and the merge of partial results: the same for every implementation."""
