"""Work lists of the segmented product: what the host plans and the device resolves, once a step.

The host cuts the rows of each adapter into *blocks* of at most ``tile.rows`` rows, and each block's rank
into *items* of ``tile.ranks`` rank slices. The device then reads the slice tables once for all layers and
groups and leaves, beside each other, the addresses and scales that an item needs: a product kernel
reaches its weights over one load instead of three.

Legend: T rows of the batch, B blocks, W items, R ranks of an item, E entries (layer * groups + group).

Item b < B is the first of block b; the others of a block follow each other from its ``extra`` on. So the
expand finds the first item of its block without a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from stencilpress.kernels.sgmv.mailboxes import Mailboxes
from stencilpress.kernels.sgmv.triton_rows import COUNTER_WORDS
from stencilpress.kernels.triton_launch import divide_up, launch_options

_HEAD, _BLOCK, _ITEM = 4, 4, 4
"""int32 words of the list's head, of a block and of an item."""
_ENTRIES_AT_ONCE = 16
_MOST_TILES = 512
FEW_ROWS = 8
"""Rows of an adapter from which on blocks of several are faster than rows one by one."""
FEW_ITEMS = 32
"""So few pieces of a row and 16 rank slices fill no device in blocks: whatever adapters they are of, one by one is
faster."""
CROWD, ROWS_IN_CROWD, WIDE_ROWS_IN_CROWD = 192, 3, 2
"""Among so many rows already from so few rows an adapter on; fewer where ranks take several items."""


class Tile(NamedTuple):
    """Rows and rank slices of an item. One row is the matrix-vector path; 16 or more use tensor cores."""

    rows: int
    ranks: int


class AdapterRows(NamedTuple):
    """Neighbouring rows of one adapter. ``table`` is its slice table's place in the pool, in int64 words,
    ``rank`` the largest rank that the table holds."""

    row_start: int
    rows: int
    table: int
    rank: int


def choose_tile(segments: Sequence[AdapterRows]) -> Tile:
    """The tile that suits a batch: few rows an adapter are bound by the weights' bytes, many by the rows'. Of few rows
    sixteen slices an item are best at any rank, as a wider item leaves fewer programs in flight; many rows of high
    ranks are read once for 64 (bench/kernels.py).

    An H200's microseconds for the seven linears of an 8B layer, rank 16, with tiles of 1, 16 and 64 rows: 123, 88 and
    113 for 32 adapters of 8 rows; 77 and 84 for 16 of 16; 75 and 73 for 8 of 32; 73 and 67 for 4 of 64. For q, k, v and
    o with tiles of 1 and 16 rows: 54 and 52 for 128 adapters of 2 rows, 45 and 30 for 64 of 4; of ranks 8 to 64 99 and
    88, 83 and 59; for gate, up and down of 128 of 2 rows 100 and 110. Of Punica's
    workload, 32 rows over the seven linears, tokens a second: 4,253 without adapters, 3,415 with one adapter for all in
    a block, 3,791 with one each row by row (bench/punica.py).
    """
    if sum(s.rows * divide_up(s.rank, 16) for s in segments) <= FEW_ITEMS:
        return Tile(1, 16)
    total = sum(s.rows for s in segments)
    rows = total / max(1, len(segments))
    ranks = sum(s.rank for s in segments) / max(1, len(segments))
    if rows < 24:
        crowd = WIDE_ROWS_IN_CROWD if ranks > 16 else ROWS_IN_CROWD
        return Tile(1 if rows < (crowd if total >= CROWD else FEW_ROWS) else 16, 16)
    return Tile(64, 16 if ranks < 24 else 64)


def apart(segments: Sequence[AdapterRows]) -> tuple[list[AdapterRows], list[AdapterRows]]:
    """Segments of many rows, and those of few: in a step of prompts and decodes one tile does not suit both."""
    many = [segment for segment in segments if segment.rows >= FEW_ROWS]
    return many, [segment for segment in segments if segment.rows < FEW_ROWS]


class WorkPlan(NamedTuple):
    """A work list on the host: ``blocks_B4`` is (row, rows, items, extra), ``items_W4`` is (row, rows,
    first rank, block), both int32; ``tables_W`` int64."""

    tile: Tile
    blocks_B4: npt.NDArray[np.int32]
    items_W4: npt.NDArray[np.int32]
    tables_W: npt.NDArray[np.int64]


def plan_work(segments: Sequence[AdapterRows], tile: Tile) -> WorkPlan:
    """Cut the rows that have an adapter into blocks and items. Segments must not overlap."""
    facts = np.asarray(segments, dtype=np.int64).reshape(-1, 4)
    # longest first, as the last to end is what all wait for; the rows kernel goes from last to first
    facts = facts[np.argsort(facts[:, 3] if tile.rows == 1 else -facts[:, 3], kind="stable")]
    row_start, rows, table, rank = facts.T
    cuts = -(-rows // tile.rows)
    segment = np.repeat(np.arange(len(facts)), cuts)
    offset = (np.arange(len(segment)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * tile.rows
    row_B, rows_B = row_start[segment] + offset, np.minimum(tile.rows, rows[segment] - offset)
    items_B = -(-rank[segment] // tile.ranks)
    extra_B = len(segment) + np.cumsum(items_B - 1) - (items_B - 1)
    later = np.repeat(np.arange(len(segment)), items_B - 1)
    block_W = np.concatenate((np.arange(len(segment)), later))
    nth_W = np.concatenate((np.zeros_like(segment), np.arange(len(later)) + len(segment) - extra_B[later] + 1))
    blocks = np.stack((row_B, rows_B, items_B, extra_B), axis=1)
    items = np.stack((row_B[block_W], rows_B[block_W], nth_W * tile.ranks, block_W), axis=1)
    return WorkPlan(tile, blocks.astype(np.int32), items.astype(np.int32), table[segment][block_W])


@dataclass(frozen=True, slots=True)
class SgmvWork:
    """A work list on the device, at fixed addresses and of fixed capacity, so that a graph can hold it.

    ``counts_4`` int32 (blocks, items, 0, 0) · ``blocks_B4``, ``items_W4`` int32 and ``tables_W`` int64 as in
    :class:`WorkPlan` · ``addresses_EWR`` int64, the element offset in the pool of each rank slice, -1 where
    the adapter has none · ``entries_EW4`` int32, mask of adapted projections and the bits of three fp32 scales ·
    ``arrived_WN`` and ``ready_N`` int32, the Triton rows kernel's counters, zero between launches · ``mailboxes`` of
    the one in CUDA C++.
    """

    tile: Tile
    list_N: torch.Tensor
    counts_4: torch.Tensor
    blocks_B4: torch.Tensor
    items_W4: torch.Tensor
    tables_W: torch.Tensor
    addresses_EWR: torch.Tensor
    entries_EW4: torch.Tensor
    arrived_WN: torch.Tensor
    ready_N: torch.Tensor
    mailboxes: Mailboxes

    @classmethod
    def allocate(cls, tile: Tile, max_blocks: int, max_items: int, entries: int, device: torch.device) -> SgmvWork:
        """``entries`` is layers * groups. A batch of T rows and largest rank r has at most T blocks and
        T * ceil(r / tile.ranks) items."""
        list_N = torch.zeros(list_words(max_blocks, max_items), dtype=torch.int32, device=device)
        return cls.over(list_N, tile, max_blocks, max_items, entries)

    @classmethod
    def over(cls, list_N: torch.Tensor, tile: Tile, max_blocks: int, max_items: int, entries: int) -> SgmvWork:
        """A list in memory of the caller's, :func:`list_words` long, with scratch of its own."""
        device = list_N.device
        addresses = torch.empty((entries, max_items, tile.ranks), dtype=torch.int64, device=device)
        words = torch.empty((entries, max_items, 4), dtype=torch.int32, device=device)
        arrived = torch.zeros((max_items, COUNTER_WORDS.value), dtype=torch.int32, device=device)
        ready = torch.zeros(max_blocks * _MOST_TILES, dtype=torch.int32, device=device)
        parts, mailboxes = _parts(list_N, max_blocks, max_items), Mailboxes(device)
        return cls(tile, list_N, *parts, addresses, words, arrived, ready, mailboxes)

    def within(self, list_N: torch.Tensor, tile: Tile, max_blocks: int, max_items: int) -> SgmvWork:
        """A list of less capacity in ``list_N`` (zero, :func:`list_words` long) that shares this one's scratch: of the
        two, one at a time may be between :func:`resolve` and its last product. ``tile.ranks`` is this one's."""
        entries = len(self.entries_EW4)
        addresses = self.addresses_EWR.view(-1)[: entries * max_items * tile.ranks].view(entries, max_items, -1)
        words = self.entries_EW4.view(-1)[: entries * max_items * 4].view(entries, max_items, 4)
        arrived, ready = self.arrived_WN[:max_items], self.ready_N[: max_blocks * _MOST_TILES]
        parts = _parts(list_N, max_blocks, max_items)
        return SgmvWork(tile, list_N, *parts, addresses, words, arrived, ready, self.mailboxes)

    @classmethod
    def of(cls, plan: WorkPlan, entries: int, device: torch.device) -> SgmvWork:
        """A list that just fits one plan: for steps outside graphs."""
        work = cls.allocate(plan.tile, max(1, len(plan.blocks_B4)), max(1, len(plan.items_W4)), entries, device)
        work.load(plan)
        return work

    @property
    def max_items(self) -> int:
        return self.items_W4.shape[0]

    def ready(self, tiles: int) -> torch.Tensor:
        """Counters for ``tiles`` tiles of each block. Raises ValueError if that is too many."""
        if tiles > _MOST_TILES:
            raise ValueError(f"{tiles} tiles of outputs; at most {_MOST_TILES}")
        return self.ready_N

    def load(self, plan: WorkPlan) -> None:
        """Copy a plan in, asynchronously on a GPU. Raises ValueError if it does not fit or has another tile."""
        staged = torch.zeros(self.list_N.shape, dtype=torch.int32, pin_memory=self.list_N.is_cuda)
        self.pack(plan, staged.numpy())
        self.list_N.copy_(staged, non_blocking=True)

    def pack(self, plan: WorkPlan, words_N: npt.NDArray[np.int32]) -> None:
        """Write a plan as the words of ``list_N``. Raises ValueError if it does not fit or has another tile."""
        num_blocks, num_items = len(plan.blocks_B4), len(plan.items_W4)
        if plan.tile != self.tile:
            raise ValueError(f"the plan's tile {plan.tile} is not the list's {self.tile}")
        if num_blocks > self.blocks_B4.shape[0] or num_items > self.max_items:
            raise ValueError(f"{num_blocks} blocks and {num_items} items do not fit")
        items_at = _HEAD + self.blocks_B4.numel()
        tables_at = items_at + self.items_W4.numel()
        words_N[:_HEAD] = num_blocks, num_items, 0, 0
        words_N[_HEAD : _HEAD + plan.blocks_B4.size] = plan.blocks_B4.ravel()
        words_N[items_at : items_at + plan.items_W4.size] = plan.items_W4.ravel()
        words_N[tables_at : tables_at + 2 * num_items] = plan.tables_W.view(np.int32)


def list_words(max_blocks: int, max_items: int) -> int:
    """int32 words of a list of such capacity; even, as the tables in it are int64."""
    return _HEAD + _BLOCK * max_blocks + (_ITEM + 2) * max_items


def _parts(
    list_N: torch.Tensor, max_blocks: int, max_items: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, blocks, items and tables of a list."""
    sizes = (_HEAD, _BLOCK * max_blocks, _ITEM * max_items, 2 * max_items)
    head, blocks, items, tables = list_N.split(sizes)
    return head, blocks.view(-1, _BLOCK), items.view(-1, _ITEM), tables.view(torch.int64)


@triton.jit
def resolve_kernel(
    words_ptr,
    counts_ptr,
    items_ptr,
    tables_ptr,
    addresses_ptr,
    entries_ptr,
    num_entries,
    max_items,
    R: tl.constexpr,
    E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    e = tl.program_id(1) * E + tl.arange(0, E)
    live = e < num_entries
    j = tl.arange(0, R)
    for item in range(tl.program_id(0), tl.load(counts_ptr + 1), tl.num_programs(0)):
        table = words_ptr + tl.load(tables_ptr + item)
        rank_and_mask = tl.load(table + 4 * e, mask=live, other=0)
        first = tl.load(table + 4 * e + 1, mask=live, other=0)
        scales = tl.load(table + 4 * e + 2, mask=live, other=0)
        last_scale = tl.load(table + 4 * e + 3, mask=live, other=0)
        rank = rank_and_mask.to(tl.int32)
        nth = tl.load(items_ptr + 4 * item + 2) + j
        has = live[:, None] & (nth[None, :] < rank[:, None])
        address = tl.load(table + 4 * num_entries + first[:, None] + nth[None, :], mask=has, other=-1)
        place = e.to(tl.int64) * max_items + item
        tl.store(addresses_ptr + place[:, None] * R + j[None, :], address, mask=live[:, None])
        tl.store(entries_ptr + 4 * place, (rank_and_mask >> 32).to(tl.int32), mask=live)
        tl.store(entries_ptr + 4 * place + 1, scales.to(tl.int32), mask=live)
        tl.store(entries_ptr + 4 * place + 2, (scales >> 32).to(tl.int32), mask=live)
        tl.store(entries_ptr + 4 * place + 3, last_scale.to(tl.int32), mask=live)


def resolve(work: SgmvWork, pool: torch.Tensor) -> None:
    """Read the slice tables of all items into ``addresses_EWR`` and ``entries_EW4``: once a step, before
    the first product. ``pool`` is the flat pool; its tables must not change until the step is over."""
    if not pool.is_contiguous() or pool.dim() != 1:
        raise ValueError("the pool must be flat and contiguous")
    num_entries = work.entries_EW4.shape[0]
    grid = (min(work.max_items, 256), divide_up(num_entries, _ENTRIES_AT_ONCE))
    resolve_kernel[grid](
        pool.view(torch.int64),
        work.counts_4,
        work.items_W4,
        work.tables_W,
        work.addresses_EWR,
        work.entries_EW4,
        num_entries,
        work.max_items,
        R=work.tile.ranks,
        E=_ENTRIES_AT_ONCE,
        num_warps=4,
        **launch_options(pool.device),
    )
    work.counts_4[2:].zero_()  # an ordinary kernel: those after it load addresses before they wait


@triton.jit
def mark_rows_kernel(counts_ptr, blocks_ptr, listed_ptr, M: tl.constexpr, PDL: tl.constexpr):
    """A program writes 1 for the rows of a block; the others' marks stay as they were."""
    if PDL:
        gdc_wait()
    block, m = tl.program_id(0), tl.arange(0, M)
    live = block < tl.load(counts_ptr)
    row, rows = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    tl.store(listed_ptr + row + m, 1, mask=live & (m < rows))


def listed_rows(work: SgmvWork, rows: int) -> torch.Tensor:
    """int32 (rows,), not zero for those of the list's blocks. What needs it needs it once a step."""
    device = work.list_N.device
    listed_T = torch.zeros(rows, dtype=torch.int32, device=device)
    options = {"num_warps": 1, **launch_options(device)}
    grid = (work.blocks_B4.shape[0],)
    mark_rows_kernel[grid](work.counts_4, work.blocks_B4, listed_T, M=work.tile.rows, **options)
    return listed_T
