"""The unified pool's memory: one flat tensor of equal pages, and what is read in it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from stencilpress.engine.settings import EngineSettings, SettingsError
from stencilpress.engine.spec import ModelSpec, PageGeometry
from stencilpress.kernels.attention.reference import PagedKV
from stencilpress.kernels.sgmv.table import GroupShape

CPU_POOL_BYTES = 2 << 30
"""Default pool on a CPU, or a quarter of the machine's memory if less. The system commits it as pages are used."""
CUDA_POOL_SHARE = 0.95
"""Default pool on an accelerator: this share of what the weights leave free, less what a step takes."""
GRAPH_BYTES = 1 << 30
"""Set aside for CUDA graphs and the libraries' workspaces."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """``flat`` is (pages * page_elems,) of the served dtype; ``kv`` reads and writes keys and values in it."""

    flat: Tensor
    geometry: PageGeometry
    kv: PagedKV
    shapes: tuple[GroupShape, ...]
    layers: int

    @property
    def num_pages(self) -> int:
        return self.flat.numel() // self.geometry.page_elems

    @property
    def device(self) -> torch.device:
        return self.flat.device


def allocate_pool(
    spec: ModelSpec, geometry: PageGeometry, settings: EngineSettings, device: torch.device
) -> PoolMemory:
    """Allocate the pool; call it after the weights are loaded.

    Raises :class:`SettingsError` when ``pool_bytes`` is less than two pages, ``MemoryError`` when the device is full.
    """
    pages = (settings.pool_bytes or _default_bytes(spec, settings, device)) // geometry.page_bytes
    if pages < 2:
        raise SettingsError(f"STENCILPRESS_POOL_BYTES is less than two pages of {geometry.page_bytes} bytes")
    try:
        flat = torch.empty(pages * geometry.page_elems, dtype=getattr(torch, spec.dtype), device=device)
    except RuntimeError as error:
        raise MemoryError(f"no room for a pool of {pages} pages of {geometry.page_bytes} bytes: {error}") from error
    return pool_memory(flat, spec, geometry)


def pool_memory(flat: Tensor, spec: ModelSpec, geometry: PageGeometry) -> PoolMemory:
    """See a flat tensor as the pool of a model."""
    kv = PagedKV(
        flat,
        layers=spec.num_layers,
        page_tokens=geometry.page_tokens,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    shapes = tuple(GroupShape(g.in_features, tuple(p.out_features for p in g.projections)) for g in spec.groups)
    return PoolMemory(flat, geometry, kv, shapes, spec.num_layers)


def step_bytes(spec: ModelSpec, settings: EngineSettings) -> int:
    """An upper bound of what a step on an accelerator allocates beside the pool.

    The widest rows of a layer stand side by side at most twice; logits exist in the served dtype and, where they are
    drawn from, as up to six fp32 and fp64 arrays; adapters' addresses take 8 bytes a rank slice, layer and group.
    """
    rows = max(settings.max_num_batched_tokens, settings.max_num_seqs)
    widest = 3 * spec.intermediate_size + 4 * spec.hidden_size + 3 * (spec.q_size + 2 * spec.kv_size)
    drawn = min(settings.max_num_seqs, rows) * spec.vocab_size
    adapters = 16 * spec.num_layers * len(spec.groups) * settings.max_num_seqs * settings.max_lora_rank
    return 2 * rows * widest * spec.dtype_bytes + drawn * (spec.dtype_bytes + 32) + adapters


def _default_bytes(spec: ModelSpec, settings: EngineSettings, device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, int(free * CUDA_POOL_SHARE) - step_bytes(spec, settings) - GRAPH_BYTES)
    return min(CPU_POOL_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
