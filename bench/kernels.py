"""Kernels on one GPU: time against the floor of bytes, checked against float64 in the same run.

``python -m bench kernels [--record]``. Each case is a CUDA graph of one kernel (or pair) over many layers, each with
weights of its own, so that nothing is read twice from the L2 cache; the time of a replay is divided by the layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_adapters import add_exactly, build
from bench.gpu_device import add_record_options, device_label, has_goals, require_gpu
from bench.gpu_linear import LINEAR_SHAPES, linear_times
from bench.gpu_timing import Ceilings, Timing, graph_samples, measure_ceilings, relative
from bench.results import Result, median_result, record
from stencilpress.kernels.attention.triton_decode import choose_splits, decode_attention
from stencilpress.kernels.attention.triton_pages import KVLayout
from stencilpress.kernels.attention.triton_prefill import ChunkRows, plan_pieces, prefill_attention
from stencilpress.kernels.norm.triton_rms_norm import rms_norm
from stencilpress.kernels.rope.triton_rope import rope_and_write_kv
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_sgmv import Cut, sgmv
from stencilpress.kernels.sgmv.triton_work import AdapterRows, SgmvWork, Tile, choose_tile, plan_work, resolve
from stencilpress.kernels.silu.triton_silu_mul import silu_mul

ONE = (GroupShape(4096, (4096,)),)
LAYER = (GroupShape(4096, (4096, 1024, 1024)), GroupShape(4096, (4096,)))
MIX = (8, 16, 32, 64)


@dataclass(frozen=True)
class SgmvCase:
    """Each adapter has ``rows`` rows; ranks are taken in turn."""

    name: str
    adapters: int
    rows: int
    ranks: tuple[int, ...]
    goal_us: float | None
    groups: tuple[GroupShape, ...] = ONE
    layers: int = 32


SGMV_CASES = (
    SgmvCase("decode-1-r16", 1, 1, (16,), None, layers=256),
    SgmvCase("decode-16-r16", 16, 1, (16,), None),
    SgmvCase("decode-64-r16", 64, 1, (16,), 6.5),
    SgmvCase("decode-256-r16", 256, 1, (16,), 19.5),
    SgmvCase("decode-64-mix", 64, 1, MIX, 11),
    SgmvCase("decode-256-mix", 256, 1, MIX, 37),
    SgmvCase("decode-64-one-r16", 1, 64, (16,), None, layers=256),
    SgmvCase("prefill-2048-16-r16", 16, 128, (16,), 20),
    SgmvCase("prefill-2048-16-mix", 16, 128, MIX, 22),
    SgmvCase("layer-64-r16", 64, 1, (16,), 18, LAYER),
)


class SgmvBench:
    """The pool, rows and work list of one case."""

    def __init__(self, case: SgmvCase, device: torch.device):
        self.case, self.device = case, device
        ranks = [case.ranks[i % len(case.ranks)] for i in range(case.adapters)]
        self.pool = build(case.groups, case.layers, ranks, device)
        self.tokens = case.adapters * case.rows
        self.segments = [AdapterRows(i * case.rows, case.rows, self.pool.tables[i], r) for i, r in enumerate(ranks)]
        shape = (4, self.tokens)
        self.x = [torch.randn(*shape, g.in_features, device=device).bfloat16() for g in case.groups]
        self.y = [torch.randn(*shape, sum(g.out_features), device=device).bfloat16() for g in case.groups]

    def work(self, tile: Tile | None = None) -> SgmvWork:
        work = SgmvWork.of(plan_work(self.segments, tile or choose_tile(self.segments)), self.pool.entries, self.device)
        resolve(work, self.pool.pool)
        return work

    def run(self, work: SgmvWork, cut: Cut | None = None) -> None:
        for layer in range(self.case.layers):
            for g, group in enumerate(self.case.groups):
                entry = layer * len(self.case.groups) + g
                sgmv(self.y[g][layer % 4], self.x[g][layer % 4], self.pool.pool, work, entry, group, cut)

    def error(self, work: SgmvWork, cut: Cut | None = None) -> float:
        worst = 0.0
        for g, group in enumerate(self.case.groups):
            entry = (self.case.layers - 1) * len(self.case.groups) + g
            y = torch.randn_like(self.y[g][0])
            want = y.double()
            for a, s in enumerate(self.segments):
                add_exactly(want, self.x[g][0], self.pool, a, slice(s.row_start, s.row_start + s.rows), entry)
            sgmv(y, self.x[g][0], self.pool.pool, work, entry, group, cut)
            worst = max(worst, relative(y, want))
        return worst

    @property
    def bytes_moved(self) -> int:
        weights = sum(s.rank for s in self.segments) * sum(
            g.in_features * len(g.out_features) + sum(g.out_features) for g in self.case.groups
        )
        rows = self.tokens * sum(g.in_features + 2 * sum(g.out_features) for g in self.case.groups)
        return 2 * (weights + rows)

    def time(self, work: SgmvWork, cut: Cut | None = None) -> Timing:
        error = self.error(work, cut)
        samples = graph_samples(lambda: self.run(work, cut), self.case.layers)
        for y in self.y:
            y.normal_()
        return Timing(self.case.name, samples, self.bytes_moved, error, self.case.goal_us)


@dataclass(frozen=True)
class AttentionCase:
    """``rows`` 1: a decode of ``length`` tokens a sequence; else a chunk of ``rows`` that ends there."""

    name: str
    sequences: int
    length: int
    rows: int = 1


ATTENTION_CASES = (
    AttentionCase("attention-decode-64-256", 64, 256),
    AttentionCase("attention-decode-256-256", 256, 256),
    AttentionCase("attention-decode-64-1024", 64, 1024),
    AttentionCase("attention-decode-8-4096", 8, 4096),
    AttentionCase("attention-decode-1-8192", 1, 8192),
    AttentionCase("attention-prefill-64x256", 64, 256, 256),
    AttentionCase("attention-prefill-4x4096", 4, 4096, 4096),
    AttentionCase("attention-prefill-8x512-of-4096", 8, 4096, 512),
)


class AttentionBench:
    """KV of a few layers of an 8B Llama in shuffled pages."""

    LAYERS, HEADS, KV_HEADS, DIM, PAGE = 32, 32, 8, 128, 16

    def __init__(self, case: AttentionCase, device: torch.device):
        self.case = case
        elems = self.LAYERS * 2 * self.PAGE * self.KV_HEADS * self.DIM
        self.kv = KVLayout(self.PAGE, elems, self.KV_HEADS, self.DIM)
        per_sequence = case.length // self.PAGE
        pages = case.sequences * per_sequence
        self.pool = torch.empty(pages * elems, dtype=torch.bfloat16, device=device)
        for part in self.pool.split(1 << 28):  # type: ignore[no-untyped-call]
            part.normal_()
        self.pages = torch.randperm(pages, device=device).to(torch.int32).view(case.sequences, per_sequence)
        self.lengths = torch.full((case.sequences,), case.length, dtype=torch.int32, device=device)
        self.q = torch.randn(case.sequences * case.rows, self.HEADS, self.DIM, device=device).bfloat16()
        chunks = [ChunkRows(s * case.rows, case.rows, case.length - case.rows, s) for s in range(case.sequences)]
        self.pieces = torch.from_numpy(plan_pieces(chunks, self.HEADS // self.KV_HEADS)).to(device)
        self.splits = choose_splits(case.sequences, self.KV_HEADS, case.length, device)

    def run(self, layer: int, splits: int | None = None) -> torch.Tensor:
        scale = self.DIM**-0.5
        if self.case.rows == 1:
            return decode_attention(
                self.q, self.pool, self.pages, self.lengths, layer, self.kv, splits or self.splits, scale
            )
        out = torch.empty_like(self.q)
        prefill_attention(self.q, self.pool, self.pages, self.pieces, out, layer, self.kv, scale)
        return out

    def error(self, splits: int | None = None) -> float:
        got = self.run(3, splits)
        view = self.pool.view(-1, self.LAYERS, 2, self.PAGE, self.KV_HEADS, self.DIM)[:, 3]
        worst = 0.0
        for s in {0, self.case.sequences - 1}:
            kv = view[self.pages[s].long()].transpose(0, 1).reshape(2, -1, self.KV_HEADS, self.DIM).double()
            k, v = kv.repeat_interleave(self.HEADS // self.KV_HEADS, 2)
            for i in {0, self.case.rows // 2, self.case.rows - 1}:
                seen = self.case.length - self.case.rows + i + 1
                row = s * self.case.rows + i
                score = torch.einsum("hd,thd->ht", self.q[row].double(), k[:seen]) * self.DIM**-0.5
                worst = max(worst, relative(got[row], torch.einsum("ht,thd->hd", score.softmax(1), v[:seen])))
        return worst

    def time(self, splits: int | None = None) -> Timing:
        def layers() -> None:
            for layer in range(self.LAYERS):
                self.run(layer, splits)

        case = self.case
        tokens = case.sequences * case.length
        moved = 2 * (2 * tokens * self.KV_HEADS * self.DIM + 2 * self.q.numel())
        seen = case.sequences * case.rows * (case.length - (case.rows - 1) / 2)
        flops = 4 * int(seen) * self.HEADS * self.DIM if case.rows > 1 else 0
        return Timing(case.name, graph_samples(layers, self.LAYERS, 15), moved, self.error(splits), flops=flops)


def rowwise(rows: int, device: torch.device) -> list[Timing]:
    """Norm, rotary embedding with the KV write, and gate, of rows that lie in the L2 cache, as in a decode."""
    x, stream = torch.randn(2, rows, 4096, device=device).bfloat16()
    weight = torch.rand(4096, device=device).bfloat16()
    total = x + stream
    want = torch.nn.functional.rms_norm(total.double(), (4096,), weight.double(), 1e-5)
    error = relative(rms_norm(x, weight, 1e-5, stream), want)
    inner = torch.randn(rows, 28672, device=device).bfloat16()
    gated = torch.nn.functional.silu(inner[:, :14336].double()) * inner[:, 14336:].double()
    kv = KVLayout(16, 32 * 2 * 16 * 8 * 128, 8, 128)
    pool = torch.zeros(-(-rows // 16) * kv.page_elems, dtype=torch.bfloat16, device=device)
    qkv = torch.randn(rows, 6144, device=device).bfloat16()
    place = torch.arange(rows, device=device, dtype=torch.int32)
    angle = torch.outer(torch.arange(rows).float(), 5e5 ** (-torch.arange(0, 128, 2) / 128)).to(device)
    cos, sin = angle.cos(), angle.sin()
    before = qkv.clone().view(rows, 48, 128)[:, :40].double()
    rope_and_write_kv(qkv, 32, pool, place, place, cos, sin, 1, kv)
    low, high = before[..., :64], before[..., 64:]
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((low * c - high * s, high * c + low * s), -1)
    got = qkv.view(rows, 48, 128)[:, :40].double()
    keys = pool.view(-1, 32, 2, 16, 8, 128)[:, 1, 0].reshape(-1, 8, 128)[:rows].double()
    rope_error = max(relative(got[:, :32], turned[:, :32]), relative(keys, turned[:, 32:]))

    def each(run: Callable[[int], Any]) -> list[float]:
        return graph_samples(lambda: [run(i) for i in range(32)], 32)

    return [
        Timing(f"rms-norm-{rows}", each(lambda _: rms_norm(x, weight, 1e-5, stream)), rows * 4096 * 8, error),
        Timing(
            f"rope-kv-{rows}",
            each(lambda i: rope_and_write_kv(qkv, 32, pool, place, place, cos, sin, i, kv)),
            rows * 128 * 2 * (32 + 16) * 2,
            rope_error,
        ),
        Timing(f"silu-mul-{rows}", each(lambda _: silu_mul(inner)), rows * 14336 * 6, relative(silu_mul(inner), gated)),
    ]


def resolve_time(device: torch.device) -> Timing:
    """The reading of the slice tables, once a step: 64 adapters, 32 layers of four groups."""
    bench = SgmvBench(SgmvCase("resolve-64-r16", 64, 1, (16,), None, ONE * 4, 8), device)
    work = bench.work()
    moved = bench.pool.entries * 64 * (2 * (16 * 8) + 32 + 16)

    def run() -> None:
        for _ in range(8):
            resolve(work, bench.pool.pool)

    return Timing(bench.case.name, graph_samples(run, 8), moved, 0.0)


def line(timing: Timing, ceilings: Ceilings) -> str:
    floor = ceilings.floor_us(timing)
    goal = f"{timing.goal_us:6.1f}" if timing.goal_us and has_goals(torch.cuda.get_device_name()) else "     -"
    rate = timing.bytes_moved / timing.median_us / 1e3
    return (
        f"{timing.case:32s} {timing.system:12s} {timing.median_us:9.2f} us"
        f"  floor {floor:8.2f}  x{timing.median_us / floor:5.2f}"
        f"  goal {goal}  {rate:7.0f} GB/s  error {timing.error:.1e}"
    )


def results(timings: Sequence[Timing], bench: str, ceilings: Ceilings, device: str | None) -> list[Result]:
    gpu = torch.cuda.get_device_name()
    return [
        median_result(
            [round(s, 3) for s in t.samples_us],
            bench=bench,
            case=t.case,
            metric="us",
            unit="us",
            system=t.system,
            device=device or device_label(gpu),
            floor=round(ceilings.floor_us(t), 3),
            settings={
                "gpu": gpu,
                **({"goal": t.goal_us} if t.goal_us and has_goals(gpu) else {}),
                "dtype": "bfloat16",
                "gb_s": round(t.bytes_moved / t.median_us / 1e3),
                "tflop_s": round(t.flops / t.median_us / 1e6, 1),
                "relative_error": float(f"{t.error:.2e}"),
                "copy_gb_s": round(ceilings.copy_gb_s),
            },
        )
        for t in timings
    ]


def main(argv: Sequence[str]) -> int:
    """Measure all cases; print a table and, if asked, record it."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    add_record_options(parser)
    options = parser.parse_args(argv)
    require_gpu("kernels")
    device = torch.device("cuda")
    torch.manual_seed(1)
    ceilings = measure_ceilings(device)
    timings = []
    for case in SGMV_CASES:
        bench = SgmvBench(case, device)
        timings.append(bench.time(bench.work()))
    for attention in ATTENTION_CASES:
        timing = AttentionBench(attention, device).time()
        timings.append(timing)
    for name in LINEAR_SHAPES:
        timings += linear_times(name, device)
    timings += [*rowwise(64, device), resolve_time(device)]
    for timing in timings:
        print(line(timing, ceilings), flush=True)
        assert timing.error < 1e-2, timing.case
    if options.record:
        record(results(timings, "kernels", ceilings, options.device_name), ["torch", "triton"])
    return 0
