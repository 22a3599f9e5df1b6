"""A linear layer for few rows: the weights stream once, ahead of the input."""
