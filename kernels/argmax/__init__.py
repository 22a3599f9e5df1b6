"""The most likely token of each row of logits."""
