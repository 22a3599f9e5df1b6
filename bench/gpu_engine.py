"""A whole engine but its link, on a GPU: random weights in a real shape, random adapters, batches of requests."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stencilpress.engine.cuda.runner import CudaRunner
from stencilpress.engine.eviction import Room
from stencilpress.engine.image import Image, ImageHeader, Record, layout
from stencilpress.engine.limits import Limits
from stencilpress.engine.loader import Hosted, Loader
from stencilpress.engine.memory import PoolMemory, allocate_pool
from stencilpress.engine.messages import Sampling, Submit, pack_tokens
from stencilpress.engine.model.linear import Linear, make_linear
from stencilpress.engine.model.llama import LayerWeights, Weights
from stencilpress.engine.model.threads import Threads
from stencilpress.engine.plan import Sampled, StepPlan
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Capacity, Residency
from stencilpress.engine.scheduler import Scheduler
from stencilpress.engine.settings import EngineSettings
from stencilpress.engine.spec import ModelSpec, Rope, page_geometry, slice_elems

LLAMA3_8B = ModelSpec(
    family="llama",
    base_id="bench/llama3-8b",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope=Rope(500000.0),
    tied_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    eos_ids=(),
    dtype="bfloat16",
)
SHAPES = {"llama3-8b": LLAMA3_8B}
ATTENTION = (7, 1, 0, 0)
"""Masks of the adapted projections, by group: q, k, v and o."""
ALL7 = (7, 1, 3, 1)
MAX_RANK = 64
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """An adapter's name, rank and adapted projections."""

    name: str
    rank: int
    masks: tuple[int, ...] = ATTENTION

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


def random_weights(spec: ModelSpec, device: torch.device) -> Weights:
    """Normal weights that keep activations near one."""
    dtype = getattr(torch, spec.dtype)
    threads = Threads()

    def linear(rows: int, columns: int) -> Linear:
        return make_linear(_normal((rows, columns), columns**-0.5, dtype, device), None, threads)

    def norm() -> Tensor:
        return torch.empty(spec.hidden_size, dtype=dtype, device=device).uniform_(0.5, 1.5)

    qkv, o, gate_up, down = spec.groups
    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=linear(qkv.out_features, qkv.in_features),
            q_norm=None,
            k_norm=None,
            o=linear(o.out_features, o.in_features),
            mlp_norm=norm(),
            gate_up=linear(gate_up.out_features, gate_up.in_features),
            down=linear(down.out_features, down.in_features),
        )
        for _ in range(spec.num_layers)
    )
    embedding = _normal((spec.vocab_size, spec.hidden_size), 1.0, dtype, device)
    return Weights(embedding, layers, norm(), linear(spec.vocab_size, spec.hidden_size), threads)


def _normal(shape: tuple[int, int], std: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=std)


class RandomLoader(Loader):
    """The engine's loader, whose images are runs of one random buffer instead of files."""

    def __init__(self, spec: ModelSpec, memory: PoolMemory, kinds: Sequence[AdapterKind]) -> None:
        self.ready = threading.Semaphore(0)
        self.kinds = {kind.digest: (i, kind) for i, kind in enumerate(kinds)}
        most = max((self.payload_bytes(spec, kind) for kind in kinds), default=0)
        elems = most // 2 + 4096 * len(kinds)
        random = torch.empty(elems, dtype=torch.bfloat16, device=memory.device).normal_(std=1 / 32)
        self._buffer = torch.empty(elems, dtype=torch.bfloat16, pin_memory=memory.device.type == "cuda").copy_(random)
        super().__init__(Path("/nonexistent"), spec, memory, MAX_RANK, self.ready.release)

    @staticmethod
    def records(spec: ModelSpec, kind: AdapterKind) -> tuple[Record, ...]:
        """The same in every layer, all scales one."""
        of_layer = []
        for group, mask in zip(spec.groups, kind.masks, strict=True):
            present = tuple(p for p in range(3) if mask >> p & 1)
            elems = slice_elems(group, present) if present else 0
            of_layer.append(Record(kind.rank, mask, elems, (1.0, 1.0, 1.0)) if present else Record())
        return tuple(of_layer) * spec.num_layers

    @classmethod
    def payload_bytes(cls, spec: ModelSpec, kind: AdapterKind) -> int:
        return sum(record.rank * record.slice_elems for record in cls.records(spec, kind)) * spec.dtype_bytes

    def image(self, digest: str) -> Image:
        """The image of a kind."""
        index, kind = self.kinds[digest]
        spec = self._spec
        records = self.records(spec, kind)
        header = ImageHeader(
            digest, spec.fingerprint(), spec.dtype, spec.num_layers, len(spec.groups), records, payload_checksum=0
        )
        elems = header.payload_bytes // 2
        payload = self._buffer[index * 4096 : index * 4096 + elems].view(torch.uint8).numpy()
        return Image(header, payload)

    def _fetch(self, digest: str) -> Hosted:
        image = self.image(digest)
        return Hosted(image, layout(image.header, self._memory.geometry))


@dataclass(slots=True)
class Run:
    """What a batch of requests took, in seconds: ``first`` and ``last`` token of each request since the start, and
    where the host was in ``steps`` steps."""

    total_s: float = 0.0
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    commit_s: float = 0.0

    @property
    def host_line(self) -> str:
        """Milliseconds a step, on average: waiting for the device, and what the host did meanwhile."""
        parts = {"wait": self.wait_s, "plan": self.plan_s, "launch": self.launch_s, "commit": self.commit_s}
        return f"{self.steps} steps, ms: " + ", ".join(f"{k} {v / self.steps * 1e3:.2f}" for k, v in parts.items())

    @property
    def tpot_ms(self) -> list[float]:
        """Time per output token after the first, of each request."""
        return [(self.last_s[k] - self.first_s[k]) * 1e3 / (len(self.tokens[k]) - 1) for k in self.tokens]


class GpuEngine:
    """Scheduler, residency, loader and runner wired as engine/compose.py does."""

    def __init__(
        self,
        spec: ModelSpec,
        kinds: Sequence[AdapterKind],
        device: torch.device,
        *,
        pool_bytes: int,
        seats: int,
        tokens: int,
    ) -> None:
        geometry = page_geometry(spec, MAX_RANK)
        self.spec = spec
        self.weights = random_weights(spec, device)
        settings = EngineSettings(
            model_dir="", adapters_dir="", pool_bytes=pool_bytes, max_num_seqs=seats, max_num_batched_tokens=tokens
        )
        self.memory = allocate_pool(spec, geometry, settings, device)
        self.limits = Limits(
            max_num_seqs=seats,
            max_num_batched_tokens=tokens,
            max_loras=128,
            max_waiting=4096,
            max_model_len=1024,
            page_tokens=geometry.page_tokens,
            vocab_size=spec.vocab_size,
        )
        self.loader = RandomLoader(spec, self.memory, kinds)
        self.pool = Pool(self.memory.num_pages)
        room = Room()
        self.residency = Residency(self.pool, room, Capacity(max_cpu_loras=len(kinds) + 1, max_prefetched=128))
        prefixes = PrefixCache(self.pool, room, geometry.page_tokens)
        self.scheduler = Scheduler(self.limits, self.pool, self.residency, prefixes)
        self.runner = CudaRunner(spec, self.weights, self.memory, self.loader.adapter, self.limits, MAX_RANK)
        self._flights: deque[tuple[StepPlan, Callable[[], list[Sampled]]]] = deque()
        self._batches = 0

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[str],
        new_tokens: int,
        sampling: Sampling = GREEDY,
    ) -> Run:
        """Run requests that come at once to their end, ``new_tokens`` each. ``adapters`` are digests, "" the base."""
        self._batches += 1
        run = Run()
        start = time.perf_counter()
        for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            submit = Submit(i, pack_tokens(list(prompt)), adapter, new_tokens, sampling)
            self.scheduler.add((self._batches, i), submit)
            run.tokens[i] = []
        while self._flights or not self.scheduler.idle:
            self._step(run, start)
        run.total_s = time.perf_counter() - start
        if any(len(tokens) != new_tokens for tokens in run.tokens.values()):
            raise RuntimeError("a request did not get its tokens")
        return run

    def _step(self, run: Run, start: float) -> None:
        """As engine/worker.py does: the next step is launched before the last one is waited for."""
        begun = time.perf_counter()
        for result in self.loader.results():
            self.scheduler.loaded(result)
        plan = self.scheduler.plan_ahead() if self._flights else self.scheduler.plan()
        for order in self.residency.take_orders():
            self.loader.submit(order)
        planned = time.perf_counter()
        run.plan_s += planned - begun
        if plan is not None:
            self._flights.append((plan, self.runner.launch(plan)))
            run.launch_s += time.perf_counter() - planned
            run.steps += 1
        if self._flights and (plan is None or len(self._flights) > 1):
            self._land(run, start)
        elif plan is None:
            self.loader.ready.acquire(timeout=1)

    def _land(self, run: Run, start: float) -> None:
        begun = time.perf_counter()
        plan, wait = self._flights.popleft()
        sampled = wait()
        landed = time.perf_counter()
        self.scheduler.commit(plan, sampled)
        replies = self.scheduler.take_replies()
        ended = time.perf_counter()
        for step in replies.values():
            for token in step.tokens:
                run.first_s.setdefault(token.id, ended - start)
                run.last_s[token.id] = ended - start
                run.tokens[token.id].append(token.token)
        run.wait_s += landed - begun
        run.commit_s += ended - landed

    def close(self) -> None:
        self.loader.close()
