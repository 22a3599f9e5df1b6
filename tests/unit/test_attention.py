"""Paged attention against dense float64 attention of each request, in a pool that is NaN where nothing was written."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from stencilpress.kernels.attention import Span
from stencilpress.kernels.attention.cpu import Heads, attend_spans, plan_spans
from stencilpress.kernels.attention.reference import PagedKV, attend, plan_attention
from stencilpress.kernels.numba_bits import elements

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LAYERS = 2


@dataclass
class _Request:
    """All its q, k, v rows so far, (T, heads * D), as the pool's dtype has them."""

    pages: tuple[int, ...]
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(len(rows) for rows in self.k)


@dataclass
class _Bench:
    """A pool and requests in it; :meth:`step` runs spans of given lengths and checks every row."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    rng: random.Random
    pages: int = 220
    pool: Tensor = field(init=False)
    kv: PagedKV = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        page_elems = LAYERS * 2 * self.page_tokens * self.kv_heads * self.head_dim
        self.pool = torch.full((self.pages * page_elems,), torch.nan, dtype=self.dtype)
        self.kv = PagedKV(
            self.pool,
            layers=LAYERS,
            page_tokens=self.page_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        self.free = self.rng.sample(range(self.pages), self.pages)

    def request(self, longest: int) -> _Request:
        return _Request(tuple(self.free.pop() for _ in range(-(-longest // self.page_tokens))))

    def step(self, lengths: list[tuple[_Request, int]], layer: int) -> None:
        spans, row = [], 0
        for request, length in lengths:
            spans.append(Span(row, request.length, length, request.pages))
            row += length
        fused = torch.randn(row, (self.heads + 2 * self.kv_heads) * self.head_dim).to(self.dtype)
        q, k, v = torch.split(fused, [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], 1)
        for span, (request, _) in zip(spans, lengths, strict=True):
            for rows, new in ((request.q, q), (request.k, k), (request.v, v)):
                rows.append(new[span.row : span.row + span.length])

        by_reference = attend(q, k, v, self.kv, layer, plan_attention(spans, self.kv, self.dtype, CPU))
        for out in (by_reference, self.attended(fused, spans, layer)):
            self._check(out, spans, lengths)

    def attended(self, qkv: Tensor, spans: list[Span], layer: int) -> Tensor:
        """By the CPU engine's form, with a rotation that changes nothing."""
        still = (
            torch.ones(1000, self.head_dim // 2, dtype=self.dtype),
            torch.zeros(1000, self.head_dim // 2, dtype=self.dtype),
        )
        heads = Heads(self.heads, elements(still[0]), elements(still[1]), eps=1e-6)
        none = elements(torch.empty(0, dtype=self.dtype))
        out = torch.full((len(qkv), self.heads * self.head_dim), torch.nan, dtype=self.dtype)
        attend_spans(qkv, (none, none), heads, self.kv, layer, plan_spans(spans, self.kv, self.dtype), out)
        return out

    def _check(self, out: Tensor, spans: list[Span], lengths: list[tuple[_Request, int]]) -> None:
        for span, (request, _) in zip(spans, lengths, strict=True):
            got = out[span.row : span.row + span.length].double()
            expected = self._dense(request)[span.start :]
            tolerance = TOLERANCE[self.dtype]
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

    def _dense(self, request: _Request) -> Tensor:
        q, k, v = (
            torch.cat(rows).double().unflatten(1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for rows in (request.q, request.k, request.v)
        )
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("thd,uhd->htu", q, k) / self.head_dim**0.5
        scores += torch.full(scores.shape[1:], -torch.inf, dtype=torch.float64).triu_(1)
        return torch.einsum("htu,uhd->thd", scores.softmax(-1), v).flatten(1)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(11)
    picked: torch.dtype = request.param
    return picked


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_tokens"), [(9, 3, 64, 16), (4, 4, 16, 32), (8, 1, 24, 16), (6, 2, 10, 64)]
)
def test_chunked_prompts_among_decodes(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> None:
    rng = random.Random(heads)
    bench = _Bench(heads, kv_heads, head_dim, page_tokens, dtype, rng)
    requests = [bench.request(longest=260) for _ in range(6)]
    for _ in range(14):
        chosen = rng.sample(requests, rng.randint(1, len(requests)))
        lengths = [(r, min(rng.choice((1, 1, 2, 15, 16, 17, 50)), 260 - r.length)) for r in chosen]
        bench.step([(r, length) for r, length in lengths if length], layer=1)


@pytest.mark.parametrize("contexts", [[1], [30] * 2, [300], [5, 5, 5], [63, 64, 65], [200] * 12, [3, 900, 7, 880, 40]])
def test_decodes_of_any_lengths(contexts: list[int], dtype: torch.dtype) -> None:
    bench = _Bench(9, 3, 64, 16, dtype, random.Random(1))
    requests = [bench.request(context + 2) for context in contexts]
    bench.step([(request, context) for request, context in zip(requests, contexts, strict=True)], layer=0)

    bench.step([(request, 1) for request in requests], layer=0)
    bench.step([(request, 1) for request in reversed(requests)], layer=0)


def test_writes_touch_their_own_rows_only(dtype: torch.dtype) -> None:
    bench = _Bench(4, 2, 16, 16, dtype, random.Random(2))
    first, second = bench.request(40), bench.request(40)
    bench.step([(first, 20)], layer=1)
    before = bench.pool.clone()

    bench.step([(second, 17)], layer=1)

    written = (bench.pool.isnan() != before.isnan()).sum()
    assert written == 17 * 2 * 2 * 16, "keys and values of 17 positions"
    kept = ~before.isnan()
    assert torch.equal(bench.pool[kept], before[kept])


def test_a_neighbours_nan_stays_with_it(dtype: torch.dtype) -> None:
    bench = _Bench(4, 2, 16, 16, dtype, random.Random(4))
    sound, sick = bench.request(60), bench.request(60)
    bench.step([(sound, 30), (sick, 50)], layer=0)
    bench.kv.write(
        0, *(torch.full((1, 32), torch.nan, dtype=dtype),) * 2, torch.from_numpy(bench.kv.rows(sick.pages, 1))
    )
    spans = [Span(0, 30, 1, sound.pages), Span(1, 50, 1, sick.pages)]
    qkv = torch.randn(2, 128).to(dtype)

    q, k, v = torch.split(qkv, [64, 32, 32], 1)
    by_reference = attend(q, k, v, bench.kv, 0, plan_attention(spans, bench.kv, dtype, CPU))

    for out in (by_reference, bench.attended(qkv, spans, 0)):
        assert torch.isfinite(out[0]).all()
        assert out[1].isnan().all()


def test_a_pool_of_part_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of pages"):
        PagedKV(torch.empty(1000), layers=1, page_tokens=16, kv_heads=2, head_dim=16)
