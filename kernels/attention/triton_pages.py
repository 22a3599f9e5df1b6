"""Where K and V lie: the page layout that the attention and KV-writing kernels share.

A page holds ``page_tokens`` tokens of all layers, [layer, K|V, token, kv_head, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a KV page. ``page_elems`` may exceed what the tokens take."""

    page_tokens: int
    page_elems: int
    kv_heads: int
    head_dim: int


def check_pages(q_THD: torch.Tensor, pool: torch.Tensor, pages_SP: torch.Tensor, kv: KVLayout) -> None:
    """Raises ValueError where queries, pool and page tables do not fit the layout."""
    rows, heads, dim = q_THD.shape
    if heads % kv.kv_heads or dim != kv.head_dim:
        raise ValueError(f"queries {(rows, heads, dim)} do not fit {kv}")
    if q_THD.stride(2) != 1 or q_THD.stride(1) != dim or pages_SP.stride(1) != 1 or not pool.is_contiguous():
        raise ValueError("heads, page tables and pool must be packed")
    if q_THD.dtype != pool.dtype or pages_SP.dtype != torch.int32:
        raise ValueError("queries share the pool's dtype; page tables are int32")
