"""The base model: weights from safetensors (``weights``), linear layers (``linear``) and the decoder (``llama``)."""
