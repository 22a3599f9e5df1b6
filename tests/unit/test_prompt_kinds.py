"""Which CUDA graph serves a step with prompts: one with room for its rows, decodes, items and blocks, little more."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from stencilpress.engine.cuda.prompt_graphs import CAPTURES_APART, PromptGraphs
from stencilpress.engine.cuda.prompt_kinds import BLOCKS, ITEMS, LADDER, MOST_PROMPTS, Kind, Kinds, best, lacking
from stencilpress.engine.cuda.rows import RowBuilder, StepRows
from stencilpress.engine.messages import Sampling
from stencilpress.engine.model.triton_llama import ALL_GROUPS, ATTENTION_GROUPS
from stencilpress.engine.plan import Chunk, Draw, Segment, StepPlan
from stencilpress.kernels.sgmv.views import AdapterView
from tests.unit.test_cuda_rows import NO_TABLE

SEATS, PAGES, PAGE_TOKENS = 256, 160, 16


def _kinds(
    max_rank: int = 64, max_tokens: int = 8192, *, sequences: int = SEATS, items_are_free: bool = False
) -> Kinds:
    return Kinds(
        sequences=sequences,
        max_tokens=max_tokens,
        max_rank=max_rank,
        splits=lambda *_: 3,
        items_are_free=items_are_free,
    )


def _rows(*sequences: tuple[int, int, int, int]) -> StepRows:
    """One segment a sequence: (tokens, position, rank or 0, groups)."""
    builder = RowBuilder(seats=300, max_pages=PAGES, page_tokens=PAGE_TOKENS, heads_per_kv_head=4, elem_bytes=2)
    segments = []
    for seat, (tokens, start, rank, _) in enumerate(sequences):
        draw = Draw(Sampling(), [0] * (start + tokens), 1, 0)
        chunk = Chunk((1, seat), seat, start, (7,) * tokens, tuple(range(PAGES)), draw)
        segments.append(Segment(str(seat) if rank else None, (chunk,)))

    def view(name: str) -> AdapterView:
        return AdapterView(400, sequences[int(name)][2], sequences[int(name)][3], (), NO_TABLE)

    return builder.build(StepPlan(1, tuple(segments)), view)


def _kind(kinds: Kinds, *sequences: tuple[int, int, int, int]) -> Kind | None:
    rows = _rows(*sequences)
    return kinds.of(rows, kinds.plans(rows))


def test_a_step_has_the_kind_that_just_has_room() -> None:
    kinds = _kinds()
    base = [(1, 40, 0, 0)] * 20
    assert _kind(kinds, *base, (100, 0, 0, 0)) == Kind(128, 128, 1)
    assert _kind(kinds, *base, (300, 0, 0, 0)) == Kind(320, SEATS, 1)
    few_adapted = [(1, 40, 64, ATTENTION_GROUPS)] * 20
    assert _kind(kinds, *few_adapted, (100, 0, 0, 0)) == Kind(128, 128, 1, ATTENTION_GROUPS, items=128)
    assert _kind(kinds, *base, (100, 0, 20, 1)) == Kind(128, 128, 1, ATTENTION_GROUPS, blocks=15)
    assert _kind(kinds, *base, (5, 0, 8, 0b1000), (100, 0, 20, 1)) == Kind(128, 128, 1, ALL_GROUPS, 32, 15)


def test_items_of_blocks_count_by_their_highest_ranks() -> None:
    assert _kind(_kinds(), (900, 0, 64, 1)) == Kind(1024, SEATS, 1, ATTENTION_GROUPS, blocks=15)
    assert _kind(_kinds(max_rank=256), (900, 0, 256, 1)) == Kind(1024, SEATS, 1, ATTENTION_GROUPS, 0, 15, 4)
    assert _kinds(max_rank=16).tile.ranks == 16


def test_few_long_decodes_are_cut_into_runs() -> None:
    kinds = _kinds()
    assert _kind(kinds, (1, 600, 0, 0), (90, 0, 0, 0)) == Kind(128, 16, 3)
    assert _kind(kinds, *[(1, 600, 0, 0)] * 17, (90, 0, 0, 0)) == Kind(128, 128, 3)


def test_no_graph_has_room_for_too_much_of_anything() -> None:
    kinds = _kinds()
    assert _kind(kinds, (LADDER[-1], 0, 0, 0)) is not None
    assert _kind(kinds, (LADDER[-1], 0, 0, 0), (1, 5, 0, 0)) is None
    assert _kind(kinds, *[(2, 0, 0, 0)] * MOST_PROMPTS) is not None
    assert _kind(kinds, *[(2, 0, 0, 0)] * (MOST_PROMPTS + 1)) is None
    assert _kind(kinds, *[(1, 9, 0, 0)] * SEATS, (2, 0, 0, 0)) is None
    assert _kind(kinds, *[(1, 9, 16 * ITEMS[-1] // 128 + 1, 1)] * 128, (2, 0, 0, 0)) is None
    assert _kind(_kinds(max_tokens=64), (65, 0, 0, 0)) is None


def test_one_room_for_items_serves_all_steps_where_it_costs_nothing() -> None:
    kinds = _kinds(items_are_free=True)
    found = {_kind(kinds, *[(1, 40, 64, 1)] * n, (300, 0, 0, 0)) for n in (1, 9, 20)}
    assert found == {Kind(320, SEATS, 1, ATTENTION_GROUPS, items=4 * SEATS)}


@pytest.mark.parametrize("items_are_free", [False, True])
def test_prompts_of_a_few_rows_each_may_have_more_items_than_there_are_sequences(*, items_are_free: bool) -> None:
    kinds = _kinds(max_rank=16, sequences=64, items_are_free=items_are_free)
    decodes, tails = [(1, 40, 16, 1)] * 32, [(7, 64, 16, 1)] * MOST_PROMPTS
    assert _kind(kinds, *decodes, *tails) == Kind(256, 64, 1, ATTENTION_GROUPS, items=256)


def test_idle_rows_bring_a_graph_sooner() -> None:
    wanted = Kind(576, SEATS, 1)
    assert lacking(wanted, Kind(640, SEATS, 1, ATTENTION_GROUPS, 32)) == 1
    assert lacking(wanted, Kind(1024, SEATS, 1)) == 1 + 448 // 128


def test_a_kind_is_captured_once_and_has_its_own_graph_from_then_on() -> None:
    """Though one with fewer runs may serve it too, and comes before it by cost."""
    wanted, graphs = Kind(64, 64, 3), PromptGraphs.__new__(PromptGraphs)
    graph: Any = object()
    graphs._graphs, graphs._missed, graphs._since_capture = {Kind(64, 64, 1): graph}, Counter(), 0
    captured: list[Kind] = []

    def capture(kind: Kind) -> None:
        captured.append(kind)
        graphs._graphs[kind] = graph

    graphs._capture = capture  # type: ignore[method-assign]
    served = [graphs._serving(wanted) for _ in range(4 * CAPTURES_APART)]
    assert captured == [wanted]
    assert served == [Kind(64, 64, 1)] * (CAPTURES_APART - 1) + [wanted] * (3 * CAPTURES_APART + 1)


def test_few_rows_of_what_is_captured_at_first_are_idle() -> None:
    common = list(_kinds(items_are_free=True).common())
    for size, groups in product(LADDER, (ATTENTION_GROUPS, ALL_GROUPS)):
        found = best(common, Kind(size, min(size, SEATS), 1, groups, 4 * SEATS, BLOCKS[-1]))
        assert found is not None
        assert found.rows - size <= 512


@pytest.mark.parametrize("items_are_free", [False, True])
def test_what_is_captured_at_first_covers_every_step(*, items_are_free: bool) -> None:
    kinds, rng = _kinds(items_are_free=items_are_free), random.Random(3)
    common = list(kinds.common())
    assert len(set(common)) == len(common)
    assert [kind.rows for kind in common] == sorted((kind.rows for kind in common), reverse=True)
    for _ in range(60):
        sequences = [
            (1, rng.randint(1, 400), rng.choice((0, 8, 64)), rng.choice((1, ALL_GROUPS)))
            for _ in range(rng.randint(1, 200))
        ]
        sequences += [(rng.randint(2, 300), 0, rng.choice((0, 8, 64)), 1) for _ in range(rng.randint(1, 4))]
        wanted = _kind(kinds, *sequences)
        assert wanted is not None
        found = best(common, wanted)
        assert found is not None
        assert found.covers(wanted)
        assert wanted.covers(wanted)
        if not wanted.groups:
            assert found == wanted
        assert best([*common, wanted], wanted) == wanted


def test_a_graph_serves_no_step_that_it_lacks_something_for() -> None:
    kind = Kind(512, 256, 1, ATTENTION_GROUPS, 128, 15, 2)
    assert kind.covers(Kind(64, 16, 1))
    assert kind.covers(Kind(64, 16, 3))
    assert not kind._replace(splits=2).covers(Kind(64, 16, 1))
    for name, value in {"rows": 576, "decodes": 300, "groups": ALL_GROUPS, "items": 256, "blocks": 32,
                        "factor": 4}.items():  # fmt: skip
        assert not kind.covers(kind._replace(**{name: value}))
    assert best([kind], Kind(576, 256, 1)) is None
