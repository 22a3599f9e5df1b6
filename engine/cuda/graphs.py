"""Decode steps as CUDA graphs, at a ladder of batch sizes. Adapters, page tables and lengths are data of a graph.

What a graph has for good: its rows, in how many runs it cuts positions, whether its adapters change the attention
alone, and how many items its work list holds. What most steps need is captured before the engine serves; all that may
occur is compiled by then. The rest is launched kernel by kernel, and captured once it has occurred a few times.
"""

# B rows of a graph, of which a step may use fewer, P pages of a sequence, V vocabulary

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stencilpress.engine.cuda.feedback import Feedback
from stencilpress.engine.cuda.inputs import Inputs, aligned
from stencilpress.engine.cuda.products import Products
from stencilpress.engine.cuda.rows import StepRows
from stencilpress.engine.model.triton_llama import (
    ALL_GROUPS,
    ATTENTION_GROUPS,
    Adapted,
    DeviceRows,
    TritonDecoder,
    covering_groups,
)
from stencilpress.kernels.attention.triton_decode import choose_splits
from stencilpress.kernels.compile_ahead import compiling_only
from stencilpress.kernels.sgmv.cuda_sgmv import room_is_free
from stencilpress.kernels.sgmv.triton_work import (
    CROWD,
    FEW_ROWS,
    WIDE_ROWS_IN_CROWD,
    SgmvWork,
    Tile,
    WorkPlan,
    choose_tile,
    list_words,
    plan_work,
)

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
"""Rows of graphs. An 8B Llama's products take 4.4 ms of a step on an H200 at 128 rows, 4.5 at 160, 5.1 at 192."""
REACHES = (512, 4096)
"""Positions up to which graphs have their own cut into runs. Up to the first, one run is best: none to join."""
RANKS = 16
"""Rank slices of an item."""
FEW_BLOCKS = 8
"""Fewest blocks of a work list. So few blocks of several rows are cut finer, to fill the device."""
CAPTURED_AT = 3
"""A variant without a graph gets one when it occurs for this time: a capture costs as much as three eager steps."""
TILE_ROWS = (1, 16, 64)
SHARED_ROWS = (FEW_ROWS, WIDE_ROWS_IN_CROWD)
"""Fewest rows an adapter has, on average, in steps whose blocks take several: what graphs have room for."""


class Adapting(NamedTuple):
    """The part of a graph that serves adapters: rows of a block, of an adapter on average (0: few blocks), items a
    block, groups."""

    tile_rows: int
    shared: int
    factor: int
    groups: int

    @property
    def tile(self) -> Tile:
        return Tile(self.tile_rows, RANKS)

    def blocks(self, rows: int) -> int:
        """Blocks that suffice for so many rows."""
        if not self.shared:
            return FEW_BLOCKS
        return max(FEW_BLOCKS, rows if self.tile_rows == 1 else rows // self.shared + rows // self.tile_rows + 1)

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
    (negative where logits are not finite) and ``logits_BV`` their logits, until the next run. ``memory`` is what its
    graphs compute in; whatever replays on the same stream may share it."""

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
        self._one_layer = decoder.first_layer()
        self._inputs = inputs
        self._feedback = feedback
        self._products = products
        self._max_model_len = max_model_len
        self._sizes = [size for size in LADDER if size < seats] + [min(seats, LADDER[-1])]
        device, largest = inputs.device_N.device, self.largest
        self.tokens_B = torch.zeros(largest, dtype=torch.int32, device=device)
        self.logits_BV = torch.zeros(largest, decoder.spec.vocab_size, dtype=decoder.pool.dtype, device=device)
        self._tables_BP = torch.zeros(largest, max_pages, dtype=torch.int32, device=device)
        self._factors = item_factors(max_rank, RANKS)
        self._single_factors = {size: self._factors_of_single_rows(size) for size in self._sizes}
        scratch = Adapting(1, 1, self._factors[-1], ALL_GROUPS)
        self._scratch = SgmvWork.allocate(
            scratch.tile, scratch.blocks(largest), scratch.items(largest), decoder.entries, device
        )
        self._graphs: dict[Variant, _Graph] = {}
        self._missed: Counter[Variant] = Counter()
        self.memory = None if device.type != "cuda" else torch.cuda.graph_pool_handle()

    @property
    def largest(self) -> int:
        """Rows of the largest graph."""
        return self._sizes[-1]

    def compile(self) -> None:
        """Compile each kernel that a step may need. Most are the largest size's; the other sizes find those made."""
        for size in reversed(self._sizes):
            with compiling_only():
                for variant in self._possible(size):
                    self._launch_one_layer(variant)

    def warm(self) -> None:
        """Load what any step may need, and capture what most do, largest first: their memory serves the others."""
        for size in reversed(self._sizes):
            with self._products.fastest(size):
                for variant in self._possible(size):
                    self._launch_one_layer(variant)
        torch.cuda.current_stream().synchronize()
        for size in reversed(self._sizes):
            for variant in self._common(size):
                self._graphs[variant] = self._captured(self._views(variant))

    def rehearse(self) -> int:
        """Capture the largest size's graphs, for the memory that it takes. Returns how many :meth:`warm` captures."""
        for variant in self._common(self.largest):
            with self._products.fastest(self.largest):
                self._launch_one_layer(variant)
            self._graphs[variant] = self._captured(self._views(variant))
        return sum(1 for size in self._sizes for _ in self._common(size))

    def _reaches(self, size: int) -> Iterator[int]:
        """Lengths of the longest row that stand for all, one for each number of runs."""
        reaches = {self._variant(size, min(reach, self._max_model_len), None): reach for reach in (*REACHES, 1 << 30)}
        return (min(reach, self._max_model_len) for reach in reaches.values())

    def _common(self, size: int) -> Iterator[Variant]:
        """Without adapters, with ones of fewest items a row at any length, and of more at short lengths."""
        for reach in self._reaches(size):
            yield self._variant(size, reach, None)
            factors = self._single_factors[size]
            for factor, groups in product(
                factors if reach <= REACHES[0] else factors[:1], (ATTENTION_GROUPS, ALL_GROUPS)
            ):
                yield self._variant(size, reach, Adapting(1, 1, factor, groups))

    def _possible(self, size: int) -> Iterator[Variant]:
        """Variants whose kernels are those of all that :meth:`run` may meet."""
        for reach in self._reaches(size):
            yield self._variant(size, reach, None)
        for rows in TILE_ROWS:
            for factor, shared in product(self._factors_of(rows, size), _shared(rows, size)):
                yield self._variant(size, 1, Adapting(rows, shared, factor, ALL_GROUPS))

    def run(self, rows: StepRows) -> None:
        """Compute a step of decodes alone, in order on the current stream."""
        count = len(rows.tokens_T)
        size = next(size for size in self._sizes if size >= count)
        plan = plan_work(rows.adapters, choose_tile(rows.adapters)._replace(ranks=RANKS)) if rows.adapters else None
        variant = self._variant(size, rows.longest, None if plan is None else self._adapting(plan, size, rows.groups))
        graph = self._graphs.get(variant) or self._views(variant)
        self._send(rows, graph.rows, plan)
        if graph.graph is not None:
            graph.graph.replay()
            return
        with self._products.fastest(size):
            self._compute(graph, self._decoder)
        self._missed[variant] += 1
        if self.memory is not None and self._missed[variant] == CAPTURED_AT:
            self._graphs[variant] = self._captured(graph)

    def _variant(self, size: int, longest: int, adapting: Adapting | None) -> Variant:
        if longest <= REACHES[0]:
            return Variant(size, 1, adapting)
        reach = next((reach for reach in REACHES if reach >= longest), self._max_model_len)
        splits = choose_splits(size, self._decoder.kv.kv_heads, reach, self._inputs.device_N.device)
        return Variant(size, splits, adapting)

    def _adapting(self, plan: WorkPlan, size: int, groups: int) -> Adapting:
        factors = self._factors_of(plan.tile.rows, size)
        return least_room(plan, size, factors)._replace(groups=covering_groups(groups))

    def _factors_of(self, tile_rows: int, size: int) -> list[int]:
        """Items of a block that a size's graphs have room for."""
        return self._single_factors[size] if tile_rows == 1 else self._factors

    def _factors_of_single_rows(self, size: int) -> list[int]:
        pool, shapes = self._decoder.pool, self._decoder.shapes
        return needed(self._factors, lambda n: room_is_free(pool, shapes, Tile(1, RANKS), size, n * size))

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
            (work,) = target.adapted.works
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
            adapted = Adapted((self._scratch.within(list_N, kind.tile, blocks, items),), kind.groups)
        tables = self._tables_BP[:size]
        return _Graph(None, DeviceRows(tokens, positions, slots, lengths, tables, variant.splits, None, adapted), seats)

    def _launch_one_layer(self, variant: Variant) -> None:
        """All kernels of a variant."""
        views = self._views(variant)
        _idle(views.rows)
        views.seats_B.fill_(self._feedback.idle)
        self._compute(views, self._one_layer)

    def _captured(self, views: _Graph) -> _Graph:
        with self._products.fastest(len(views.seats_B)):
            graph = captured(self.memory, lambda: self._compute(views, self._decoder))
        return replace(views, graph=graph)

    def _compute(self, views: _Graph, decoder: TritonDecoder) -> None:
        size = len(views.seats_B)
        rows = replace(views.rows, tokens_T=self._feedback.known(views.rows.tokens_T, views.seats_B))
        logits_BV = self.logits_BV[:size]
        logits_BV.copy_(decoder.logits(*decoder.forward(rows)))
        self._feedback.draw_best(logits_BV, views.seats_B, self.tokens_B[:size])


def least_room(plan: WorkPlan, size: int, factors: Sequence[int]) -> Adapting:
    """Of the parts that graphs of a size have for adapters, the smallest that has room for a plan."""
    rows, blocks, items = plan.tile.rows, len(plan.blocks_B4), len(plan.items_W4)
    kinds = (Adapting(rows, shared, factor, 0) for shared in _shared(rows, size) for factor in factors)
    return next(kind for kind in kinds if kind.blocks(size) >= blocks and kind.items(size) >= items)


def _shared(tile_rows: int, size: int) -> tuple[int, ...]:
    """``Adapting.shared`` of a size's graphs, least room first."""
    if tile_rows == 1:
        return (1,)
    if size < FEW_ROWS:
        return ()
    return (0, *SHARED_ROWS) if size >= CROWD else (0, FEW_ROWS)


def needed(factors: Sequence[int], is_free: Callable[[int], bool]) -> list[int]:
    """Of ascending factors those that graphs are made for: the largest whose room is free serves for lower ones."""
    most = max(filter(is_free, factors), default=1)
    return [factor for factor in factors if factor >= most]


def item_factors(max_rank: int, ranks: int) -> list[int]:
    """Items of a block that graphs have room for: powers of two, up to what the largest rank takes."""
    return [1 << n for n in range((max(1, -(-max_rank // ranks)) - 1).bit_length() + 1)]


def captured(memory: Any, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What ``compute`` launches, as a graph that computes in ``memory``. Nothing runs, and nothing may compile: its
    kernels must have run before."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    compute()
    graph.capture_end()
    return graph


def _idle(rows: DeviceRows) -> None:
    """Fill a graph's inputs so that computing them changes nothing."""
    for words in (rows.tokens_T, rows.positions_T, rows.lengths_D):
        words.zero_()
    rows.slots_T.fill_(-1)
    if rows.adapted is not None:
        for work in rows.adapted.works:
            work.list_N.zero_()
