"""Which of cuBLAS's two interfaces multiplies faster: they choose different kernels, and it differs by rows and card.

Measured on an H200, an 8B Llama's products in ms a step: 3.90 and 3.75 at 32 rows, 4.06 and 3.88 at 64, 5.67 and 5.74
at 256.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
        self._ms: dict[int, float] = {}

    @contextmanager
    def fastest(self, rows: int) -> Iterator[None]:
        """Products of so many rows use the faster interface inside."""
        if self._embedding.device.type != "cuda":
            yield
            return
        self._measure(rows)
        torch.backends.cuda.preferred_blas_library(self._fastest[rows])
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library("default")

    def worthwhile(self, sizes: Sequence[int]) -> list[int]:
        """Those of ascending numbers of rows whose products are faster than those of any larger one."""
        if self._embedding.device.type != "cuda":
            return list(sizes)
        for rows in sizes:
            self._measure(rows)
        ms = [self._ms[rows] for rows in sizes]
        return [rows for n, rows in enumerate(sizes) if ms[n] < min(ms[n + 1 :], default=math.inf)]

    def _measure(self, rows: int) -> None:
        if rows not in self._fastest:
            elapsed_ms = {name: self._elapsed_ms(name, rows) for name in INTERFACES}
            self._fastest[rows] = min(INTERFACES, key=elapsed_ms.__getitem__)
            self._ms[rows] = elapsed_ms[self._fastest[rows]]
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
