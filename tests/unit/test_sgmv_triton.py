"""The segmented product against float64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.sgmv.reference import sgmv_reference
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_gate import sgmv_silu_mul
from stencilpress.kernels.sgmv.triton_sgmv import sgmv
from stencilpress.kernels.sgmv.triton_work import (
    AdapterRows,
    SgmvWork,
    Tile,
    apart,
    choose_tile,
    listed_rows,
    plan_work,
    resolve,
)
from stencilpress.kernels.silu.triton_silu_mul import silu_mul
from tests.unit.adapter_pool import PoolBuilder, PooledAdapter, Shape, expected

GROUPS = [Shape(96, (72, 40, 40)), Shape(72, (96,))]
QKV, ONE = 0, 1
# Triton 3.6's interpreter turns one-element arrays into loop bounds
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
Rows = list[tuple[int, int, PooledAdapter | None]]


def _run(builder: PoolBuilder, rows: Rows, tile: Tile, entry: int, spare: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shape = builder.groups[entry % len(builder.groups)]
    total = max(start + count for start, count, _ in rows)
    x = torch.randn(total, shape.inputs, generator=builder.random).to(builder.dtype)
    y = torch.randn(total, sum(shape.outputs), generator=builder.random).to(builder.dtype)
    want = expected(y, x, rows, entry, shape)
    plan = plan_work([AdapterRows(s, n, a.table, a.rank) for s, n, a in rows if a], tile)
    entries = builder.layers * len(builder.groups)
    work = SgmvWork.allocate(
        tile, len(plan.blocks_B4) + spare, len(plan.items_W4) + spare, entries, torch.device("cpu")
    )
    work.load(plan)
    resolve(work, builder.pool)
    sgmv(y, x, builder.pool, work, entry, GroupShape(shape.inputs, shape.outputs))
    return y, want


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = torch.linalg.norm(got.double() - want) / torch.linalg.norm(want)
    assert error < (1e-2 if got.dtype == torch.bfloat16 else 1e-5), float(error)


def _builder(dtype: torch.dtype = torch.float32, layers: int = 1, elems: int = 1 << 18) -> PoolBuilder:
    return PoolBuilder(GROUPS, layers, elems, dtype, seed=7)


@pytest.mark.parametrize("rank", [1, 3, 16, 24, 96, 193, 256])
@pytest.mark.parametrize("tile", [Tile(1, 16), Tile(16, 32), Tile(64, 64)])
def test_rank(rank: int, tile: Tile) -> None:
    builder = _builder()
    adapter, other = builder.add([rank, rank], [7, 1]), builder.add([8, 8], [7, 1])
    _close(*_run(builder, [(0, 1, adapter), (1, 1, None), (2, 2, other)], tile, QKV))


@pytest.mark.parametrize("mask", range(1, 8))
def test_any_set_of_projections(mask: int) -> None:
    builder = _builder()
    adapter = builder.add([5, 5], [mask, 1])
    got, want = _run(builder, [(0, 1, None), (1, 2, adapter)], Tile(1, 16), QKV)
    _close(got, want)


@pytest.mark.parametrize("tile", [Tile(1, 16), Tile(16, 16)])
def test_group_left_alone_and_ranks_that_differ(tile: Tile) -> None:
    builder = _builder(layers=2)
    partly, wide = builder.add([4, 20], [5, 0]), builder.add([40, 3], [7, 1])
    rows: Rows = [(0, 1, partly), (1, 1, wide), (2, 1, None)]
    for entry in range(4):
        _close(*_run(builder, rows, tile, entry, spare=3))


def test_rows_beside_the_product_that_they_add_to() -> None:
    builder = _builder()
    adapters = [builder.add([rank, rank], [mask, 1]) for rank, mask in ((5, 7), (40, 5))]
    x, y = (torch.randn(3, n, generator=builder.random) for n in (96, 152))
    rows: Rows = [(0, 1, adapters[0]), (1, 1, None), (2, 1, adapters[1])]
    want = expected(y, x, rows, QKV, GROUPS[QKV])
    plan = plan_work([AdapterRows(s, n, a.table, a.rank) for s, n, a in rows if a], Tile(1, 16))
    work = SgmvWork.of(plan, len(GROUPS), torch.device("cpu"))
    resolve(work, builder.pool)
    sgmv(y, x, builder.pool, work, QKV, GroupShape(96, (72, 40, 40)), x_done=True)
    _close(y, want)
    assert not work.arrived_WN.any()
    assert not work.ready_N.any()


def test_agrees_with_the_reference_on_the_same_tables() -> None:
    builder = _builder(layers=2)
    adapters = [builder.add([6, 2], [5, 1]), builder.add([18, 1], [7, 0])]
    plan = plan_work([AdapterRows(i, 1, a.table, a.rank) for i, a in enumerate(adapters)], Tile(1, 16))
    work = SgmvWork.of(plan, 4, torch.device("cpu"))
    resolve(work, builder.pool)
    shapes = [GroupShape(s.inputs, s.outputs) for s in GROUPS]
    tables = [builder.pool.view(torch.int64)[a.table :].numpy() for a in adapters]
    for entry in range(4):
        shape = shapes[entry % 2]
        x, y = torch.randn(2, shape.in_features), torch.zeros(2, sum(shape.out_features))
        want = y.clone()
        sgmv_reference(want, x, builder.pool, [0, 1, 2], tables, shapes, 2, (entry // 2, entry % 2))
        sgmv(y, x, builder.pool, work, entry, shape)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


def test_many_rows_of_one_adapter_beside_base_rows() -> None:
    builder = _builder(torch.bfloat16)
    adapter, other = builder.add([8, 8], [7, 1]), builder.add([33, 2], [3, 1])
    rows: Rows = [(0, 2, None), (2, 37, adapter), (39, 1, other), (40, 17, adapter), (57, 1, None)]
    got, want = _run(builder, rows, Tile(16, 16), QKV)
    _close(got, want)
    assert torch.equal(got[[0, 1, 57]].double(), want[[0, 1, 57]])


def test_bf16_rows() -> None:
    builder = _builder(torch.bfloat16)
    rows: Rows = [(i, 1, builder.add([rank, rank], [7, 1])) for i, rank in enumerate((8, 16, 32, 64))]
    _close(*_run(builder, rows, Tile(1, 32), ONE))


def test_odd_dimensions() -> None:
    builder = PoolBuilder([Shape(37, (5, 19))], 1, 1 << 14, torch.float32, seed=3)
    rows: Rows = [(0, 1, builder.add([3], [3])), (1, 3, builder.add([2], [2]))]
    _close(*_run(builder, rows, Tile(1, 16), 0))
    _close(*_run(builder, rows, Tile(16, 16), 0))


def test_result_does_not_depend_on_neighbours() -> None:
    builder = _builder(torch.bfloat16)
    adapter, other = builder.add([8, 8], [7, 1]), builder.add([24, 24], [7, 1])
    alone, _ = _run(builder, [(0, 1, adapter)], Tile(1, 16), QKV)
    builder.random.manual_seed(11)
    first, _ = _run(builder, [(0, 1, adapter), (1, 1, other)], Tile(1, 16), QKV)
    builder.random.manual_seed(11)
    second, _ = _run(builder, [(0, 1, adapter), (1, 1, None)], Tile(1, 16), QKV)
    assert torch.equal(first[0], second[0])
    assert alone.shape[0] == 1


def test_empty_plan_touches_nothing() -> None:
    builder = _builder()
    got, want = _run(builder, [(0, 3, None)], Tile(1, 16), QKV)
    assert torch.equal(got.double(), want)


def _gated(builder: PoolBuilder, rows: Rows, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate in one with the expand, and after it."""
    inputs, inner = builder.groups[0].inputs, builder.groups[0].outputs[0]
    shape, total = GroupShape(inputs, (inner, inner)), max(start + count for start, count, _ in rows)
    x = torch.randn(total, inputs, generator=builder.random).to(builder.dtype)
    y = torch.randn(total, 2 * inner, generator=builder.random).to(builder.dtype)
    plan = plan_work([AdapterRows(s, n, a.table, a.rank) for s, n, a in rows if a], tile)
    work = SgmvWork.allocate(tile, len(plan.blocks_B4) + 3, len(plan.items_W4) + 5, 1, torch.device("cpu"))
    work.load(plan)
    resolve(work, builder.pool)
    apart = y.clone()
    sgmv(apart, x, builder.pool, work, 0, shape)
    got = sgmv_silu_mul(y, x, builder.pool, work, 0, shape, listed_rows(work, total))
    return got, silu_mul(apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tile", "ranks"), [(Tile(16, 16), (5, 16)), (Tile(64, 16), (40, 9))])
def test_gate_in_one_with_the_expand(tile: Tile, ranks: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of an adapter of both projections, of one of either, of none. The two are cut into other tiles, whose sums
    some processors' BLAS adds in another order."""
    builder = PoolBuilder([Shape(96, (328, 328))], 1, 1 << 19, dtype, seed=5)
    both, gate, up = (builder.add([rank], [mask]) for rank, mask in zip((*ranks, 16), (3, 1, 2), strict=True))
    rows: Rows = [(0, 2, None), (2, 37, both), (39, 9, gate), (48, 3, None), (51, 70, up), (121, 1, None)]
    got, want = _gated(builder, rows, tile)
    torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    alone = [row for start, count, adapter in rows if adapter is None for row in range(start, start + count)]
    assert torch.equal(got[alone], want[alone])


def test_gate_of_an_adapter_that_leaves_the_projections_alone() -> None:
    """Its scales there are anything."""
    builder = PoolBuilder([Shape(96, (72, 72))], 1, 1 << 18, torch.float32, seed=5)
    bare, other = builder.add([4], [0]), builder.add([4], [3])
    words = builder.pool.view(torch.int64)
    words[bare.table + 2] = -1  # NaN twice
    got, want = _gated(builder, [(0, 20, bare), (20, 20, other)], Tile(16, 16))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert torch.equal(got[:20], want[:20])
    assert torch.isfinite(got).all()


def test_gate_without_a_row_in_blocks() -> None:
    builder = PoolBuilder([Shape(96, (72, 72))], 1, 1 << 18, torch.float32, seed=5)
    got, want = _gated(builder, [(0, 21, None)], Tile(16, 16))
    assert torch.equal(got, want)


def test_plan_covers_each_row_and_rank_once() -> None:
    segments = [AdapterRows(2, 33, 100, 40), AdapterRows(35, 1, 200, 7), AdapterRows(40, 16, 300, 16)]
    plan = plan_work(segments, Tile(16, 16))
    seen = {
        (row, table, rank + first)
        for (start, rows, first, _block), table in zip(plan.items_W4.tolist(), plan.tables_W.tolist(), strict=True)
        for row in range(start, start + rows)
        for rank in range(16)
    }
    assert {
        (row, s.table, r) for s in segments for row in range(s.row_start, s.row_start + s.rows) for r in range(s.rank)
    } <= seen
    assert len(seen) == sum(s.rows * -(-s.rank // 16) * 16 for s in segments)
    for block, (row, _, items, extra) in enumerate(plan.blocks_B4.tolist()):
        of_block = [block, *range(extra, extra + items - 1)]
        assert [plan.items_W4[i, 2] for i in of_block] == [16 * n for n in range(items)]
        assert {int(plan.items_W4[i, 0]) for i in of_block} == {row}


def test_plan_takes_the_longest_first() -> None:
    segments = [AdapterRows(0, 20, 0, 8), AdapterRows(20, 20, 0, 64), AdapterRows(40, 20, 0, 8)]
    assert plan_work(segments, Tile(16, 64)).blocks_B4[:, 0].tolist() == [20, 36, 0, 16, 40, 56]
    assert plan_work(segments, Tile(1, 16)).blocks_B4[-20:, 0].tolist() == list(range(20, 40))


def test_tile_follows_rows_and_ranks() -> None:
    assert choose_tile([AdapterRows(0, 1, 0, 16)]) == (1, 16)
    assert choose_tile([AdapterRows(0, 20, 0, 16), AdapterRows(20, 16, 0, 16)]).rows == 16
    assert choose_tile([AdapterRows(0, 128, 0, 64)]).rows == 64
    assert choose_tile([]).rows == 1


@pytest.mark.parametrize(("rows", "rank"), [(32, 16), (16, 17), (8, 64), (2, 256)])
def test_few_rows_and_ranks_go_row_by_row_whatever_adapter_they_are_of(rows: int, rank: int) -> None:
    assert choose_tile([AdapterRows(0, rows, 0, rank)]).rows == 1
    assert choose_tile([AdapterRows(0, rows + 8, 0, rank), AdapterRows(rows + 8, 24, 0, rank)]).rows > 1


def test_tile_of_a_crowd_of_adapters_with_few_rows_each() -> None:
    def rows_of_tile(adapters: int, rows: int, rank: int) -> int:
        return choose_tile([AdapterRows(i * rows, rows, 0, rank) for i in range(adapters)]).rows

    assert [rows_of_tile(256 // rows, rows, 16) for rows in (1, 2, 4)] == [1, 1, 16]
    assert [rows_of_tile(256 // rows, rows, 30) for rows in (1, 2, 4)] == [1, 16, 16]
    assert rows_of_tile(16, 4, 30) == 1


def test_adapters_of_few_rows_are_listed_apart() -> None:
    segments = [
        AdapterRows(0, 1, 0, 16),
        AdapterRows(1, 300, 0, 16),
        AdapterRows(301, 7, 9, 64),
        AdapterRows(308, 8, 9, 8),
    ]
    many, few = apart(segments)
    assert [segment.row_start for segment in many] == [1, 308]
    assert [segment.row_start for segment in few] == [0, 301]
    assert choose_tile(few).rows == 1 < choose_tile(many).rows


def test_plan_that_does_not_fit_is_refused() -> None:
    work = SgmvWork.allocate(Tile(1, 16), 1, 1, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="do not fit"):
        work.load(plan_work([AdapterRows(0, 2, 0, 16)], Tile(1, 16)))
    with pytest.raises(ValueError, match="tile"):
        work.load(plan_work([AdapterRows(0, 1, 0, 16)], Tile(16, 16)))


def test_shapes_are_checked() -> None:
    pool, x = torch.zeros(64), torch.zeros(2, 8)
    work = SgmvWork.allocate(Tile(1, 16), 2, 2, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="fit"):
        sgmv(torch.zeros(2, 9), x, pool, work, 0, GroupShape(8, (8,)))
    with pytest.raises(ValueError, match="dtype"):
        sgmv(torch.zeros(2, 8), x.half(), pool, work, 0, GroupShape(8, (8,)))
    with pytest.raises(ValueError, match="blocks of rows"):
        sgmv_silu_mul(torch.zeros(2, 16), x, pool, work, 0, GroupShape(8, (8, 8)), torch.zeros(2, dtype=torch.int32))
