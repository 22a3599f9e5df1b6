"""Is the GPU engine right? Rows against float32, graphs against eager steps, adapters swapped between replays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu_engine import GREEDY, GpuEngine
from bench.gpu_random import RandomImages
from stencilpress.engine.model.llama import DOWN, GATE_UP, OUT, QKV
from stencilpress.engine.model.rope import inverse_frequencies
from stencilpress.engine.plan import Chunk, Draw, FetchOrder, PlaceOrder, Segment, StepPlan

PROMPT = 45
OWNER = (0, 0)


class Exact:
    """The model in float32, one sequence at a time, adapters as their images have them."""

    def __init__(self, engine: GpuEngine, images: RandomImages) -> None:
        self._engine = engine
        self._images = images
        self._device = engine.memory.device

    def last_logits(self, tokens: Sequence[int], digest: str) -> Tensor:
        """Logits after the last token, (V,) float32."""
        spec, weights = self._engine.spec, self._engine.weights
        deltas = self._matrices(digest) if digest else {}
        T, H, G, D = len(tokens), spec.num_heads, spec.num_kv_heads, spec.head_dim
        angle = torch.outer(torch.arange(T, dtype=torch.float32), inverse_frequencies(spec.rope, D)).to(self._device)
        x = weights.embedding[torch.tensor(tokens, device=self._device)].float()
        for n, layer in enumerate(weights.layers):
            normed = self._norm(x, layer.input_norm)
            qkv = self._linear(layer.qkv, normed, deltas.get((n, QKV)))
            q, k, v = (part.view(T, -1, D).transpose(0, 1) for part in torch.split(qkv, [H * D, G * D, G * D], 1))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            q, k = _rotated(q, angle), _rotated(k, angle)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self._linear(layer.o, mixed.transpose(0, 1).reshape(T, -1), deltas.get((n, OUT)))
            normed = self._norm(x, layer.mlp_norm)
            gate, up = self._linear(layer.gate_up, normed, deltas.get((n, GATE_UP))).chunk(2, 1)
            x = x + self._linear(layer.down, torch.nn.functional.silu(gate) * up, deltas.get((n, DOWN)))
        return self._linear(weights.head, self._norm(x[-1:], weights.final_norm), None)[0]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight.float(), self._engine.spec.rms_norm_eps)

    def _linear(self, layer: Any, x: Tensor, delta: list[tuple[slice, Tensor, Tensor]] | None) -> Tensor:
        y: Tensor = x @ layer.weight.float().T
        if layer.bias is not None:
            y += layer.bias.float()
        for columns, a, b in delta or ():
            y[:, columns] += (x @ a.T) @ b
        return y

    def _matrices(self, digest: str) -> dict[tuple[int, int], list[tuple[slice, Tensor, Tensor]]]:
        """By layer and group: columns, A (R, in), B (R, out) of each adapted projection."""
        image, spec = self._images.image(digest), self._engine.spec
        stream = torch.from_numpy(image.payload).view(getattr(torch, spec.dtype)).to(self._device).float()
        found, at = {}, 0
        for e, record in enumerate(image.header.records):
            layer, index = divmod(e, len(spec.groups))
            group = spec.groups[index]
            slices = stream[at : at + record.rank * record.slice_elems].view(record.rank, record.slice_elems)
            at += slices.numel()
            present = [p for p in range(len(group.projections)) if record.mask >> p & 1]
            parts, b_at = [], len(present) * group.in_features
            for i, p in enumerate(present):
                out = group.projections[p].out_features
                first = sum(projection.out_features for projection in group.projections[:p])
                a = slices[:, i * group.in_features : (i + 1) * group.in_features]
                parts.append((slice(first, first + out), a, slices[:, b_at : b_at + out]))
                b_at += out
            found[layer, index] = parts
        return found


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


PART = "'s part"


def faults(errors: dict[str, float]) -> list[str]:
    """What is out of bounds: bf16 costs a few per cent over 32 layers; of an adapter's part one is right, and none or
    two of it are wrong, however little it moves the logits of a base."""
    return [f"{name}: {v}" for name, v in errors.items() if not (0.5 < v < 1.5 if name.endswith(PART) else v < 0.05)]


def part_of(got: Tensor, base: Tensor, adapted: Tensor) -> float:
    """How much of the way from the base's logits to an adapter's they went, whatever else they differ in."""
    way = (adapted - base).double()
    return float(torch.dot(got.double() - base.double(), way) / torch.dot(way, way))


class Checker:
    """Drives the runner by hand-made plans over pages of the pool; the engine's books do not know it."""

    def __init__(self, engine: GpuEngine, images: RandomImages, digests: Sequence[str]) -> None:
        self._engine = engine
        self._images = images
        self._digests = digests
        self._steps = 0
        self._pages: list[int] = []
        for digest in digests:
            self._place(digest)

    def _take(self, count: int) -> tuple[int, ...]:
        pages = self._engine.pool.allocate(count, OWNER)
        assert pages is not None
        self._pages += pages
        return pages

    def _place(self, digest: str) -> None:
        loader, ready = self._engine.loader, self._engine.ready
        assert loader is not None
        loader.submit(FetchOrder(digest))
        ready.acquire()
        (fetched,) = loader.results()
        loader.submit(PlaceOrder(digest, self._take(fetched.pages)))  # type: ignore[union-attr]
        ready.acquire()
        (placed,) = loader.results()
        assert not placed.error, placed.error

    def run(self) -> dict[str, float]:
        """Relative errors by name, and each adapter's part in its logits; :func:`faults` judges them."""
        rng = random.Random(1)
        vocab = self._engine.spec.vocab_size
        adapters = ["", *self._digests]
        tokens = [[rng.randrange(vocab) for _ in range(PROMPT + 1)] for _ in adapters]
        tables = [self._take(4) for _ in adapters]
        self._prompts(tokens, tables, adapters)
        by_graph = self._decode(tokens, tables, adapters, eager=False)
        exact = Exact(self._engine, self._images)
        errors = {}
        for i, adapter in enumerate(adapters):
            name = self._images.kinds[adapter][1].name if adapter else "base"
            want = exact.last_logits(tokens[i], adapter)
            errors[f"{name} vs float32"] = _relative(by_graph[i], want)
            if adapter:
                errors[f"{name}{PART}"] = part_of(by_graph[i], exact.last_logits(tokens[i], ""), want)
        errors["graph vs eager"] = _relative(by_graph, self._decode(tokens, tables, adapters, eager=True))
        swapped = adapters[1:] + adapters[:1]
        by_graph = self._decode(tokens, tables, swapped, eager=False)
        errors["swapped, graph vs eager"] = _relative(by_graph, self._decode(tokens, tables, swapped, eager=True))
        self._engine.pool.release(self._pages)
        return errors

    def _prompts(self, tokens: list[list[int]], tables: list[tuple[int, ...]], adapters: list[str]) -> None:
        segments = []
        for i, adapter in enumerate(adapters):
            chunk = Chunk((0, i), i, 0, tuple(tokens[i][:PROMPT]), tables[i], None)
            segments.append(Segment(adapter or None, (chunk,)))
        self._steps += 1
        self._engine.runner.run(StepPlan(self._steps, tuple(segments)))

    def _decode(
        self, tokens: list[list[int]], tables: list[tuple[int, ...]], adapters: list[str], *, eager: bool
    ) -> Tensor:
        """Logits of one decode of all sequences, (N, V) float32."""
        segments = []
        for i, adapter in enumerate(adapters):
            draw = Draw(GREEDY, tokens[i], PROMPT, 0)
            segments.append(Segment(adapter or None, (Chunk((0, i), i, PROMPT, (tokens[i][-1],), tables[i], draw),)))
        self._steps += 1
        plan, runner = StepPlan(self._steps, tuple(segments)), self._engine.runner
        if eager:
            return runner.logits(plan).float()
        drawn = runner.run(plan)
        logits: Tensor = runner._graphs.logits_BV[: len(adapters)].float()  # noqa: SLF001
        assert all(logits[i, draw.token] == logits[i].max() for i, draw in enumerate(drawn))
        return logits


def _relative(got: Tensor, want: Tensor) -> float:
    return float(torch.linalg.norm(got.float() - want) / torch.linalg.norm(want))
