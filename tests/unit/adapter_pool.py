"""Random adapters in a random pool, laid out as the slice table's contract says, and what they should add."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class PooledAdapter:
    """``weights[entry][p]`` is (A, B) in the pool's dtype, for the projections that are adapted there."""

    table: int
    rank: int
    ranks: list[int]
    masks: list[int]
    scales: list[list[float]]
    weights: list[dict[int, tuple[torch.Tensor, torch.Tensor]]]


@dataclass
class Shape:
    """One group: inputs, and outputs of each projection."""

    inputs: int
    outputs: tuple[int, ...]


class PoolBuilder:
    """Puts adapters into a pool of NaN, their slices in shuffled places."""

    def __init__(
        self, groups: list[Shape], layers: int, elems: int, dtype: torch.dtype, seed: int, device: str = "cpu"
    ):
        self.groups, self.layers, self.dtype, self.device = groups, layers, dtype, device
        self.random = torch.Generator().manual_seed(seed)
        self.pool = torch.full((elems,), float("nan"), dtype=dtype, device=device)
        self.slot = -(-max(s.inputs * len(s.outputs) + sum(s.outputs) for s in groups) // 8) * 8
        self.order: list[int] = torch.randperm(elems // self.slot, generator=self.random).tolist()

    def add(self, ranks: list[int], masks: list[int]) -> PooledAdapter:
        """``ranks[g]`` and ``masks[g]`` of each group, the same in all layers."""
        entries = self.layers * len(self.groups)
        table = torch.zeros(4 * entries, dtype=torch.int64)
        addresses: list[int] = []
        made = PooledAdapter(0, max(ranks), [], [], [], [])
        for e in range(entries):
            group = self.groups[e % len(self.groups)]
            mask = masks[e % len(self.groups)]
            rank = ranks[e % len(self.groups)] if mask else 0
            scales = (torch.rand(3, generator=self.random) + 0.5).tolist()
            weights = {p: self._weights(group, p, rank) for p in range(len(group.outputs)) if mask >> p & 1}
            table[4 * e] = rank | mask << 32
            table[4 * e + 1] = len(addresses)
            bits = torch.tensor(scales, dtype=torch.float32).view(torch.int32).tolist()
            table[4 * e + 2] = bits[0] | bits[1] << 32
            table[4 * e + 3] = bits[2] | self.slot << 32
            addresses += [self._place(weights, j) for j in range(rank)]
            made.ranks.append(rank)
            made.masks.append(mask)
            made.scales.append(torch.tensor(scales, dtype=torch.float32).tolist())
            made.weights.append(weights)
        made.table = self._write(torch.cat((table, torch.tensor(addresses, dtype=torch.int64))))
        return made

    def _weights(self, group: Shape, p: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(rank, group.inputs, generator=self.random) / group.inputs**0.5
        b = torch.randn(group.outputs[p], rank, generator=self.random)
        return a.to(self.dtype), b.to(self.dtype)

    def _place(self, weights: dict[int, tuple[torch.Tensor, torch.Tensor]], j: int) -> int:
        row = torch.cat([a[j] for a, _ in weights.values()] + [b[:, j] for _, b in weights.values()])
        start = self.order.pop() * self.slot
        self.pool[start : start + len(row)] = row.to(self.device)
        return start

    def _write(self, words: torch.Tensor) -> int:
        per_word = 8 // self.pool.element_size()
        slots = -(-len(words) * per_word // self.slot)
        start = next(s for s in range(len(self.order)) if all(s + i in self.order for i in range(slots)))
        for i in range(slots):
            self.order.remove(start + i)
        word: int = start * self.slot // per_word
        self.pool.view(torch.int64)[word : word + len(words)] = words.to(self.device)
        return word


def expected(
    y: torch.Tensor, x: torch.Tensor, rows: list[tuple[int, int, PooledAdapter | None]], entry: int, group: Shape
) -> torch.Tensor:
    """y plus the adapters' share, in float64."""
    out = y.double()
    for start, count, adapter in rows:
        part = slice(start, start + count)
        for p, (a, b) in (adapter.weights[entry] if adapter else {}).items():
            column = sum(group.outputs[:p])
            delta = x[part].double() @ a.double().to(x.device).T @ b.double().to(x.device).T
            out[part, column : column + group.outputs[p]] += adapter.scales[entry][p] * delta  # type: ignore[union-attr]
    return out
