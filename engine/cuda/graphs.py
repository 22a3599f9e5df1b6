"""Decode steps as CUDA graphs, at a ladder of batch sizes. Adapters, page tables and lengths are data of a graph.

What a graph has for good: its rows, in how many runs it cuts positions, whether its adapters change the attention
alone, and how many items its work list holds. One for each that occurs is captured when it first does; those that
nearly every engine needs, before it serves.
"""

# B rows of a graph, of which a step may use fewer, P pages of a sequence, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stencilpress.engine.cuda.feedback import Feedback
from stencilpress.engine.cuda.inputs import Inputs, aligned
from stencilpress.engine.cuda.products import Products
from stencilpress.engine.cuda.rows import StepRows
from stencilpress.engine.model.triton_llama import ALL_GROUPS, ATTENTION_GROUPS, Adapted, DeviceRows, TritonDecoder
from stencilpress.kernels.attention.triton_decode import choose_splits
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile, WorkPlan, choose_tile, list_words, plan_work

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REACHES = (512, 4096)
"""Positions up to which graphs have their own cut into runs. Up to the first, one run is best: none to join."""
RANKS = 16
"""Rank slices of an item."""
FEW_BLOCKS = 8
"""Fewest blocks of a work list. So few blocks of several rows are cut finer, to fill the device."""


class Adapting(NamedTuple):
    """The part of a graph that serves adapters: rows of a block, whether blocks are few, items a block, groups."""

    tile_rows: int
    few: bool
    factor: int
    groups: int

    @property
    def tile(self) -> Tile:
        return Tile(self.tile_rows, RANKS)

    def blocks(self, rows: int) -> int:
        """Blocks that suffice for so many rows: adapters have 8 or more each where a block takes several."""
        if self.few:
            return FEW_BLOCKS
        return max(FEW_BLOCKS, rows if self.tile_rows == 1 else rows // 8 + rows // self.tile_rows + 1)

    def items(self, rows: int) -> int:
        return self.factor * self.blocks(rows)


class Variant(NamedTuple):
    """What tells one graph from another."""

    rows: int
    splits: int
    adapting: Adapting | None


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph | None
    rows: DeviceRows
    seats_B: Tensor


class DecodeGraphs:
    """Runs decode steps of up to ``largest`` rows. After :meth:`run`, ``tokens_B`` has the rows' most likely tokens
    (negative where logits are not finite) and ``logits_BV`` their logits, until the next run."""

    def __init__(
        self,
        decoder: TritonDecoder,
        inputs: Inputs,
        feedback: Feedback,
        products: Products,
        *,
        seats: int,
        max_model_len: int,
        max_pages: int,
        max_rank: int,
    ) -> None:
        self._decoder = decoder
        self._inputs = inputs
        self._feedback = feedback
        self._products = products
        self._max_model_len = max_model_len
        self._sizes = [size for size in LADDER if size < seats] + [min(seats, LADDER[-1])]
        device, largest = inputs.device_N.device, self.largest
        self.tokens_B = torch.zeros(largest, dtype=torch.int32, device=device)
        self.logits_BV = torch.zeros(largest, decoder.spec.vocab_size, dtype=decoder.pool.dtype, device=device)
        self._tables_BP = torch.zeros(largest, max_pages, dtype=torch.int32, device=device)
        self._factors = [1 << n for n in range((max(1, -(-max_rank // RANKS)) - 1).bit_length() + 1)]
        scratch = Adapting(1, False, self._factors[-1], ALL_GROUPS)
        self._scratch = SgmvWork.allocate(
            scratch.tile, scratch.blocks(largest), scratch.items(largest), decoder.entries, device
        )
        self._graphs: dict[Variant, _Graph] = {}
        self._memory = None if device.type != "cuda" else torch.cuda.graph_pool_handle()

    @property
    def largest(self) -> int:
        """Rows of the largest graph."""
        return self._sizes[-1]

    def warm(self) -> None:
        """Capture, largest first, what steps without adapters and with ones of one item a row need."""
        adapting = (None, Adapting(1, False, 1, ATTENTION_GROUPS), Adapting(1, False, 1, ALL_GROUPS))
        for size in reversed(self._sizes):
            for kind in adapting:
                self._graph(self._variant(size, 1, kind))

    def run(self, rows: StepRows) -> None:
        """Compute a step of decodes alone, in order on the current stream."""
        count = len(rows.tokens_T)
        size = next(size for size in self._sizes if size >= count)
        plan = plan_work(rows.adapters, choose_tile(rows.adapters)._replace(ranks=RANKS)) if rows.adapters else None
        variant = self._variant(size, rows.longest, None if plan is None else self._adapting(plan, size, rows.groups))
        graph = self._graph(variant)
        self._send(rows, graph.rows, plan)
        if graph.graph is None:
            self._compute(graph)
        else:
            graph.graph.replay()

    def _variant(self, size: int, longest: int, adapting: Adapting | None) -> Variant:
        if longest <= REACHES[0]:
            return Variant(size, 1, adapting)
        reach = next((reach for reach in REACHES if reach >= longest), self._max_model_len)
        splits = choose_splits(size, self._decoder.kv.kv_heads, reach, self._inputs.device_N.device)
        return Variant(size, splits, adapting)

    def _adapting(self, plan: WorkPlan, size: int, groups: int) -> Adapting:
        groups = ATTENTION_GROUPS if groups | ATTENTION_GROUPS == ATTENTION_GROUPS else ALL_GROUPS
        few = plan.tile.rows > 1 and len(plan.blocks_B4) <= FEW_BLOCKS
        fits = (Adapting(plan.tile.rows, few, factor, groups) for factor in self._factors)
        return next(kind for kind in fits if kind.items(size) >= len(plan.items_W4))

    # One graph's inputs: tokens, positions, slots, lengths, seats, work list; after them the step's page tables

    def _send(self, rows: StepRows, target: DeviceRows, plan: WorkPlan | None) -> None:
        inputs, size, count = self._inputs, len(target.tokens_T), len(rows.tokens_T)
        inputs.begin()
        nobody = self._feedback.idle
        for values, idle in (
            (rows.tokens_T, 0),
            (rows.positions_T, 0),
            (rows.slots_T, -1),
            (rows.lengths_D, 0),
            (rows.seats_D, nobody),
        ):
            host, _ = inputs.reserve(size)
            host[:count] = values
            host[count:] = idle
        if target.adapted is not None and plan is not None:
            work = target.adapted.work
            host, _ = inputs.reserve(len(work.list_N))
            work.pack(plan, host)
        pages_SP = inputs.put(rows.pages_SP)
        inputs.send()
        self._tables_BP[:count, : pages_SP.shape[1]].copy_(pages_SP)

    def _views(self, variant: Variant) -> _Graph:
        """The views of the inputs that :meth:`_send` fills; nothing is captured yet."""
        size, stride = variant.rows, aligned(variant.rows)
        words = self._inputs.device_N
        tokens, positions, slots, lengths, seats = (words[n * stride : n * stride + size] for n in range(5))
        adapted = None
        if variant.adapting is not None:
            kind = variant.adapting
            blocks, items = kind.blocks(size), kind.items(size)
            list_N = words[5 * stride : 5 * stride + list_words(blocks, items)]
            adapted = Adapted(self._scratch.within(list_N, kind.tile, blocks, items), kind.groups)
        tables = self._tables_BP[:size]
        return _Graph(None, DeviceRows(tokens, positions, slots, lengths, tables, variant.splits, None, adapted), seats)

    def _graph(self, variant: Variant) -> _Graph:
        graph = self._graphs.get(variant)
        if graph is None:
            graph = self._graphs[variant] = self._captured(self._views(variant))
        return graph

    def _captured(self, views: _Graph) -> _Graph:
        if self._memory is None:
            return views
        _idle(views.rows)
        views.seats_B.fill_(self._feedback.idle)
        graph = torch.cuda.CUDAGraph()
        with self._products.fastest(len(views.seats_B)):
            self._compute(views)  # compiles and loads kernels, which a capture must not
            torch.cuda.current_stream().synchronize()
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            self._compute(views)
            graph.capture_end()
        return replace(views, graph=graph)

    def _compute(self, views: _Graph) -> None:
        size = len(views.seats_B)
        rows = replace(views.rows, tokens_T=self._feedback.known(views.rows.tokens_T, views.seats_B))
        logits_BV = self.logits_BV[:size]
        logits_BV.copy_(self._decoder.logits(*self._decoder.forward(rows)))
        self._feedback.draw_best(logits_BV, views.seats_B, self.tokens_B[:size])


def _idle(rows: DeviceRows) -> None:
    """Fill a graph's inputs so that computing them changes nothing."""
    for words in (rows.tokens_T, rows.positions_T, rows.lengths_D):
        words.zero_()
    rows.slots_T.fill_(-1)
    if rows.adapted is not None:
        rows.adapted.work.list_N.zero_()
