"""Random adapters of many layers in a pool on a GPU, and the exact deltas they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stencilpress.kernels.sgmv.table import GroupShape

PAGE_ELEMS = 1 << 20
"""2 MiB in bf16: a page of 16 tokens of an 8B Llama."""


@dataclass(frozen=True)
class AdapterPool:
    """``tables`` are int64 word offsets; ``addresses[a][entry]`` int64 element offsets of the rank slices."""

    pool: torch.Tensor
    groups: tuple[GroupShape, ...]
    layers: int
    ranks: tuple[int, ...]
    tables: tuple[int, ...]
    addresses: tuple[torch.Tensor, ...]

    @property
    def entries(self) -> int:
        return self.layers * len(self.groups)


def build(groups: Sequence[GroupShape], layers: int, ranks: Sequence[int], device: torch.device) -> AdapterPool:
    """Adapters whose slices fill pages in order, pages in random order, as the loader leaves them."""
    sizes = [len(g.out_features) * g.in_features + sum(g.out_features) for g in groups]
    sizes = [-(-size // 8) * 8 for size in sizes]
    entries = layers * len(groups)
    starts, pages = [], 0
    for rank in ranks:
        of_adapter = []
        used = PAGE_ELEMS
        for e in range(entries):
            size = sizes[e % len(groups)]
            for _ in range(rank):
                if used + size > PAGE_ELEMS:
                    pages, used = pages + 1, 0
                of_adapter.append((pages - 1) * PAGE_ELEMS + used)
                used += size
        starts.append(torch.tensor(of_adapter))
    table_words = 4 * entries + max(ranks) * entries
    table_pages = -(-table_words * 4 // PAGE_ELEMS)
    order = torch.randperm(pages)
    pool = torch.empty((pages + table_pages * len(ranks)) * PAGE_ELEMS, dtype=torch.bfloat16, device=device)
    for part in pool[: pages * PAGE_ELEMS].split(1 << 28):  # type: ignore[no-untyped-call]
        part.normal_(std=1 / 64)
    tables, addresses = [], []
    for i, (rank, raw) in enumerate(zip(ranks, starts, strict=True)):
        placed = order[raw // PAGE_ELEMS] * PAGE_ELEMS + raw % PAGE_ELEMS
        head = torch.zeros(entries, 4, dtype=torch.int64)
        for e in range(entries):
            mask = (1 << len(groups[e % len(groups)].out_features)) - 1
            head[e] = torch.tensor(
                [rank | mask << 32, e * rank, _ONE | _ONE << 32, _ONE | sizes[e % len(groups)] << 32]
            )
        word = (pages + i * table_pages) * PAGE_ELEMS // 4
        words = torch.cat((head.flatten(), placed)).to(device)
        pool.view(torch.int64)[word : word + len(words)] = words
        tables.append(word)
        addresses.append(placed.view(entries, rank).to(device))
    return AdapterPool(pool, tuple(groups), layers, tuple(ranks), tuple(tables), tuple(addresses))


_ONE = int(torch.tensor(1.0).view(torch.int32))


def add_exactly(y: torch.Tensor, x: torch.Tensor, pool: AdapterPool, adapter: int, rows: slice, entry: int) -> None:
    """Add one adapter's share to the float64 ``y``."""
    group = pool.groups[entry % len(pool.groups)]
    width, count = group.in_features, len(group.out_features)
    size = count * width + sum(group.out_features)
    index = pool.addresses[adapter][entry][:, None] + torch.arange(size, device=y.device)
    slices = pool.pool[index].double()
    column = 0
    for p, out in enumerate(group.out_features):
        a = slices[:, p * width : (p + 1) * width]
        b = slices[:, count * width + column : count * width + column + out]
        y[rows, column : column + out] += x[rows].double() @ a.T @ b
        column += out
