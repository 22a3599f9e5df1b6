"""Which of cuBLAS's two interfaces multiplies faster: they choose different kernels, and it differs by rows and card.

Measured on an H200, an 8B Llama's products in ms a step: 3.90 and 3.75 at 32 rows, 4.06 and 3.88 at 64, 5.67 and 5.74
at 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stencilpress.engine.model.llama import Weights
from stencilpress.engine.spec import ModelSpec

INTERFACES = ("cublas", "cublaslt")
LAYERS = 8
"""Layers whose products are timed: their weights exceed any cache."""
REPEATS = 3


class Products:
    """Times the products of a model's first layers, once for each number of rows."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec = spec
        self._layers = weights.layers[:LAYERS]
        self._embedding = weights.embedding
        self._fastest: dict[int, str] = {}

    @contextmanager
    def fastest(self, rows: int) -> Iterator[None]:
        """Products of so many rows use the faster interface inside."""
        if self._embedding.device.type != "cuda":
            yield
            return
        if rows not in self._fastest:
            self._fastest[rows] = min(INTERFACES, key=lambda name: self._elapsed_ms(name, rows))
        torch.backends.cuda.preferred_blas_library(self._fastest[rows])
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library("default")

    def _elapsed_ms(self, name: str, rows: int) -> float:
        torch.backends.cuda.preferred_blas_library(name)
        return min(self._once(rows) for _ in range(REPEATS))

    def _once(self, rows: int) -> float:
        hidden, inner, mixed = (
            torch.randn(rows, width, device=self._embedding.device).to(self._embedding.dtype)
            for width in (self._spec.hidden_size, self._spec.intermediate_size, self._spec.q_size)
        )
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for layer in self._layers:
            layer.qkv(hidden)
            layer.o(mixed)
            layer.gate_up(hidden)
            layer.down(inner)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
