"""RMS norm with its residual."""
