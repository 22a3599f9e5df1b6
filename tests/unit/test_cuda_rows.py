"""What a step on a GPU is told: rows in order, page tables, adapters' rows; and the buffers that carry it there."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from stencilpress.engine.cuda.feedback import Feedback
from stencilpress.engine.cuda.graphs import LADDER, RANKS, Adapting, item_factors, least_room, needed
from stencilpress.engine.cuda.inputs import Inputs, most_words
from stencilpress.engine.cuda.rows import RowBuilder, StepRows
from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import PENDING, Chunk, Draw, Segment, StepPlan
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_work import AdapterRows, SgmvWork, Tile, choose_tile, list_words, plan_work
from stencilpress.kernels.sgmv.views import AdapterView, table_view

NO_TABLE = np.empty(0, dtype=np.int64)
VIEWS = {"A": AdapterView(400, 16, 0b0011, (), NO_TABLE), "B": AdapterView(80, 40, 0b1000, (), NO_TABLE)}
CPU = torch.device("cpu")


def _chunk(slot: int, start: int, tokens: tuple[int, ...], pages: tuple[int, ...], *, draws: bool = True) -> Chunk:
    draw = Draw(Sampling(), [0] * (start + len(tokens)), 1, 0) if draws else None
    return Chunk((1, slot), slot, start, tokens, pages, draw)


def _builder() -> RowBuilder:
    return RowBuilder(seats=8, max_pages=6, page_tokens=4, heads_per_kv_head=4, elem_bytes=2)


def _build(builder: RowBuilder, *segments: Segment) -> StepRows:
    return builder.build(StepPlan(1, segments), VIEWS.__getitem__)


def test_decodes_come_first_and_each_part_is_by_adapter() -> None:
    rows = _build(
        _builder(),
        Segment("A", (_chunk(3, 5, (PENDING,), (9, 2)), _chunk(1, 0, (11, 12, 13), (7,)))),
        Segment(None, (_chunk(0, 8, (14,), (4, 5, 6), draws=False), _chunk(5, 2, (15, 16), (3,), draws=False))),
        Segment("B", (_chunk(2, 3, (17,), (8,)), _chunk(4, 4, (18, 19), (1, 0)))),
    )

    assert rows.tokens_T.tolist() == [PENDING, 14, 17, 11, 12, 13, 15, 16, 18, 19]
    assert rows.positions_T.tolist() == [5, 8, 3, 0, 1, 2, 2, 3, 4, 5]
    assert rows.slots_T.tolist() == [2 * 4 + 1, 6 * 4, 8 * 4 + 3, 28, 29, 30, 14, 15, 0, 1]
    assert rows.lengths_D.tolist() == [6, 9, 4]
    assert rows.longest == 9
    assert rows.seats_D.tolist() == [3, 0, 2]
    assert rows.pages_SP.tolist() == [[9, 2, 0], [4, 5, 6], [8, 0, 0], [7, 0, 0], [3, 0, 0], [1, 0, 0]]
    assert sorted(rows.pieces_N4.tolist()) == [[3, 3, 0, 3], [6, 2, 2, 4], [8, 2, 4, 5]]
    assert rows.adapters == [
        AdapterRows(0, 1, 100, 16),
        AdapterRows(3, 3, 100, 16),
        AdapterRows(2, 1, 20, 40),
        AdapterRows(8, 2, 20, 40),
    ]
    assert rows.groups == 0b1011
    assert rows.draw_rows.tolist() == [0, 5, 2, 9]
    assert rows.draw_seats.tolist() == [3, 1, 2, 4]
    assert rows.keys == [(1, 3), (1, 1), (1, 2), (1, 4)]


def test_a_seat_s_pages_are_those_of_its_newest_chunk() -> None:
    builder = _builder()
    pages = (5, 6)
    for chunk, table in (
        (_chunk(2, 4, (1,), pages), [5, 6]),
        (_chunk(2, 5, (1,), pages), [5, 6]),
        (_chunk(2, 8, (1,), (5, 6, 7)), [5, 6, 7]),
        (_chunk(2, 0, (1,), (3,)), [3]),
    ):
        rows = _build(builder, Segment(None, (chunk,)))
        assert rows.pages_SP.tolist() == [table]
        assert rows.slots_T.tolist() == [table[-1] * 4 + chunk.start % 4]
        assert len(rows.pieces_N4) == 0


def test_inputs_arrive_aligned_and_steps_take_turns() -> None:
    inputs = Inputs(64, CPU)
    for step in range(3):
        inputs.begin()
        first = inputs.put(np.arange(5, dtype=np.int32) + step)
        second = inputs.put(np.full((2, 3), step, dtype=np.int32))
        inputs.send()
        assert first.tolist() == [step, step + 1, step + 2, step + 3, step + 4]
        assert second.tolist() == [[step] * 3] * 2
        assert (second.data_ptr() - inputs.device_N.data_ptr()) % 16 == 0


def test_the_largest_step_fits() -> None:
    """Every seat a prompt with an adapter of the highest rank, as many tokens as a step takes."""
    seats, tokens, max_pages, rank = 8, 70, 9, 64
    words = most_words(tokens=tokens, seats=seats, max_pages=max_pages, max_rank=rank, heads_per_kv_head=4)
    rows = [AdapterRows(i, 1, 0, rank) for i in range(tokens)]
    plan = plan_work(rows, Tile(1, 16))
    inputs = Inputs(words, CPU)
    for size in (*[tokens] * 3, *[seats] * 4, seats * 16, 4 * (tokens + seats)):
        inputs.reserve(size)
    host, device = inputs.reserve(list_words(len(plan.blocks_B4) + 16, len(plan.items_W4) + 16))
    assert len(host) == len(device) == list_words(len(plan.blocks_B4) + 16, len(plan.items_W4) + 16)


def test_pending_tokens_are_what_the_seat_drew_last() -> None:
    feedback = Feedback(4, CPU)
    feedback.keep(torch.tensor([7, 9, -1], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32))

    known = feedback.known(
        torch.tensor([PENDING, 5, PENDING, PENDING], dtype=torch.int32), torch.tensor([0, 2, 2, 1], dtype=torch.int32)
    )

    assert known.tolist() == [9, 5, 7, 0]


def test_work_lists_of_less_capacity_share_scratch() -> None:
    large = SgmvWork.allocate(Tile(1, 16), 8, 16, 3, CPU)
    small = large.within(torch.zeros(list_words(2, 4), dtype=torch.int32), Tile(1, 16), 2, 4)
    small.load(plan_work([AdapterRows(5, 1, 30, 20)], Tile(1, 16)))

    assert small.counts_4.tolist() == [1, 2, 0, 0]
    assert small.blocks_B4.tolist()[0] == [5, 1, 2, 1]
    assert small.tables_W.tolist()[:2] == [30, 30]
    assert small.addresses_EWR.shape == (3, 4, 16)
    assert small.addresses_EWR.data_ptr() == large.addresses_EWR.data_ptr()
    assert large.list_N.sum() == 0


def test_a_table_says_rank_and_groups() -> None:
    table = np.zeros(4 * 4 + 9, dtype=np.int64)
    table[4 * 1] = 6 | 1 << 32
    table[4 * 3] = 3 | 1 << 32
    view = table_view(table, 77, 2, [GroupShape(8, (8,)), GroupShape(8, (8,))])
    assert (view.table_offset, view.rank, view.groups) == (77, 6, 0b10)


def test_graphs_are_made_for_the_largest_room_that_costs_nothing_and_for_more() -> None:
    assert needed([1, 2, 4, 8], lambda n: n <= 4) == [4, 8]
    assert needed([1, 2, 4], lambda n: n == 1) == [1, 2, 4]
    assert needed([1, 2, 4], lambda _: False) == [1, 2, 4]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 256)), min_size=1, max_size=300), st.sampled_from(LADDER))
def test_graphs_have_room_for_any_adapters(adapters: list[tuple[int, int]], size: int) -> None:
    """Of any decode step of up to a graph's rows: also a crowd of adapters with few rows each."""
    starts = accumulate((rows for rows, _ in adapters), initial=0)
    segments = [
        AdapterRows(start, rows, 0, rank)
        for start, (rows, rank) in zip(starts, adapters, strict=False)
        if start + rows <= size
    ]
    assume(segments)
    plan = plan_work(segments, choose_tile(segments)._replace(ranks=RANKS))
    kind = least_room(plan, size, item_factors(256, RANKS))
    assert kind.blocks(size) >= len(plan.blocks_B4)
    assert kind.items(size) >= len(plan.items_W4)
    whole = Adapting(1, 1, item_factors(256, RANKS)[-1], 0)  # whose scratch all share
    assert kind.items(size) <= whole.items(size)
