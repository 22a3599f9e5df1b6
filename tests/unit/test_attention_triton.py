"""Paged attention, rotary embedding, norm and gate against float64, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.attention.triton_decode import decode_attention
from stencilpress.kernels.attention.triton_pages import KVLayout
from stencilpress.kernels.attention.triton_prefill import ChunkRows, plan_pieces, prefill_attention, rows_of_piece
from stencilpress.kernels.norm.triton_rms_norm import rms_norm
from stencilpress.kernels.rope.triton_rope import rope_and_write_kv
from stencilpress.kernels.silu.triton_silu_mul import silu_mul

# Triton 3.6's interpreter turns one-element arrays into loop bounds
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
LAYERS, LAYER = 2, 1


class Cache:
    """Sequences whose pages lie shuffled in a pool of NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, page: int = 4):
        self.random = torch.Generator().manual_seed(5)
        per_token = LAYERS * 2 * kv_heads * dim
        self.kv = KVLayout(page, page * per_token + 8, kv_heads, dim)
        counts = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(counts) + 2, generator=self.random).to(torch.int32)
        self.pool = torch.full(((sum(counts) + 2) * self.kv.page_elems,), float("nan"), dtype=dtype)
        self.pages = torch.full((len(lengths), max(*counts, 1)), 10**6, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.keys, self.values = [], []
        for s, n in enumerate(lengths):
            self.pages[s, : counts[s]], order = order[: counts[s]], order[counts[s] :]
            k, v = torch.randn(2, n, kv_heads, dim, generator=self.random).to(dtype)
            for t in range(n):
                view = self.token(self.slot(s, t))
                view[0], view[1] = k[t], v[t]
            self.keys.append(k)
            self.values.append(v)

    def slot(self, s: int, t: int) -> int:
        return int(self.pages[s, t // self.kv.page_tokens]) * self.kv.page_tokens + t % self.kv.page_tokens

    def token(self, slot: int) -> torch.Tensor:
        """(K|V, kv_head, head_dim) of one token in the layer under test."""
        kv = self.kv
        page = self.pool[slot // kv.page_tokens * kv.page_elems :][
            : LAYERS * 2 * kv.page_tokens * kv.kv_heads * kv.head_dim
        ]
        return page.view(LAYERS, 2, kv.page_tokens, kv.kv_heads, kv.head_dim)[LAYER, :, slot % kv.page_tokens]

    def expected(self, q: torch.Tensor, s: int, seen: int, scale: float) -> torch.Tensor:
        group = q.shape[0] // self.kv.kv_heads
        k = self.keys[s][:seen].double().repeat_interleave(group, 1)
        v = self.values[s][:seen].double().repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,thd->ht", q.double(), k) * scale, dim=1)
        return torch.einsum("ht,thd->hd", weights, v)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = torch.linalg.norm(got.double() - want) / torch.linalg.norm(want)
    assert error < (1e-2 if got.dtype == torch.bfloat16 else 1e-5), float(error)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24), (2, 2, 64)])
def test_decode(splits: int, heads: int, kv_heads: int, dim: int) -> None:
    cache = Cache([1, 70, 9], kv_heads, dim)
    q = torch.randn(3, heads, dim, generator=cache.random)
    got = decode_attention(q, cache.pool, cache.pages, cache.lengths, LAYER, cache.kv, splits, dim**-0.5)
    _close(got, torch.stack([cache.expected(q[s], s, int(cache.lengths[s]), dim**-0.5) for s in range(3)]))


def test_decode_bf16_and_unused_sequence() -> None:
    cache = Cache([33, 0], 1, 32, torch.bfloat16)
    q = torch.randn(2, 4, 32, generator=cache.random).bfloat16()
    got = decode_attention(q, cache.pool, cache.pages, cache.lengths, LAYER, cache.kv, 2, 0.2)
    _close(got[:1], cache.expected(q[0], 0, 33, 0.2)[None])
    assert not got[1].any()


def test_rows_of_unused_sequences_are_left_to_the_next_kernel() -> None:
    cache = Cache([33, 0], 1, 32)
    q = torch.randn(2, 4, 32, generator=cache.random)
    out = torch.full_like(q, 3.0)
    decode_attention(q, cache.pool, cache.pages, cache.lengths, LAYER, cache.kv, 1, 0.2, out, for_next=True)
    _close(out[:1], cache.expected(q[0], 0, 33, 0.2)[None])
    assert (out[1] == 3.0).all()
    with pytest.raises(ValueError, match="joins"):
        decode_attention(q, cache.pool, cache.pages, cache.lengths, LAYER, cache.kv, 2, 0.2, out, for_next=True)


def test_pieces_without_rows_write_nothing() -> None:
    cache = Cache([5], 2, 16)
    q = torch.randn(5, 6, 16, generator=cache.random)
    out = torch.full_like(q, 3.0)
    idle = torch.zeros(3, 4, dtype=torch.int32)
    prefill_attention(q, cache.pool, cache.pages, idle, out, LAYER, cache.kv, 0.25, q_done=True)
    assert (out == 3.0).all()


def test_prefill_of_whole_and_continued_prompts() -> None:
    heads, dim = 6, 16
    cache = Cache([90, 5, 70], 2, dim)
    chunks = [ChunkRows(0, 90, 0, 0), ChunkRows(91, 1, 4, 1), ChunkRows(92, 3, 67, 2)]
    q = torch.randn(95, heads, dim, generator=cache.random)
    out = torch.full_like(q, 3.0)
    pieces = torch.from_numpy(plan_pieces(chunks, heads // 2))
    prefill_attention(q, cache.pool, cache.pages, pieces, out, LAYER, cache.kv, 0.25)
    for chunk in chunks:
        for i in range(0, chunk.rows, 11 if chunk.rows > 11 else 1):
            row = chunk.row_start + i
            _close(out[row], cache.expected(q[row], chunk.sequence, chunk.position + i + 1, 0.25))
    assert (out[90] == 3.0).all()


def test_pieces_cover_chunks_longest_context_first() -> None:
    chunks = [ChunkRows(0, 100, 0, 0), ChunkRows(100, 1, 500, 3)]
    pieces = plan_pieces(chunks, 4)
    assert pieces[0].tolist() == [100, 1, 500, 3]
    assert sorted(r for row, n, _, s in pieces.tolist() if s == 0 for r in range(row, row + n)) == list(range(100))
    assert pieces[:, 1].max() <= rows_of_piece(4)
    assert np.array_equal(pieces[1:, 0], pieces[1:, 2])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_kv_write(normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 3, 1, 16
    cache = Cache([6], kv_heads, dim, dtype)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, generator=cache.random).to(dtype)
    positions = torch.tensor([2, 3, 4, 5], dtype=torch.int32)
    slots = torch.tensor([cache.slot(0, int(n)) for n in positions], dtype=torch.int32)
    angle = torch.outer(torch.arange(8.0), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    weights = torch.rand(2, dim, generator=cache.random).to(dtype)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    q, k, v = (part.double() for part in torch.tensor_split(qkv.view(4, -1, dim), (heads, heads + kv_heads), dim=1))
    if normed:
        q, k = (
            torch.nn.functional.rms_norm(z, (dim,), w.double(), 1e-6) for z, w in ((q, weights[0]), (k, weights[1]))
        )
    rope_and_write_kv(qkv, heads, cache.pool, positions, slots, angle.cos(), angle.sin(), LAYER, cache.kv, norms)
    turn = torch.polar(torch.ones_like(angle), angle)[positions.long()][:, None].to(torch.complex128)

    def turned(z: torch.Tensor) -> torch.Tensor:
        wound = torch.complex(z[..., : dim // 2], z[..., dim // 2 :]) * turn
        return torch.cat((wound.real, wound.imag), dim=-1)

    _close(qkv.view(4, -1, dim)[:, :heads], turned(q))
    written = torch.stack([cache.token(int(slot)) for slot in slots])
    _close(written[:, 0], turned(k))
    assert torch.equal(written[:, 1].double(), v)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(residual: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, stream, weight = torch.randn(3, 72).to(dtype), torch.randn(3, 72).to(dtype), torch.rand(72).to(dtype)
    total = x + stream if residual else x
    before = stream.double()
    want = torch.nn.functional.rms_norm(total.double(), (72,), weight.double(), 1e-5)
    _close(rms_norm(x, weight, 1e-5, stream if residual else None), want)
    if residual:
        _close(stream, x.double() + before)  # the interpreter cuts bf16 off instead of rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 2100).to(dtype)
    _close(silu_mul(x), torch.nn.functional.silu(x[:, :1050].double()) * x[:, 1050:].double())


def test_shapes_are_checked() -> None:
    cache = Cache([3], 2, 16)
    with pytest.raises(ValueError, match="fit"):
        decode_attention(torch.zeros(1, 3, 16), cache.pool, cache.pages, cache.lengths, 0, cache.kv, 1, 1.0)
    with pytest.raises(ValueError, match="int32"):
        decode_attention(torch.zeros(1, 2, 16), cache.pool, cache.pages.long(), cache.lengths, 0, cache.kv, 1, 1.0)
    with pytest.raises(ValueError, match="fit"):
        rms_norm(torch.zeros(1, 8), torch.zeros(9), 1e-5)
    with pytest.raises(ValueError, match="side by side"):
        silu_mul(torch.zeros(1, 9))
