"""How large a pool may be: what a device has left when all else has its memory, found by rehearsing with a tiny one."""

from __future__ import annotations

import gc
import logging

import torch

from stencilpress.engine.cuda.runner import CudaRunner
from stencilpress.engine.limits import Limits
from stencilpress.engine.memory import pool_memory
from stencilpress.engine.model.llama import Weights
from stencilpress.engine.spec import ModelSpec, PageGeometry
from stencilpress.kernels.sgmv.views import AdapterView

REHEARSAL_PAGES = 8
GRAPH_BYTES = 3 << 20
"""What the driver keeps for a graph, beside its tensors."""
SPARE_SHARE, SPARE_BYTES = 0.01, 1 << 29
"""Of the device, left free: blocks of the allocator that fit nobody, libraries' workspaces, other processes."""

logger = logging.getLogger(__name__)


def fitting_pool_bytes(
    spec: ModelSpec, geometry: PageGeometry, weights: Weights, limits: Limits, max_lora_rank: int, device: torch.device
) -> int:
    """Bytes that a pool may take beside loaded weights, captured graphs and the largest step; 0 if there are none."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    graphs = _rehearse(spec, geometry, weights, limits, max_lora_rank, device)
    beside = torch.cuda.max_memory_reserved(device) - before + graphs * GRAPH_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    spare = int(SPARE_SHARE * total) + SPARE_BYTES
    mib = (free >> 20, beside >> 20, spare >> 20)
    logger.info("of %d MiB steps and graphs take %d, %d stay free, the pool gets the rest", *mib)
    return max(0, free - beside - spare)


def _rehearse(
    spec: ModelSpec, geometry: PageGeometry, weights: Weights, limits: Limits, max_lora_rank: int, device: torch.device
) -> int:
    """Have a runner take all memory that it will; returns how many graphs it captures."""
    flat = torch.zeros(REHEARSAL_PAGES * geometry.page_elems, dtype=getattr(torch, spec.dtype), device=device)
    runner = CudaRunner(spec, weights, pool_memory(flat, spec, geometry), _no_adapter, limits, max_lora_rank)
    return runner.rehearse()


def _no_adapter(digest: str) -> AdapterView:
    raise KeyError(digest)
