"""``python -m bench churn``: far more adapters than the pool may hold, and what a load costs those who run.

``warm`` and ``cold``: 512 requests at once over 1,000 adapters by Zipf's law, adapters' pages capped; their images in
host memory, or in files that the system has cached. ``first-use``: one adapter from host memory to the pool on an idle
engine. ``itl-p99``: gaps between the tokens of running streams while adapters are read and placed, over those without.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.gpu_cases import (
    PROBES,
    Bench,
    Case,
    decode_floor_ms,
    gpu_bench,
    gpu_parser,
    prompts,
    proved_engine,
    random_loader,
)
from bench.gpu_engine import GpuEngine, MakeLoader, Serving
from bench.gpu_peers import MEMORY_FOLDER, Peer, installed
from bench.gpu_random import MAX_RANK, AdapterKind, RandomImages, RandomLoader, payload_bytes
from bench.results import Result, record
from stencilpress.engine.loader import Hosted, Loader
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.plan import DropOrder, FetchOrder, PlaceOrder
from stencilpress.engine.spec import page_geometry
from stencilpress.kernels.sgmv.views import AdapterView

REQUESTS, PROMPT, NEW = 512, 256, 128
ADAPTERS, DRAWN, SEED = 1000, 214, 3
"""Of a thousand, this seed draws as many as vLLM's measurement did."""
ADAPTER_BYTES = 4 << 30
PREFETCHED = 16
PEER_SLOTS = 32
"""What suits vLLM best: more slots make every step slower."""
STREAMS, STREAM_NEW = 32, 512
FIRST_USES = 30
CASES = ("warm", "cold", "first-use", "itl-p99")
GOALS = {"warm": 9500, "cold": 8000, "first-use": 0.7, "itl-p99": 1.2}
VLLM = {"warm": 3599, "cold": 2050, "first-use": 61}


def zipf_requests() -> list[int]:
    """The adapter of each request."""
    weights = [1 / (i + 1) for i in range(ADAPTERS)]
    return random.Random(SEED).choices(range(ADAPTERS), weights, k=REQUESTS)


def kind_of(adapter: int) -> AdapterKind:
    return AdapterKind(f"churn-{adapter}", 16)


def churn(bench: Bench, engine: GpuEngine, case: str, fresh: Callable[[], None]) -> Result:
    """Serve the requests after ``fresh``, which brings the tiers into the case's state; one turn warms up."""
    digests = [kind_of(adapter).digest for adapter in zipf_requests()]
    assert len(set(digests)) == DRAWN
    samples, line, most = [], "", 0
    for turn in range(bench.repeats + 1):
        fresh()
        run = engine.serve(prompts(engine.spec, REQUESTS, PROMPT, turn), digests, NEW)
        if turn:
            samples.append(REQUESTS * NEW / run.total_s)
        line, most = run.host_line, max(most, run.most_adapter_bytes)
    settings = {
        "goal": GOALS[case],
        "vllm-0.26.0": VLLM[case],
        "max_loras": engine.serving.max_loras,
        "adapter_gib": round(most / 2**30, 3),
    }
    found = bench.result(case, "out_tok_s", "tok/s", samples, floor=churn_floor(bench), settings=settings)
    loads = f"{most / 2**30:.2f} GiB of adapters, {engine.residency.loads} loads"
    against = f"goal {GOALS[case]} vllm {VLLM[case]} limit {found.floor}"
    print(f"{case:10} {found.value:8.0f} tok/s {found.spread} {against} {loads}   {line}", flush=True)
    return found


def churn_floor(bench: Bench) -> float:
    """Prefill's products at the matrix rate, then two full batches of decodes, each over its own adapters."""
    spec = bench.base.spec
    weights = spec.num_layers * sum(group.in_features * group.out_features for group in spec.groups)
    prefill_ms = 2 * REQUESTS * PROMPT * weights / bench.ceilings.matrix_tflop_s / 1e9
    step_ms = decode_floor_ms(spec, bench.ceilings, Case("", REQUESTS // 2, DRAWN // 2), PROMPT + NEW / 2)
    return REQUESTS * NEW * 1e3 / (prefill_ms + 2 * NEW * step_ms)


@contextmanager
def written(images: RandomImages) -> Iterator[Path]:
    """A folder of the images as the engine's files, which stay in the system's cache."""
    with tempfile.TemporaryDirectory(prefix="churn-", dir=MEMORY_FOLDER) as folder:
        images.write(Path(folder))
        yield Path(folder)


def disk_loader(bench: Bench, adapters_dir: Path) -> MakeLoader:
    """The engine's own loader on a folder."""
    return lambda memory, wake: Loader(adapters_dir, bench.base.spec, memory, MAX_RANK, wake)


class TimedLoader(RandomLoader):
    """Times its placements by events on the stream of the copies, what the host does before the first included."""

    spans_ms: list[float]

    def _place(self, hosted: Hosted, pages: tuple[int, ...]) -> AdapterView:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(self._stream)
        view = super()._place(hosted, pages)
        end.record(self._stream)
        end.synchronize()
        self.spans_ms.append(start.elapsed_time(end))
        return view


def first_use(bench: Bench, engine: GpuEngine, images: RandomImages) -> Result:
    """Place adapters one after the other; nothing else runs."""
    loaders: list[TimedLoader] = []

    def make(memory: PoolMemory, wake: Callable[[], None]) -> Loader:
        loader = TimedLoader(bench.base.spec, memory, images, wake)
        loader.spans_ms = []
        loaders.append(loader)
        return loader

    engine.use(make, len(images.kinds) + 1)
    (loader,) = loaders
    for adapter in range(FIRST_USES):
        digest = list(images.kinds)[len(PROBES) + adapter]
        loader.submit(FetchOrder(digest))
        engine.ready.acquire()
        (fetched,) = loader.results()
        pages = engine.pool.allocate(fetched.pages, digest)  # type: ignore[union-attr]
        assert pages is not None
        loader.submit(PlaceOrder(digest, pages))
        engine.ready.acquire()
        (placed,) = loader.results()
        assert not placed.error, placed.error
        engine.pool.release(pages)
        loader.submit(DropOrder(digest, "hbm"))
    spans = loader.spans_ms[FIRST_USES // 3 :]
    kind = kind_of(zipf_requests()[0])
    size = payload_bytes(bench.base.spec, kind)
    floor = size / host_bandwidth(size) * 1e3
    settings = {"goal": GOALS["first-use"], "vllm-0.26.0": VLLM["first-use"], "adapter_bytes": size}
    found = bench.result("first-use", "added_ms", "ms", spans, floor=floor, settings=settings)
    print(f"first-use  {found.value:8.3f} ms {found.spread} goal 0.7 vllm 61 limit {found.floor}", flush=True)
    return found


def host_bandwidth(size: int) -> float:
    """Bytes a second of one pinned copy of so many bytes to the device."""
    source, target = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = float("inf")
    for _ in range(10):
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return size / best * 1e3


def gaps(bench: Bench, engine: GpuEngine, adapters_dir: Path) -> Result:
    """Streams of warm adapters, first undisturbed, then while others are read from files and placed without pause."""
    adapters = list(dict.fromkeys(kind_of(adapter).digest for adapter in zipf_requests()))
    running, others = adapters[:STREAMS], adapters[STREAMS:]
    samples = []
    for turn in range(bench.repeats + 1):
        p99_ms = []
        for loading in (False, True):
            engine.use(disk_loader(bench, adapters_dir), STREAMS + 8)
            engine.host(running)
            feed = Feed(engine, others if loading else [])
            given = prompts(engine.spec, STREAMS, PROMPT, 2 * turn + loading)
            run = engine.serve(given, running, STREAM_NEW, at_step=feed)
            found = sorted(run.gaps_ms(range(STREAMS)))
            p99_ms.append(found[len(found) * 99 // 100])
        if turn:
            samples.append(p99_ms[1] / p99_ms[0])
        print(f"  p99 quiet {p99_ms[0]:.3f} ms, loading {p99_ms[1]:.3f} ms, {feed.placed} adapters placed", flush=True)
    settings = {"goal": GOALS["itl-p99"], "streams": STREAMS}
    found_ratio = bench.result("itl-p99", "ratio", "", samples, floor=1.0, settings=settings)
    print(f"itl-p99    {found_ratio.value:8.3f} {found_ratio.spread} goal 1.2", flush=True)
    return found_ratio


class Feed:
    """Wants one adapter after the other for nobody, a few at a time."""

    AT_ONCE = 4
    ARRIVAL = 1 << 40
    """After every request's: nobody gives way to them."""

    def __init__(self, engine: GpuEngine, digests: list[str]) -> None:
        self._engine = engine
        self._digests = digests
        self._wanted: dict[str, int] = {}
        self._next = 0
        self.placed = 0

    def __call__(self) -> None:
        residency = self._engine.residency
        for digest in [digest for digest in self._wanted if residency.ready(digest)]:
            residency.unwant(digest)
            del self._wanted[digest]
            self.placed += 1
        for _ in self._digests:
            digest = self._digests[self._next % len(self._digests)]
            if len(self._wanted) == self.AT_ONCE or residency.ready(digest) or digest in self._wanted:
                return
            self._next += 1
            self._wanted[digest] = self.ARRIVAL + self._next
            residency.want(digest, self._wanted[digest])


def theirs(bench: Bench, peer: Peer) -> Result:
    """A peer on the same requests, its adapters in host memory after the first turn."""
    digests = [kind_of(adapter).digest for adapter in zipf_requests()]
    elapsed_s = [peer.elapsed_s(prompts(bench.base.spec, REQUESTS, PROMPT, turn), digests, NEW)
                 for turn in range(bench.repeats + 1)]  # fmt: skip
    found = bench.result("warm", "out_tok_s", "tok/s", [REQUESTS * NEW / s for s in elapsed_s[1:]], system=peer.system)
    print(f"warm       {found.value:8.0f} tok/s {found.spread} {peer.system}", flush=True)
    return found


def _warm(bench: Bench, engine: GpuEngine, images: RandomImages) -> None:
    engine.use(random_loader(bench.base, images), ADAPTERS)
    engine.host([digest for digest in images.kinds if digest not in {probe.digest for probe in PROBES}])


def _serving(bench: Bench) -> Serving:
    """As many adapter slots as the cap holds beside those that are prefetched."""
    pages = -(
        -payload_bytes(bench.base.spec, kind_of(0)) * 21 // 20 // page_geometry(bench.base.spec, MAX_RANK).page_bytes
    )
    slots = ADAPTER_BYTES // page_geometry(bench.base.spec, MAX_RANK).page_bytes // (pages + 1) - PREFETCHED
    return Serving(max_loras=min(slots, 128), max_prefetched=PREFETCHED, adapter_bytes=ADAPTER_BYTES)


def ours(bench: Bench, kinds: list[AdapterKind], chosen: Sequence[str]) -> list[Result]:
    """The chosen cases in one engine."""
    images = RandomImages(bench.base.spec, [*PROBES, *kinds], torch.device("cuda"))
    engine = proved_engine(bench.base, images, _serving(bench))
    results = []
    if "warm" in chosen:
        results.append(churn(bench, engine, "warm", lambda: _warm(bench, engine, images)))
    if "first-use" in chosen:
        results.append(first_use(bench, engine, images))
    if "cold" in chosen or "itl-p99" in chosen:
        with written(images) as folder:
            if "cold" in chosen:
                make_loader = disk_loader(bench, folder)
                results.append(churn(bench, engine, "cold", lambda: engine.use(make_loader, ADAPTERS)))
            if "itl-p99" in chosen:
                results.append(gaps(bench, engine, folder))
    engine.close()
    return results


def main(arguments: list[str]) -> int:
    """Measure the chosen cases, then peers on the warm one."""
    parser = gpu_parser("churn")
    parser.add_argument("--cases", default="", help="comma-separated; all if empty")
    options = parser.parse_args(arguments)
    chosen = options.cases.split(",") if options.cases else CASES
    bench = gpu_bench("churn", options)
    drawn = list(dict.fromkeys(kind_of(adapter) for adapter in zipf_requests()))
    results = ours(bench, drawn, chosen)
    for peer_class in installed(options.peer if "warm" in chosen else ()):
        with peer_class.serving(bench.base, drawn, REQUESTS, PEER_SLOTS) as peer:
            results.append(theirs(bench, peer))
    if options.record:
        record(results, ("torch", "triton"))
    return 0
