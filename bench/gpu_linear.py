"""The base's products for few rows, beside cuBLAS's; cases of ``python -m bench kernels``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.gpu_timing import Timing, graph_samples, relative
from stencilpress.kernels.linear.triton_linear import Cut, LinearScratch, choose_cut, linear_few_rows

LINEAR_SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate-up": (4096, 28672), "down": (14336, 4096)}


def linear_times(name: str, device: torch.device) -> Iterator[Timing]:
    """One of the base's products, for few rows, and cuBLAS's."""
    inputs, outputs = LINEAR_SHAPES[name]
    scratch, layers = LinearScratch(device), 16
    weights = torch.empty(layers, outputs, inputs, dtype=torch.bfloat16, device=device).normal_(std=inputs**-0.5)
    for rows in (1, 8, 16, 32):
        x = torch.randn(rows, inputs, device=device).bfloat16()
        want = x.double() @ weights[-1].double().T
        moved = 2 * (inputs * outputs + rows * (inputs + outputs))
        cut = choose_cut(x, weights[0])
        assert cut is not None

        def ours(x: torch.Tensor, weight: torch.Tensor, cut: Cut = cut) -> torch.Tensor:
            return linear_few_rows(x, weight, None, scratch, cut)

        for system, product in (("stencilpress", ours), ("cublas", torch.nn.functional.linear)):

            def run(x: torch.Tensor = x, product: Callable[..., torch.Tensor] = product) -> None:
                for weight in weights:
                    product(x, weight)

            error = relative(product(x, weights[-1]), want)
            yield Timing(f"linear-{rows}-{name}", graph_samples(run, layers), moved, error, system=system)
