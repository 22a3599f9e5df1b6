"""The gate of a SwiGLU layer."""
