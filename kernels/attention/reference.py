"""Paged attention in PyTorch, span by span: the reference, whose chunks the CPU engine runs. Contract: the package.

Index tensors are made once per step and serve every layer: a layer is an offset into the pool's rows.
"""

# T rows, H query heads, K key-value heads, G = H / K, D head dimension, B = 1, S positions, C rows of a chunk

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stencilpress.kernels.attention import Span

if TYPE_CHECKING:
    from stencilpress.kernels.numba_bits import Elements

FUSED_PAIRS = 1 << 14
"""Up to this many pairs of query and key row, times key-value heads, a chunk is fused; on a CPU longer ones go block by
block. Measured in bf16 on two cores, 9 heads of 64: 64 rows 0.20 against 0.44 ms, 512 rows 7.8 against 3.6."""
BLOCK_ROWS = 128

Index = npt.NDArray[np.int64]


class PagedKV:
    """The keys and values in a pool, as rows. ``pool_E`` is flat and a whole number of pages."""

    def __init__(self, pool_E: Tensor, *, layers: int, page_tokens: int, kv_heads: int, head_dim: int) -> None:
        self.page_tokens = page_tokens
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.page_rows = layers * 2 * page_tokens
        """Rows of ``kv_heads * head_dim`` elements in a page."""
        if pool_E.dim() != 1 or not pool_E.is_contiguous() or pool_E.numel() % (self.page_rows * kv_heads * head_dim):
            raise ValueError(f"pool of shape {tuple(pool_E.shape)} is not flat and a whole number of pages")
        self._pool_E = pool_E
        tokens, heads = pool_E.view(-1, kv_heads * head_dim), pool_E.view(-1, head_dim)
        starts = [(layer * 2 * page_tokens, (layer * 2 + 1) * page_tokens) for layer in range(layers)]
        self._token_rows = [(tokens[k:], tokens[v:]) for k, v in starts]
        self._head_rows = [(heads[k * kv_heads :], heads[v * kv_heads :]) for k, v in starts]

    @cached_property
    def elements(self) -> Elements:
        """The pool, on a CPU, for numba's kernels."""
        from stencilpress.kernels.numba_bits import elements

        return elements(self._pool_E)

    def first_row(self, layer: int) -> int:
        """Row of the layer's first key in a page; its values are ``page_tokens`` further."""
        return layer * 2 * self.page_tokens

    def write(self, layer: int, k_TX: Tensor, v_TX: Tensor, rows_T: Tensor) -> None:
        """Store keys and values of all rows; ``rows_T`` is :attr:`AttentionPlan.write_rows`."""
        k_rows, v_rows = self._token_rows[layer]
        k_rows.index_copy_(0, rows_T, k_TX)
        v_rows.index_copy_(0, rows_T, v_TX)

    def read(self, layer: int, index_N: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``(N, D)`` of the given head rows, copied."""
        k_rows, v_rows = self._head_rows[layer]
        return k_rows.index_select(0, index_N), v_rows.index_select(0, index_N)

    def rows(self, pages: tuple[int, ...], length: int) -> Index:
        """Row of each position ``0 .. length - 1`` of a request, within layer 0's keys."""
        used = np.array(pages[: -(-length // self.page_tokens)], dtype=np.int64)
        return (used[:, None] * self.page_rows + np.arange(self.page_tokens)).reshape(-1)[:length]

    def write_rows(self, spans: Sequence[Span]) -> Index:
        """Row of each token's key (T,), within layer 0."""
        write = np.empty(sum(span.length for span in spans), dtype=np.int64)
        for span in spans:
            write[span.row : span.row + span.length] = self.rows(span.pages, span.start + span.length)[span.start :]
        return write


@dataclass(frozen=True, slots=True)
class Chunk:
    """C rows of one request, the first at position ``start``. ``index`` of head rows (K, S) is None for its beginning,
    which attends to itself alone. ``mask``: what to add in a block, (R, R) above the diagonal, or if ``fused`` (C, S).
    """

    first: int
    end: int
    start: int
    index: Tensor | None
    mask: Tensor
    fused: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of one step needs. ``write_rows`` (T,) is where each token's key lies in layer 0."""

    write_rows: Tensor
    chunks: tuple[Chunk, ...]


def plan_attention(spans: Sequence[Span], kv: PagedKV, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """Make the index tensors of one step; ``dtype`` is the activations'."""
    write = torch.from_numpy(kv.write_rows(spans)).to(device)
    return AttentionPlan(write, tuple(plan_chunk(span, kv, dtype, device) for span in spans))


def plan_chunk(span: Span, kv: PagedKV, dtype: torch.dtype, device: torch.device) -> Chunk:
    """One span. On another device than a CPU it is always fused."""
    positions = kv.rows(span.pages, span.start + span.length)
    fused = device.type != "cpu" or kv.kv_heads * span.length * len(positions) <= FUSED_PAIRS
    masked = (span.length, len(positions)) if fused else (BLOCK_ROWS, BLOCK_ROWS)
    return Chunk(
        first=span.row,
        end=span.row + span.length,
        start=span.start,
        index=_head_index(positions[None], kv, device)[0] if span.start else None,
        mask=torch.full(masked, -torch.inf, dtype=dtype, device=device).triu_(1 + span.start * fused),
        fused=fused,
    )


def _head_index(index_BS: Index, kv: PagedKV, device: torch.device) -> Tensor:
    index_BKS = index_BS[:, None, :] * kv.kv_heads + np.arange(kv.kv_heads)[None, :, None]
    return torch.from_numpy(index_BKS).to(device)


def attend(q_TX: Tensor, k_TX: Tensor, v_TX: Tensor, kv: PagedKV, layer: int, plan: AttentionPlan) -> Tensor:
    """Write this step's keys and values, then attend. Returns ``(T, H * D)``, a new tensor."""
    kv.write(layer, k_TX, v_TX, plan.write_rows)
    out_TX = torch.empty_like(q_TX, memory_format=torch.contiguous_format)
    for chunk in plan.chunks:
        rows = slice(chunk.first, chunk.end)
        out_TX[rows] = attend_chunk(q_TX[rows], k_TX[rows], v_TX[rows], kv, layer, chunk)
    return out_TX


def attend_chunk(q_CX: Tensor, k_CX: Tensor, v_CX: Tensor, kv: PagedKV, layer: int, chunk: Chunk) -> Tensor:
    """Key-value heads are the batch, so that sharing them among query heads copies nothing."""
    (C, _), K, D = q_CX.shape, kv.kv_heads, kv.head_dim
    if chunk.index is None:
        k_KSD, v_KSD = k_CX.view(C, K, D).transpose(0, 1), v_CX.view(C, K, D).transpose(0, 1)
    else:
        k, v = kv.read(layer, chunk.index.view(-1))
        k_KSD, v_KSD = k.view(K, -1, D), v.view(K, -1, D)
    q_KGCD = q_CX.view(C, K, -1, D).permute(1, 2, 0, 3)
    attention = _fused if chunk.fused else _blockwise
    return attention(q_KGCD, k_KSD, v_KSD, chunk).permute(2, 0, 1, 3).reshape(C, -1)


def _fused(q_KGCD: Tensor, k_KSD: Tensor, v_KSD: Tensor, chunk: Chunk) -> Tensor:
    shape = (*q_KGCD.shape[:2], *k_KSD.shape[1:])
    k_KGSD, v_KGSD = k_KSD.unsqueeze(1).expand(shape), v_KSD.unsqueeze(1).expand(shape)
    return scaled_dot_product_attention(q_KGCD, k_KGSD, v_KGSD, attn_mask=chunk.mask)


def _blockwise(q_KGCD: Tensor, k_KSD: Tensor, v_KSD: Tensor, chunk: Chunk) -> Tensor:
    """Query rows in blocks, each on the keys up to its end: half the work, and scores that fit the cache."""
    K, _, C, D = q_KGCD.shape
    k_KSD, v_KSD = k_KSD.contiguous(), v_KSD.contiguous()
    unused = q_KGCD.new_empty(())
    blocks = []
    for first in range(0, C, BLOCK_ROWS):
        q_KGRD = q_KGCD[:, :, first : first + BLOCK_ROWS]
        R = q_KGRD.shape[2]
        end = chunk.start + first + R
        k_KDE = k_KSD[:, :end].transpose(1, 2)
        score_KNE = torch.baddbmm(unused, q_KGRD.reshape(K, -1, D), k_KDE, beta=0, alpha=D**-0.5)
        score_KNE.view(K, -1, R, end)[..., end - R :].add_(chunk.mask[:R, :R])
        blocks.append(torch.bmm(score_KNE.softmax(-1), v_KSD[:, :end]).view(K, -1, R, D))
    return torch.cat(blocks, 2)
