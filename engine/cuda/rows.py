"""From a plan to the numbers that the kernels of a step take, in numpy: nothing here touches a device.

Rows of decodes come first, those of prompts after them; within each part the rows of an adapter are neighbours.
"""

# T rows, D of them decodes, S sequences (decodes, then prompts), P pages of the longest, N pieces of prompts

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stencilpress.engine.plan import Chunk, Draw, Page, RequestKey, StepPlan
from stencilpress.kernels.attention.triton_prefill import ChunkRows, plan_pieces
from stencilpress.kernels.sgmv.triton_work import AdapterRows
from stencilpress.kernels.sgmv.views import AdapterView

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepRows:
    """One forward. ``slots`` is where a row's key and value go (page * page_tokens + offset), ``lengths`` how many
    positions a decode attends, ``pages`` the sequences' page tables, ``pieces`` as in ``kernels/attention``.

    ``adapters`` are the rows that have one, ``groups`` the bits of all groups that these change. Row ``draw_rows[i]``
    draws for ``keys[i]`` by ``draws[i]``, in the plan's order, and ``draw_seats[i]`` is its seat. A decode's token may
    be negative: its seat drew it in the step before.
    """

    tokens_T: Int32
    positions_T: Int32
    slots_T: Int32
    lengths_D: Int32
    seats_D: Int32
    pages_SP: Int32
    pieces_N4: Int32
    adapters: list[AdapterRows]
    groups: int
    draw_rows: Int32
    draw_seats: Int32
    keys: list[RequestKey]
    draws: list[Draw]

    @property
    def longest(self) -> int:
        """Positions that the longest decode attends; 0 if there is none."""
        return int(self.lengths_D.max(initial=0))


class RowBuilder:
    """Lays plans out as rows. It keeps the page table of each seat, as most steps change few of them."""

    def __init__(
        self, *, seats: int, max_pages: int, page_tokens: int, heads_per_kv_head: int, elem_bytes: int
    ) -> None:
        self._page_tokens = np.int32(page_tokens)
        self._heads_per_kv_head = heads_per_kv_head
        self._elem_bytes = elem_bytes
        self._tables = np.zeros((seats, max_pages), dtype=np.int32)
        self._known: list[tuple[Page, ...] | None] = [None] * seats

    def build(self, plan: StepPlan, adapter: Callable[[str], AdapterView]) -> StepRows:
        """``adapter`` gives the view of a placed adapter, and raises for any other."""
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        drawing: list[tuple[Chunk, Draw, bool, int]] = []
        spans: list[_Span] = []
        for segment in plan.segments:
            before = len(decodes), len(prompts)
            for chunk in segment.chunks:
                part = prompts if len(chunk.tokens) > 1 else decodes
                if chunk.draw is not None:
                    drawing.append((chunk, chunk.draw, part is prompts, len(part)))
                part.append(chunk)
                if self._known[chunk.slot] is not chunk.pages:
                    self._learn(chunk)
            if segment.adapter is not None:
                spans.append(_Span(adapter(segment.adapter), *before, len(decodes), len(prompts)))
        return self._laid_out(decodes, prompts, drawing, spans)

    def _laid_out(
        self,
        decodes: list[Chunk],
        prompts: list[Chunk],
        drawing: list[tuple[Chunk, Draw, bool, int]],
        spans: list[_Span],
    ) -> StepRows:
        D = len(decodes)
        chunks = decodes + prompts
        start_S, seat_S = np.array([(chunk.start, chunk.slot) for chunk in chunks], dtype=np.int32).T
        length_S = np.ones(len(chunks), dtype=np.int32)
        length_S[D:] = [len(chunk.tokens) for chunk in prompts]
        first_S = np.cumsum(length_S, dtype=np.int32) - length_S
        tokens = [chunk.tokens[0] for chunk in decodes] + [token for chunk in prompts for token in chunk.tokens]
        position_T = np.arange(len(tokens), dtype=np.int32) + np.repeat(start_S - first_S, length_S)
        pages_T = self._tables[np.repeat(seat_S, length_S), position_T // self._page_tokens]
        used = -(-int((start_S + length_S).max()) // int(self._page_tokens))
        prompt_rows = zip(first_S[D:], length_S[D:], start_S[D:], range(D, len(chunks)), strict=True)
        return StepRows(
            tokens_T=np.array(tokens, dtype=np.int32),
            positions_T=position_T,
            slots_T=pages_T * self._page_tokens + position_T % self._page_tokens,
            lengths_D=start_S[:D] + np.int32(1),
            seats_D=seat_S[:D],
            pages_SP=self._tables[seat_S, :used],
            pieces_N4=plan_pieces([ChunkRows(*map(int, row)) for row in prompt_rows], self._heads_per_kv_head),
            adapters=list(self._adapter_rows(spans, D, first_S, length_S)),
            groups=reduce(or_, (span.view.groups for span in spans), 0),
            draw_rows=(first_S + length_S - 1)[[index + D * late for _, _, late, index in drawing]],
            keys=[chunk.key for chunk, *_ in drawing],
            draw_seats=np.array([chunk.slot for chunk, *_ in drawing], dtype=np.int32),
            draws=[draw for _, draw, *_ in drawing],
        )

    def _learn(self, chunk: Chunk) -> None:
        pages = chunk.pages[: self._tables.shape[1]]
        self._tables[chunk.slot, : len(pages)] = pages
        self._known[chunk.slot] = chunk.pages

    def _adapter_rows(self, spans: list[_Span], decodes: int, first_S: Int32, length_S: Int32) -> Iterator[AdapterRows]:
        for view, decode, prompt, decode_end, prompt_end in spans:
            table = view.table_offset * self._elem_bytes // 8
            if decode_end > decode and view.rank:
                yield AdapterRows(decode, decode_end - decode, table, view.rank)
            if prompt_end > prompt and view.rank:
                own = slice(decodes + prompt, decodes + prompt_end)
                yield AdapterRows(int(first_S[own][0]), int(length_S[own].sum()), table, view.rank)


class _Span(NamedTuple):
    """The decodes and prompts of one adapter, as ranges of their lists."""

    view: AdapterView
    decode: int
    prompt: int
    decode_end: int
    prompt_end: int
