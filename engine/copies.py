"""Copies from host memory to many places of the pool, as one call to the driver where it takes them.

Measured on an H200, 27 MB from pinned memory: in pages of 2 MiB 0.53 ms as one call and 0.54 ms as thirteen; in pages
of 128 KiB 0.75 ms and 2.81 ms; in one piece 0.50 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

BATCHES_SINCE = 13000
"""CUDA's version whose ``cudaMemcpyBatchAsync`` is called here; the one before takes other arguments."""

FEW_PIECES = 32
"""So few start sooner one by one, and take as long."""

Piece = tuple[int, Tensor]
"""Where it goes, in bytes from the start, and bytes in host memory, pinned if the target is on a GPU."""


def copy_pieces(target: Tensor, pieces: Sequence[Piece]) -> None:
    """Copy pieces into a flat uint8 tensor, in order on the current stream. They must stay as they are until then."""
    batch = _batch_call() if target.is_cuda and len(pieces) > FEW_PIECES else None
    if batch is not None:
        batch(target, pieces)
        return
    for start, source in pieces:
        target[start : start + len(source)].copy_(source, non_blocking=True)


@cache
def _batch_call() -> Callable[[Tensor, Sequence[Piece]], None] | None:
    """The driver's call, if the bindings that come with torch are there and new enough."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    if not hasattr(runtime, "cudaMemcpyBatchAsync") or runtime.cudaRuntimeGetVersion()[1] < BATCHES_SINCE:
        return None
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

    def call(target: Tensor, pieces: Sequence[Piece]) -> None:
        targets = [target.data_ptr() + start for start, _ in pieces]
        sources = [source.data_ptr() for _, source in pieces]
        sizes, stream = [len(source) for _, source in pieces], torch.cuda.current_stream(target.device).cuda_stream
        if any(start < 0 or start + size > len(target) for (start, _), size in zip(pieces, sizes, strict=True)):
            raise ValueError("a piece ends outside of its target")
        result: Any = runtime.cudaMemcpyBatchAsync(targets, sources, sizes, len(pieces), [attributes], [0], 1, stream)
        if int(result[0]):
            raise RuntimeError(f"cudaMemcpyBatchAsync failed: {result[0]}")

    return call
