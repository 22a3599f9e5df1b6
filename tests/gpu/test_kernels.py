"""The kernels on a real GPU against float64: real sizes, and CUDA graphs that outlive their first adapters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.attention.triton_decode import choose_splits, decode_attention
from stencilpress.kernels.attention.triton_pages import KVLayout
from stencilpress.kernels.attention.triton_prefill import ChunkRows, plan_pieces, prefill_attention
from stencilpress.kernels.linear.triton_linear import LinearScratch, choose_cut, linear_few_rows
from stencilpress.kernels.norm.triton_rms_norm import rms_norm
from stencilpress.kernels.sgmv import cuda_sgmv
from stencilpress.kernels.sgmv.mailboxes import EMPTY
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_sgmv import choose_cut as choose_sgmv_cut
from stencilpress.kernels.sgmv.triton_sgmv import sgmv
from stencilpress.kernels.sgmv.triton_work import (
    AdapterRows,
    SgmvWork,
    Tile,
    choose_tile,
    listed_rows,
    plan_work,
    resolve,
)
from stencilpress.kernels.triton_launch import INTERPRETED
from tests.unit.adapter_pool import PoolBuilder, PooledAdapter, Shape, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU"),
]
SIZES = {"llama": [Shape(4096, (4096, 1024, 1024)), Shape(1024, (4096,))], "small": [Shape(576, (576, 192, 192))]}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
Rows = list[tuple[int, int, PooledAdapter | None]]


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(torch.linalg.norm(got.double() - want) / torch.linalg.norm(want))


def _segments(rows: Rows) -> list[AdapterRows]:
    return [AdapterRows(start, count, a.table, a.rank) for start, count, a in rows if a]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("popularity", ["identical", "distinct", "skewed"])
def test_sgmv(size: str, dtype: torch.dtype, popularity: str) -> None:
    builder = PoolBuilder(SIZES[size], 1, 1 << 25, dtype, seed=3, device="cuda")
    ranks = (1, 3, 8, 16, 24, 64, 96)
    adapters = [builder.add([r] * len(builder.groups), [7, 1][: len(builder.groups)]) for r in ranks]
    counts = {"identical": [70], "distinct": [1] * 7, "skewed": [90, 1, 0, 3, 20, 1, 5]}[popularity]
    rows: Rows = [(0, 2, None)]
    for count, adapter in zip(counts, adapters, strict=False):
        rows.append((rows[-1][0] + rows[-1][1], count, adapter))
    total = rows[-1][0] + rows[-1][1]
    segments = [s for s in _segments(rows) if s.rows]
    for tile in {choose_tile(segments), Tile(1, 16), Tile(16, 16), Tile(64, 16), Tile(64, 64)}:
        work = SgmvWork.of(plan_work(segments, tile), len(builder.groups), torch.device("cuda"))
        resolve(work, builder.pool)
        for entry, group in enumerate(builder.groups):
            x = torch.randn(total, group.inputs, device="cuda").to(dtype)
            y = torch.randn(total, sum(group.outputs), device="cuda").to(dtype)
            want = expected(y, x, rows, entry, group)
            again = y.clone()
            sgmv(y, x, builder.pool, work, entry, GroupShape(group.inputs, group.outputs))
            assert _relative(y, want) < TOLERANCE[dtype]
            assert torch.equal(y[:2].double(), want[:2])
            sgmv(again, x, builder.pool, work, entry, GroupShape(group.inputs, group.outputs))
            assert torch.equal(y, again)


hopper_only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU"
)


@hopper_only
@pytest.mark.parametrize("shape", [Shape(4096, (4096, 1024, 1024)), Shape(14336, (4096,)), Shape(4104, (2056, 72))])
def test_decodes_in_cuda(shape: Shape) -> None:
    """Ragged ends, ranks that fill no item, projections left alone, slots that hold no row, a list that is not full;
    more units than programs."""
    builder = PoolBuilder([shape], 1, 1 << 25, torch.bfloat16, seed=6, device="cuda")
    masks = {3: (7, 5, 2), 2: (3, 2), 1: (1,)}[len(shape.outputs)]
    adapters = [builder.add([rank], [masks[i % len(masks)]]) for i, rank in enumerate((1, 8, 16, 24, 40, 64))]
    rows: Rows = [(0, 2, None), *((2 + i, 1, adapters[i % 6]) for i in range(150)), (152, 1, None)]
    plan = plan_work(_segments(rows), Tile(1, 16))
    group = GroupShape(shape.inputs, shape.outputs)
    work = SgmvWork.allocate(plan.tile, len(plan.blocks_B4) + 1, len(plan.items_W4) + 3, 1, torch.device("cuda"))
    work.load(plan)
    resolve(work, builder.pool)
    cut = choose_sgmv_cut(group, work.tile, work.blocks_B4.shape[0], work.max_items)
    x = torch.randn(153, shape.inputs, device="cuda").bfloat16()
    y = torch.randn(153, sum(shape.outputs), device="cuda").bfloat16()
    assert cuda_sgmv.rows_serve(y, x, work, group)
    want, again, triton_y = expected(y, x, rows, 0, shape), y.clone(), y.clone()
    sgmv(y, x, builder.pool, work, 0, group)
    sgmv(again, x, builder.pool, work, 0, group)
    sgmv(triton_y, x, builder.pool, work, 0, group, cut)
    assert _relative(y, want) < TOLERANCE[torch.bfloat16]
    assert _relative(y, triton_y.double()) < TOLERANCE[torch.bfloat16]
    assert torch.equal(y, again)
    assert torch.equal(y[:2].double(), want[:2])
    assert (work.mailboxes.words(1) == EMPTY).all()


@hopper_only
def test_shares_that_the_base_is_added_to() -> None:
    """They replace what was there; rows and projections without a share are zero. Ranks differ from group to group, so
    that some items have no slice in one of them."""
    shapes = [Shape(4096, (4096, 1024, 1024)), Shape(4096, (4096,))]
    builder = PoolBuilder(shapes, 1, 1 << 25, torch.bfloat16, seed=7, device="cuda")
    adapters = [builder.add(ranks, masks) for ranks, masks in (([8, 40], [7, 1]), ([40, 8], [5, 1]), ([16, 1], [2, 0]))]
    rows: Rows = [(0, 3, None), *((3 + i, 1, adapters[i % 3]) for i in range(60)), (63, 500, None)]
    plan = plan_work(_segments(rows), Tile(1, 16))
    work = SgmvWork.allocate(plan.tile, len(plan.blocks_B4) + 5, len(plan.items_W4) + 9, 2, torch.device("cuda"))
    work.load(plan)
    resolve(work, builder.pool)
    for entry, shape in enumerate(shapes):
        group = GroupShape(shape.inputs, shape.outputs)
        x = torch.randn(563, shape.inputs, device="cuda").bfloat16()
        y = torch.full((563, sum(shape.outputs)), torch.nan, dtype=torch.bfloat16, device="cuda")
        assert cuda_sgmv.rows_serve(y, x, work, group)
        want = expected(torch.zeros_like(y), x, rows, entry, shape)
        cuda_sgmv.rows(y, x, builder.pool, work, entry, group, listed_rows(work, len(y)))
        assert _relative(y, want) < TOLERANCE[torch.bfloat16]
        assert torch.equal(y == 0, want == 0)
        assert (work.mailboxes.words(1) == EMPTY).all()


@hopper_only
def test_a_list_of_nothing_leaves_zeros_to_add_to() -> None:
    shape = Shape(4096, (4096, 1024, 1024))
    builder = PoolBuilder([shape], 1, 1 << 24, torch.bfloat16, seed=12, device="cuda")
    work = SgmvWork.allocate(Tile(1, 16), 64, 64, 1, torch.device("cuda"))
    resolve(work, builder.pool)
    x = torch.randn(64, shape.inputs, device="cuda").bfloat16()
    y = torch.full((64, sum(shape.outputs)), torch.nan, dtype=torch.bfloat16, device="cuda")
    group = GroupShape(shape.inputs, shape.outputs)
    cuda_sgmv.rows(y, x, builder.pool, work, 0, group, listed_rows(work, len(y)))
    assert (y == 0).all()


@hopper_only
def test_sums_that_are_no_numbers_reach_their_readers() -> None:
    shape = Shape(4096, (4096, 1024, 1024))
    builder = PoolBuilder([shape], 1, 1 << 24, torch.bfloat16, seed=8, device="cuda")
    rows: Rows = [(i, 1, builder.add([16], [7])) for i in range(24)]
    work = SgmvWork.of(plan_work(_segments(rows), Tile(1, 16)), 1, torch.device("cuda"))
    resolve(work, builder.pool)
    x, y = (torch.randn(24, n, device="cuda").bfloat16() for n in (4096, 6144))
    x[3], x[4, 5] = torch.nan, torch.inf
    x.view(torch.int16)[5] = -1  # the bits of an empty word
    group = GroupShape(4096, (4096, 1024, 1024))
    assert cuda_sgmv.rows_serve(y, x, work, group)
    sgmv(y, x, builder.pool, work, 0, group)
    assert y[3].isnan().all()
    assert not y[4].isfinite().any()
    assert y[5].isnan().all()
    assert y[[*range(3), *range(6, 24)]].isfinite().all()


@hopper_only
@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("shape", [Shape(4096, (4096, 1024, 1024)), Shape(1032, (520, 72))])
def test_prompts_in_cuda(ranks: int, shape: Shape) -> None:
    builder = PoolBuilder([shape], 1, 1 << 25, torch.bfloat16, seed=9, device="cuda")
    masks = (7, 5) if len(shape.outputs) == 3 else (3, 2)
    adapters = [builder.add([n], [masks[n % 2]]) for n in (1, 8, 15, 16, 33, 64) if n <= ranks]
    rows: Rows = [(0, 3, None)]
    for i in range(8):
        rows.append((rows[-1][0] + rows[-1][1], 150 + i, adapters[i % len(adapters)]))
    total = rows[-1][0] + rows[-1][1]
    work = SgmvWork.of(plan_work(_segments(rows), Tile(64, ranks)), 1, torch.device("cuda"))
    resolve(work, builder.pool)
    x = torch.randn(total, shape.inputs, device="cuda").bfloat16()
    y = torch.randn(total, sum(shape.outputs), device="cuda").bfloat16()
    group = GroupShape(shape.inputs, shape.outputs)
    assert cuda_sgmv.expand_serves(y, work, group)
    want, again = expected(y, x, rows, 0, shape), y.clone()
    sgmv(y, x, builder.pool, work, 0, group)
    sgmv(again, x, builder.pool, work, 0, group)
    assert _relative(y, want) < TOLERANCE[torch.bfloat16]
    assert torch.equal(y, again)
    assert torch.equal(y[:3].double(), want[:3])


def test_graph_serves_adapters_that_come_after_its_capture() -> None:
    shape = Shape(1024, (1024, 256, 256))
    builder = PoolBuilder([shape], 1, 1 << 24, torch.bfloat16, seed=4, device="cuda")
    adapters = [builder.add([rank], [mask]) for rank, mask in ((8, 7), (64, 5), (16, 2), (40, 7))]
    work = SgmvWork.allocate(Tile(1, 16), 8, 32, 1, torch.device("cuda"))
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    y = torch.zeros(8, 1536, device="cuda").bfloat16()

    def step() -> None:
        resolve(work, builder.pool)
        y.zero_()
        sgmv(y, x, builder.pool, work, 0, GroupShape(1024, (1024, 256, 256)))

    first: Rows = [(i, 1, adapters[0]) for i in range(8)]
    work.load(plan_work(_segments(first), work.tile))
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(6):
        draw = torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
        rows: Rows = [(i, 1, adapters[a] if a < 4 else None) for i, a in enumerate(draw)]
        work.load(plan_work(_segments(rows), work.tile))
        x.normal_()
        graph.replay()
        want = expected(torch.zeros_like(y), x, rows, 0, shape)
        assert _relative(y, want) < 1e-2
        assert not work.arrived_WN.any()
        assert not work.ready_N.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 27, 32])
def test_linear_of_few_rows(rows: int, dtype: torch.dtype) -> None:
    scratch = LinearScratch(torch.device("cuda"))
    for inputs, outputs in ((4096, 6144), (4096, 4096), (1024, 28672), (14336, 4096), (3584, 4608)):
        x = torch.randn(rows, 2 * inputs, device="cuda").to(dtype)[:, :inputs]
        weight, bias = (
            torch.randn(outputs, inputs, device="cuda").to(dtype),
            torch.randn(outputs, device="cuda").to(dtype),
        )
        cut = choose_cut(x, weight)
        assert cut is not None
        want = x.double() @ weight.double().T
        got = linear_few_rows(x, weight, bias, scratch, cut)
        assert _relative(got, want + bias.double()) < TOLERANCE[dtype]
        assert torch.equal(got, linear_few_rows(x, weight, bias, scratch, cut))
        assert _relative(linear_few_rows(x, weight, None, scratch, cut), want) < TOLERANCE[dtype]
    assert not scratch.arrived_N.any()


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_adapters_beside_the_product_they_add_to(rows: int) -> None:
    """The segmented product starts while the base's runs; x is another kernel's result each time."""
    shape, weight = Shape(1024, (1024, 256, 256)), torch.randn(1536, 1024, device="cuda").bfloat16()
    builder = PoolBuilder([shape], 1, 1 << 25, torch.bfloat16, seed=5, device="cuda")
    adapters = [builder.add([(8, 16, 40)[i % 3]], [7]) for i in range(rows)]
    placed: Rows = [(i, 1, adapter) for i, adapter in enumerate(adapters)]
    work = SgmvWork.of(plan_work(_segments(placed), Tile(1, 16)), 1, torch.device("cuda"))
    scratch = LinearScratch(torch.device("cuda"))
    first, ones = torch.randn(rows, 1024, device="cuda").bfloat16(), torch.ones(1024, device="cuda").bfloat16()
    cut = choose_cut(first, weight)
    assert cut is not None
    xs, ys = [], []

    def step() -> None:
        x = first
        for _ in range(40):
            x = rms_norm(x, ones, 1e-5)
            y = linear_few_rows(x, weight, None, scratch, cut, for_next=True)
            sgmv(y, x, builder.pool, work, 0, GroupShape(1024, (1024, 256, 256)), x_done=True)
            xs.append(x)
            ys.append(y)
            x = y[:, :1024]

    resolve(work, builder.pool)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    for x, y, x_again, y_again in zip(xs[:40], ys[:40], xs[40:], ys[40:], strict=True):
        base = (x.double() @ weight.double().T).bfloat16()
        assert _relative(y, expected(base, x, placed, 0, shape)) < 1e-2
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)


def _cache(lengths: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, KVLayout, list[torch.Tensor]]:
    """Pool, page tables, layout, and K and V (2, tokens, heads, dim) of layer 1 of each sequence."""
    layers, page, heads, dim = 2, 16, 2, 128
    kv = KVLayout(page, layers * 2 * page * heads * dim, heads, dim)
    counts = [-(-n // page) for n in lengths]
    pool = torch.randn(sum(counts) * kv.page_elems, device="cuda").to(dtype)
    order = torch.randperm(sum(counts), device="cuda")
    pages = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    known = []
    for s, n in enumerate(lengths):
        mine, order = order[: counts[s]], order[counts[s] :]
        pages[s, : counts[s]] = mine.int()
        view = pool.view(-1, layers, 2, page, heads, dim)
        view[mine[-1], :, :, (n - 1) % page + 1 :] = float("nan")
        known.append(view[mine, 1].transpose(0, 1).reshape(2, -1, heads, dim)[:, :n].double())
    return pool, pages, kv, known


def _attend(q: torch.Tensor, known: torch.Tensor, seen: int) -> torch.Tensor:
    k, v = known[:, :seen].repeat_interleave(q.shape[0] // known.shape[2], 2)
    weights = torch.softmax(torch.einsum("hd,thd->ht", q.double(), k) * 0.1, dim=1)
    return torch.einsum("ht,thd->hd", weights, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_attention(dtype: torch.dtype) -> None:
    lengths = [1, 15, 16, 17, 700, 4000]
    pool, pages, kv, known = _cache(lengths, dtype)
    q = torch.randn(6, 8, 128, device="cuda").to(dtype)
    want = torch.stack([_attend(q[s], known[s], n) for s, n in enumerate(lengths)])
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for splits in {1, 7, choose_splits(6, 2, 4000, q.device)}:
        got = decode_attention(q, pool, pages, device_lengths, 1, kv, splits, 0.1)
        assert _relative(got, want) < TOLERANCE[dtype]
    many = [tensor.repeat(70, *[1] * (tensor.dim() - 1)) for tensor in (q, pages, device_lengths, want)]
    got = decode_attention(many[0], pool, many[1], many[2], 1, kv, 1, 0.1)
    assert _relative(got, many[3]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_attention(dtype: torch.dtype) -> None:
    pool, pages, kv, known = _cache([300, 1000, 40], dtype)
    chunks = [ChunkRows(0, 300, 0, 0), ChunkRows(300, 77, 923, 1), ChunkRows(377, 1, 39, 2)]
    q = torch.randn(378, 8, 128, device="cuda").to(dtype)
    out = torch.full_like(q, float("nan"))
    pieces = torch.from_numpy(plan_pieces(chunks, 4)).cuda()
    prefill_attention(q, pool, pages, pieces, out, 1, kv, 0.1)
    for chunk in chunks:
        rows = range(chunk.row_start, chunk.row_start + chunk.rows)
        want = torch.stack(
            [_attend(q[t], known[chunk.sequence], chunk.position + t - chunk.row_start + 1) for t in rows]
        )
        assert _relative(out[rows.start : rows.stop], want) < TOLERANCE[dtype]
