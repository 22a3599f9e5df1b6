"""How kernels are timed on one GPU: as CUDA graphs, against the floor of bytes or operations."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 30


@dataclass(frozen=True)
class Timing:
    """Microseconds per call; ``bytes_moved`` is the least that must move, ``error`` relative to float64."""

    case: str
    samples_us: list[float]
    bytes_moved: int
    error: float
    goal_us: float | None = None
    flops: int = 0
    system: str = "stencilpress"

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


@dataclass(frozen=True)
class Ceilings:
    """What this very card does: bytes read and written by a copy, and bf16 products."""

    copy_gb_s: float
    matrix_tflop_s: float

    def floor_us(self, timing: Timing) -> float:
        return max(timing.bytes_moved / self.copy_gb_s / 1e3, timing.flops / self.matrix_tflop_s / 1e6)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(torch.linalg.norm(got.double() - want) / torch.linalg.norm(want))


def graph_samples(run: Callable[[], object], calls: int, repeats: int = REPEATS) -> list[float]:
    """Microseconds per call of ``run``, which makes ``calls`` of them, replayed as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return event_samples(graph.replay, calls, repeats)


def event_samples(run: Callable[[], object], calls: int, repeats: int) -> list[float]:
    samples = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            samples.append(start.elapsed_time(end) * 1e3 / calls)
    return samples


def measure_ceilings(device: torch.device) -> Ceilings:
    """The products come first: they also bring the clocks up."""
    a, b = torch.randn(2, 8192, 8192, device=device).bfloat16()
    product = statistics.median(graph_samples(lambda: torch.mm(a, b), 1, 200))
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = statistics.median(event_samples(lambda: target.copy_(source), 1, REPEATS))
    return Ceilings(4 * source.numel() / copy / 1e3, 2 * 8192**3 / product / 1e6)
