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
    """Allocate the pool; call it after the weights are loaded. ``pool_bytes`` of 0 is for CPUs.

    Raises :class:`SettingsError` when ``pool_bytes`` is less than two pages, ``MemoryError`` when the device is full.
    """
    pages = (settings.pool_bytes or _default_bytes()) // geometry.page_bytes
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


def _default_bytes() -> int:
    return min(CPU_POOL_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
