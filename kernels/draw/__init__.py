"""Drawing from a whole vocabulary."""
