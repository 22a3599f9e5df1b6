"""The segmented LoRA product, reference and batched form, against dense float64 products of the same matrices.

The pool is built by hand from the contract in kernels/sgmv, all NaN but for the slices: whatever is read beside
them, or written beside the rows and columns that an adapter owns, shows.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from stencilpress.kernels.numba_bits import elements
from stencilpress.kernels.sgmv.batched import Deltas, Piece
from stencilpress.kernels.sgmv.reference import sgmv_reference
from stencilpress.kernels.sgmv.table import GroupShape, Words
from stencilpress.kernels.sgmv.views import AdapterView, adapter_view

SHAPES = (GroupShape(40, (40, 24, 24)), GroupShape(40, (40,)), GroupShape(40, (72, 72)), GroupShape(72, (40,)))
ODD_SHAPES = (GroupShape(13, (13, 7, 7)), GroupShape(13, (11,)), GroupShape(9, (17, 17)), GroupShape(17, (13,)))
LAYERS = 2
PAGE_ELEMS = 2048
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@dataclass
class _Pool:
    """Pages handed out in random order, adapters laid into them slice by slice."""

    dtype: torch.dtype
    rng: random.Random
    pages: int = 1200
    flat: Tensor = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.flat = torch.full((self.pages * PAGE_ELEMS,), torch.nan, dtype=self.dtype)
        self.free = self.rng.sample(range(self.pages), self.pages)


@dataclass
class _Adapter:
    """``matrices[entry][projection]`` is (scale, A (R, D), B (R, O)) in float64, as the pool has them."""

    table: Words
    view: AdapterView
    matrices: list[dict[int, tuple[float, Tensor, Tensor]]]


def _adapter(pool: _Pool, shapes: Sequence[GroupShape], rank: int, every: bool = True) -> _Adapter:
    """A random adapter of one rank; without ``every``, of random projections of random (layer, group)s."""
    rng = pool.rng
    entries: list[bytes] = []
    addresses: list[int] = []
    matrices: list[dict[int, tuple[float, Tensor, Tensor]]] = []
    used, page = PAGE_ELEMS, 0
    for entry in range(LAYERS * len(shapes)):
        shape = shapes[entry % len(shapes)]
        count = len(shape.out_features)
        present = [p for p in range(count) if every or rng.random() < 0.5]
        if not present:
            entries.append(struct.pack("<IIqfffI", 0, 0, 0, 0, 0, 0, 0))
            matrices.append({})
            continue
        scales = [rng.choice((0.5, 1.0, 2.0, -1.5)) for _ in present]
        a = [torch.randn(rank, shape.in_features).to(pool.dtype) for _ in present]
        b = [(torch.randn(rank, shape.out_features[p]) / rank).to(pool.dtype) for p in present]
        row = torch.cat((*a, *b), 1)
        slice_elems = -(-row.shape[1] // 8) * 8
        first = len(addresses)
        for j in range(rank):
            if used + slice_elems > PAGE_ELEMS:
                used, page = 0, pool.free.pop()
            start = page * PAGE_ELEMS + used
            pool.flat[start : start + row.shape[1]] = row[j]
            addresses.append(start)
            used += slice_elems
        by_projection = [scales[present.index(p)] if p in present else 0.0 for p in range(3)]
        mask = sum(1 << p for p in present)
        entries.append(struct.pack("<IIqfffI", rank, mask, first, *by_projection, slice_elems))
        matrices.append({p: (s, ap.double(), bp.double()) for p, s, ap, bp in zip(present, scales, a, b, strict=True)})
    table = np.concatenate((np.frombuffer(b"".join(entries), "<i8"), np.array(addresses, dtype="<i8")))
    return _Adapter(table, adapter_view(pool.flat, table, 0, LAYERS, shapes), matrices)


def _assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the dtype's tolerance of the largest value: half precision also rounds between the two products."""
    tolerance = TOLERANCE[got.dtype] * float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


@dataclass
class _Case:
    """Segments: ``bounds[s]`` to ``bounds[s + 1]`` are the rows of ``adapters[s]``, None for the base."""

    pool: _Pool
    shapes: Sequence[GroupShape]
    bounds: list[int]
    adapters: list[_Adapter | None]

    def check(self) -> None:
        """Every entry by both forms, each into a fresh y."""
        deltas = Deltas(
            [
                Piece(self.bounds[s], self.bounds[s + 1], adapter.view)
                for s, adapter in enumerate(self.adapters)
                if adapter is not None and self.bounds[s] < self.bounds[s + 1]
            ],
            elements(self.pool.flat),
            LAYERS,
            self.shapes,
        )
        tables = [adapter.table if adapter else None for adapter in self.adapters]
        for layer in range(LAYERS):
            for group, shape in enumerate(self.shapes):
                x = torch.randn(self.bounds[-1], shape.in_features).to(self.pool.dtype)
                y = torch.randn(self.bounds[-1], sum(shape.out_features)).to(self.pool.dtype)
                expected, touched = self._dense(y, x, layer * len(self.shapes) + group, shape)
                by_reference, by_views = y.clone(), y.clone()
                sgmv_reference(
                    by_reference, x, self.pool.flat, self.bounds, tables, self.shapes, LAYERS, (layer, group)
                )
                deltas.add(by_views, x, layer, group)
                for got in (by_reference, by_views):
                    _assert_close(got, expected)
                    assert torch.equal(got[~touched], y[~touched]), "wrote where no adapter is"

    def _dense(self, y: Tensor, x: Tensor, entry: int, shape: GroupShape) -> tuple[Tensor, Tensor]:
        expected, touched = y.double(), torch.zeros(y.shape, dtype=torch.bool)
        for s, adapter in enumerate(self.adapters):
            rows = slice(self.bounds[s], self.bounds[s + 1])
            for projection, (scale, a, b) in (adapter.matrices[entry] if adapter else {}).items():
                start = sum(shape.out_features[:projection])
                columns = slice(start, start + shape.out_features[projection])
                expected[rows, columns] += scale * (x[rows].double() @ a.T) @ b
                touched[rows, columns] = True
        return expected, touched


def _identical(rng: random.Random, rows: int) -> list[int]:
    return [rows]


def _distinct(rng: random.Random, rows: int) -> list[int]:
    return [1] * rows


def _uniform(rng: random.Random, rows: int) -> list[int]:
    return [4] * (rows // 4) + [rows % 4] * (rows % 4 > 0)


def _zipf(rng: random.Random, rows: int) -> list[int]:
    draws = rng.choices(range(8), [1 / (k + 1) for k in range(8)], k=rows)
    return [draws.count(k) for k in range(8)]  # some are empty


def _skewed(rng: random.Random, rows: int) -> list[int]:
    return [1, 1, 0, rows, 1, 2, 0, 1]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    torch.manual_seed(3)
    return random.Random(request.node.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("popularity", [_identical, _distinct, _uniform, _zipf, _skewed])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_ranks_and_popularities(
    rng: random.Random, dtype: torch.dtype, popularity: Callable[[random.Random, int], list[int]], rows: int
) -> None:
    pool = _Pool(dtype, rng)
    adapters = [_adapter(pool, SHAPES, rank) for rank in (1, 3, 8, 16, 24, 64, 96)]
    sizes = popularity(rng, rows)
    bounds = [0, *np.cumsum(sizes).tolist()]

    _Case(pool, SHAPES, bounds, [adapters[s % len(adapters)] for s in range(len(sizes))]).check()


@pytest.mark.parametrize("shapes", [SHAPES, ODD_SHAPES])
@pytest.mark.parametrize("trial", range(6))
def test_partial_targets_among_base_rows(rng: random.Random, shapes: Sequence[GroupShape], trial: int) -> None:
    pool = _Pool(torch.float32, rng)
    adapters = [_adapter(pool, shapes, rng.choice((1, 2, 5, 8, 30)), every=False) for _ in range(6)]
    sizes = [rng.choice((0, 1, 1, 2, 3, 40)) for _ in range(12)] + [1]
    owners = [rng.choice([None, None, *adapters]) for _ in sizes]

    _Case(pool, shapes, [0, *np.cumsum(sizes).tolist()], owners).check()


def test_many_adapters_with_many_columns(rng: random.Random) -> None:
    pool = _Pool(torch.float32, rng)
    adapters = [_adapter(pool, SHAPES, rng.choice((8, 32, 64))) for _ in range(12)]

    _Case(pool, SHAPES, list(range(13)), list(adapters)).check()


@pytest.mark.parametrize("scale", [3e4, 1e38])
def test_what_overflows_in_one_row_stays_there(rng: random.Random, scale: float) -> None:
    """An infinity of one row must not become its neighbour's NaN."""
    dtype = torch.float16 if scale < 1e5 else torch.bfloat16
    pool = _Pool(dtype, rng)
    mine, theirs = _adapter(pool, SHAPES, 8), _adapter(pool, SHAPES, 8)
    deltas = Deltas([Piece(0, 1, mine.view), Piece(1, 2, theirs.view)], elements(pool.flat), LAYERS, SHAPES)
    x = torch.cat((torch.randn(1, 40), torch.full((1, 40), scale) * torch.randn(40).sign())).to(dtype)
    together, alone = torch.zeros(2, 88, dtype=dtype), torch.zeros(1, 88, dtype=dtype)

    deltas.add(together, x, 0, 0)
    Deltas([Piece(0, 1, mine.view)], elements(pool.flat), LAYERS, SHAPES).add(alone, x[:1], 0, 0)

    assert not torch.isfinite(together[1]).all()
    _assert_close(together[:1], alone)


def test_views_share_the_pool(rng: random.Random) -> None:
    pool = _Pool(torch.float32, rng)
    adapter = _adapter(pool, SHAPES, 64)

    parts = [part for entry in adapter.view.entries for part in entry]

    assert {part.a.untyped_storage().data_ptr() for part in parts} == {pool.flat.untyped_storage().data_ptr()}
    assert len({id(part) for part in adapter.view.entries[0]}) > 3, "an entry of rank 64 runs over several pages"
