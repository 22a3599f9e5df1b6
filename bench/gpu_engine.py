"""A whole engine but its link, on a GPU: batches of requests that come at once or at their times."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.gpu_base import Base
from bench.gpu_random import MAX_RANK
from stencilpress.engine.cuda.rehearsal import fitting_pool_bytes
from stencilpress.engine.cuda.runner import CudaRunner
from stencilpress.engine.eviction import Room
from stencilpress.engine.limits import Limits
from stencilpress.engine.loader import Loader
from stencilpress.engine.memory import PoolMemory, allocate_pool
from stencilpress.engine.messages import Sampling, Submit, pack_tokens
from stencilpress.engine.plan import Sampled, StepPlan
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Capacity, Residency
from stencilpress.engine.scheduler import Scheduler
from stencilpress.engine.settings import EngineSettings
from stencilpress.engine.spec import ModelSpec, page_geometry
from stencilpress.kernels.sgmv.views import AdapterView

GREEDY = Sampling(temperature=0.0)
MakeLoader = Callable[[PoolMemory, Callable[[], None]], Loader]
"""A loader over a pool that calls the function when it has an answer."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How an engine serves. ``pool_bytes`` 0 is all that fits; ``adapter_bytes`` bounds adapters' pages, 0 does not."""

    seats: int = 256
    tokens: int = 16384
    max_loras: int = 128
    max_prefetched: int = 128
    max_model_len: int = 1024
    pool_bytes: int = 0
    adapter_bytes: int = 0


@dataclass(slots=True)
class Run:
    """What requests took, in seconds since the start: when each of a request's tokens came, and where the host was in
    ``steps`` steps. ``adapter_bytes_read`` are the pages of every step's adapters."""

    total_s: float = 0.0
    times_s: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    commit_s: float = 0.0
    most_adapter_bytes: int = 0
    adapter_bytes_read: int = 0

    @property
    def host_line(self) -> str:
        """Milliseconds a step, on average: waiting for the device, and what the host did meanwhile."""
        parts = {"wait": self.wait_s, "plan": self.plan_s, "launch": self.launch_s, "commit": self.commit_s}
        return f"{self.steps} steps, ms: " + ", ".join(f"{k} {v / self.steps * 1e3:.2f}" for k, v in parts.items())

    @property
    def tpot_ms(self) -> list[float]:
        """Time per output token after the first, of each request."""
        return [(times[-1] - times[0]) * 1e3 / (len(times) - 1) for times in self.times_s.values()]

    def gaps_ms(self, requests: Sequence[int]) -> list[float]:
        """Times between tokens of these requests."""
        pairs = (zip(self.times_s[i], self.times_s[i][1:], strict=False) for i in requests)
        return [(later - sooner) * 1e3 for times in pairs for sooner, later in times]


def check_bytes(spec: ModelSpec) -> int:
    """What the check of logits may take beside an engine: the largest weight in float32, and as much for the rest."""
    return 2 * 4 * spec.vocab_size * spec.hidden_size


class GpuEngine:
    """Scheduler, residency, loader and runner wired as engine/compose.py does."""

    def __init__(self, base: Base, device: torch.device, serving: Serving) -> None:
        spec = self.spec = base.spec
        geometry = page_geometry(spec, MAX_RANK)
        self.serving = serving
        self.limits = Limits(
            max_num_seqs=serving.seats,
            max_num_batched_tokens=serving.tokens,
            max_loras=serving.max_loras,
            max_waiting=1 << 20,
            max_model_len=min(serving.max_model_len, spec.max_position),
            page_tokens=geometry.page_tokens,
            vocab_size=spec.vocab_size,
        )
        self.weights = base.weights(device)
        fitting = serving.pool_bytes or (
            fitting_pool_bytes(spec, geometry, self.weights, self.limits, MAX_RANK, device) - check_bytes(spec)
        )
        settings = EngineSettings(model_dir="", adapters_dir="", pool_bytes=fitting)
        self.memory = allocate_pool(spec, geometry, settings, device)
        self.runner = CudaRunner(spec, self.weights, self.memory, self._adapter, self.limits, MAX_RANK)
        self.ready = threading.Semaphore(0)
        self.loader: Loader | None = None
        self._flights: deque[tuple[StepPlan, Callable[[], list[Sampled]]]] = deque()
        self._batches = 0

    def use(self, make_loader: MakeLoader, max_cpu_loras: int, adapter_bytes: int | None = None) -> None:
        """Start with nothing in the pool and nothing in host memory. ``adapter_bytes`` as in :class:`Serving`."""
        if self.loader is not None:
            self.loader.close()
        self.ready = threading.Semaphore(0)
        self.loader = make_loader(self.memory, self.ready.release)
        self.pool = Pool(self.memory.num_pages)
        most = self.serving.adapter_bytes if adapter_bytes is None else adapter_bytes
        pages = most // self.memory.geometry.page_bytes or self.memory.num_pages
        room = Room()
        capacity = Capacity(max_cpu_loras, self.serving.max_prefetched, max_adapter_pages=pages)
        self.residency = Residency(self.pool, room, capacity)
        prefixes = PrefixCache(self.pool, room, self.limits.page_tokens)
        self.scheduler = Scheduler(self.limits, self.pool, self.residency, prefixes)

    def host(self, digests: Sequence[str]) -> None:
        """Bring adapters into host memory."""
        for digest in dict.fromkeys(digests):
            self.scheduler.check_adapter(digest)
        while self.residency.in_host < len(set(digests)):
            self.turn(Run(), 0.0)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[str],
        new_tokens: int | Sequence[int],
        *,
        arrivals_s: Sequence[float] = (),
        sampling: Sampling = GREEDY,
        at_step: Callable[[], None] | None = None,
    ) -> Run:
        """Run requests to their end. ``adapters`` are digests, "" the base; ``arrivals_s`` ascend, none is all at once;
        ``at_step`` is called before each turn of the loop."""
        lengths = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
        self._batches += 1
        run = Run()
        coming = deque(enumerate(zip(prompts, adapters, lengths, strict=True)))
        start = time.perf_counter()
        while coming or self._flights or not self.scheduler.idle:
            now = time.perf_counter() - start
            while coming and (not arrivals_s or arrivals_s[coming[0][0]] <= now):
                i, (prompt, adapter, length) = coming.popleft()
                run.tokens[i], run.times_s[i] = [], []
                self.scheduler.add((self._batches, i), Submit(i, pack_tokens(list(prompt)), adapter, length, sampling))
            if at_step is not None:
                at_step()
            self.turn(run, start, arrivals_s[coming[0][0]] - now if coming else 1.0)
        run.total_s = time.perf_counter() - start
        if [len(run.tokens[i]) for i in range(len(lengths))] != lengths:
            raise RuntimeError("a request did not get its tokens")
        return run

    def turn(self, run: Run, start: float, longest_rest_s: float = 1.0) -> None:
        """As engine/worker.py does: the next step is launched before the last one is waited for."""
        assert self.loader is not None, "call use first"
        begun = time.perf_counter()
        for result in self.loader.results():
            self.scheduler.loaded(result)
        with self.loader.held_back():
            plan = self.scheduler.plan_ahead() if self._flights else self.scheduler.plan()
            for order in self.residency.take_orders():
                self.loader.submit(order)
            planned = time.perf_counter()
            run.plan_s += planned - begun
            run.most_adapter_bytes = max(run.most_adapter_bytes, self.pool.adapter * self.memory.geometry.page_bytes)
            if plan is not None:
                self._flights.append((plan, self.runner.launch(plan)))
                run.launch_s += time.perf_counter() - planned
                run.steps += 1
                pages = sum(self.residency.pages(segment.adapter) for segment in plan.segments if segment.adapter)
                run.adapter_bytes_read += pages * self.memory.geometry.page_bytes
        if self._flights and (plan is None or len(self._flights) > 1):
            self._land(run, start)
        elif plan is None:
            self.ready.acquire(timeout=max(0.0, min(longest_rest_s, 1.0)))

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
                run.times_s[token.id].append(ended - start)
                run.tokens[token.id].append(token.token)
        run.wait_s += landed - begun
        run.commit_s += ended - landed

    def _adapter(self, digest: str) -> AdapterView:
        assert self.loader is not None, "call use first"
        return self.loader.adapter(digest)

    def close(self) -> None:
        """Give the device's memory back."""
        if self.loader is not None:
            self.loader.close()
        self.__dict__.clear()
        gc.collect()
        torch.cuda.empty_cache()
