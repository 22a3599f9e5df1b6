"""``python -m bench churn``: far more adapters than the pool may hold, and what a load costs those who run.

``warm`` and ``cold``: 512 requests at once over 1,000 adapters by Zipf's law, adapters' pages capped; their images in
host memory, or in files that the system has cached. ``mix``: as ``warm``, with ranks from 8 to 64. These two are also
run with room for all adapters (``resident``). ``first-use``: one adapter on an idle engine from host memory to the
pool, as the stream of the copies has it and as whoever waits does, and from a file that the system has cached.
``itl-p99``: gaps between the tokens of running streams while adapters are read and placed, over those without.
``room-8``: first-token times of sixteen adapters on room for eight (churn_room).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from bench.churn_room import first_tokens
from bench.gpu_cases import (
    MIX,
    PROBES,
    Bench,
    Case,
    add_case_options,
    beside,
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
from stencilpress.engine.copies import Piece
from stencilpress.engine.loader import Loader
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.plan import DropOrder, Fetched, FetchOrder, LoadOrder, Page, Placed, PlaceOrder, Sized
from stencilpress.engine.spec import page_geometry

REQUESTS, PROMPT, NEW = 512, 256, 128
ADAPTERS, DRAWN, SEED = 1000, 214, 3
"""Of a thousand, this seed draws as many as vLLM's measurement did."""
ADAPTER_BYTES = 4 << 30
PREFETCHED = 16
PEER_SLOTS = 32
"""What suits vLLM best: more slots make every step slower."""
STREAMS, STREAM_NEW = 32, 512
RESIDENT_GOAL = 0.95
STAGE_LIMIT = 1.3
"""Of a load's slowest stage, the most that the whole may take."""
FIRST_USES = 30
CASES = ("warm", "mix", "cold", "first-use", "itl-p99", "room-8")
GOALS = {"warm": 9500, "cold": 8000, "first-use": 0.7, "itl-p99": 1.2}
VLLM = {"warm": 3599, "cold": 2050, "first-use": 61, "first-use-host": 61}

Answer = TypeVar("Answer", Sized, Fetched, Placed)


def zipf_requests() -> list[int]:
    """The adapter of each request."""
    weights = [1 / (i + 1) for i in range(ADAPTERS)]
    return random.Random(SEED).choices(range(ADAPTERS), weights, k=REQUESTS)


def kind_of(adapter: int) -> AdapterKind:
    return AdapterKind(f"churn-{adapter}", 16)


def mixed_kind_of(adapter: int) -> AdapterKind:
    return AdapterKind(f"churn-mix-{adapter}", MIX[adapter % len(MIX)])


KindOf = Callable[[int], AdapterKind]


def drawn(kind: KindOf) -> list[AdapterKind]:
    """The adapters that are asked for."""
    return list(dict.fromkeys(kind(adapter) for adapter in zipf_requests()))


def churn(bench: Bench, engine: GpuEngine, case: str, fresh: Callable[[], None], kind: KindOf = kind_of) -> Result:
    """Serve the requests after ``fresh``, which brings the tiers into the case's state; one turn warms up."""
    digests = [kind(adapter).digest for adapter in zipf_requests()]
    assert len(set(digests)) == DRAWN
    samples, line, most = [], "", 0
    for turn in range(bench.repeats + 1):
        fresh()
        run = engine.serve(prompts(engine.spec, REQUESTS, PROMPT, turn), digests, NEW)
        if turn:
            samples.append(REQUESTS * NEW / run.total_s)
        line, most = run.host_line, max(most, run.most_adapter_bytes)
    known = bench.known(goal=GOALS.get(case), vllm=VLLM.get(case))
    settings = {
        **known,
        "max_loras": engine.serving.max_loras,
        "adapter_gib": round(most / 2**30, 3),
    }
    found = bench.result(case, "out_tok_s", "tok/s", samples, floor=churn_floor(bench, kind), settings=settings)
    loads = f"{most / 2**30:.2f} GiB of adapters, {engine.residency.loads} loads"
    against = beside(known, found.floor)
    print(f"{case:10} {found.value:8.0f} tok/s {found.spread} {against} {loads}   {line}", flush=True)
    return found


def against_resident(bench: Bench, engine: GpuEngine, images: RandomImages, case: str, kind: KindOf) -> list[Result]:
    """A case of adapters in host memory, then the same requests with room for all adapters; after the turn that warms
    up they are all there."""
    capped = churn(bench, engine, case, lambda: _warm(bench, engine, images), kind)
    _warm(bench, engine, images, adapter_bytes=0)
    name = "resident" if case == "warm" else f"{case}-resident"
    found = churn(bench, engine, name, lambda: None, kind)
    ratio = bench.result(case, "of_resident", "", [capped.value / found.value], floor=1.0)
    print(f"{case} has {ratio.value:.3f} of resident {beside(bench.known(goal=RESIDENT_GOAL), None)}", flush=True)
    return [capped, found, ratio]


def churn_floor(bench: Bench, kind: KindOf) -> float:
    """Prefill's products at the matrix rate, then two full batches of decodes, each over its own adapters."""
    spec = bench.base.spec
    weights = spec.num_layers * sum(group.in_features * group.out_features for group in spec.groups)
    prefill_ms = 2 * REQUESTS * PROMPT * weights / bench.ceilings.matrix_tflop_s / 1e9
    ranks = tuple(one.rank for one in drawn(kind))
    step_ms = decode_floor_ms(
        spec, bench.ceilings, Case("", REQUESTS // 2, DRAWN // 2, ranks[: DRAWN // 2]), PROMPT + NEW / 2
    )
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
    """Times the copies of its placements by events on their stream, from before the first one to after the last."""

    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]

    def _enqueue(self, pieces: Sequence[Piece]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(self._stream)
        super()._enqueue(pieces)
        end.record(self._stream)
        self.spans.append((start, end))


class Bringer:
    """Brings adapters in and takes them out again, one after the other, with nothing else running."""

    def __init__(self, engine: GpuEngine) -> None:
        assert engine.loader is not None
        self._engine = engine
        self._loader = engine.loader

    def host(self, digest: str) -> tuple[float, int]:
        """Milliseconds until an adapter is in host memory, and how many pages it takes."""
        start = time.perf_counter()
        self._loader.submit(FetchOrder(digest))
        fetched = self._until(Fetched)
        return (time.perf_counter() - start) * 1e3, fetched.pages

    def place(self, digest: str, pages: int) -> float:
        """Milliseconds until one in host memory is in the pool, and out of both again."""
        taken = self._take(pages, digest)
        start = time.perf_counter()
        self._loader.submit(PlaceOrder(digest, taken))
        self._until(Placed)
        return self._leave(digest, taken, start)

    def bring(self, digest: str) -> float:
        """Milliseconds until one in a file is in the pool."""
        start = time.perf_counter()
        self._loader.submit(FetchOrder(digest))
        taken = self._take(self._until(Sized).pages, digest)
        self._loader.submit(PlaceOrder(digest, taken))
        self._until(Placed)
        return self._leave(digest, taken, start)

    def _until(self, kind: type[Answer]) -> Answer:
        while True:
            self._engine.ready.acquire()
            for result in self._loader.results():
                assert not result.error, result.error
                if isinstance(result, kind):
                    return result

    def _take(self, pages: int, digest: str) -> tuple[Page, ...]:
        taken = self._engine.pool.allocate(pages, digest)
        assert taken is not None
        return taken

    def _leave(self, digest: str, taken: tuple[Page, ...], start: float) -> float:
        elapsed_ms = (time.perf_counter() - start) * 1e3
        self._engine.pool.release(taken)
        orders: tuple[LoadOrder, ...] = (DropOrder(digest, "hbm"), DropOrder(digest, "host"))
        for order in orders:
            self._loader.submit(order)
        return elapsed_ms


def first_use(bench: Bench, engine: GpuEngine, images: RandomImages, adapters_dir: Path) -> list[Result]:
    """Bring adapters in from host memory, then from files."""
    digests = list(images.kinds)[len(PROBES) : len(PROBES) + FIRST_USES]
    warm = FIRST_USES // 3
    size = payload_bytes(bench.base.spec, kind_of(0))
    copy_ms = size / host_bandwidth(size) * 1e3
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(memory: PoolMemory, wake: Callable[[], None]) -> Loader:
        loader = TimedLoader(bench.base.spec, memory, images, wake)
        loader.spans = spans
        return loader

    engine.use(timed, len(images.kinds) + 1)
    bringer = Bringer(engine)
    waits_ms = [bringer.place(digest, bringer.host(digest)[1]) for digest in digests]
    results = [
        _first_use(bench, "first-use", [start.elapsed_time(end) for start, end in spans[warm:]], copy_ms),
        _first_use(bench, "first-use-host", waits_ms[warm:], copy_ms),
    ]
    engine.use(disk_loader(bench, adapters_dir), len(images.kinds) + 1)
    bringer = Bringer(engine)
    read_ms, place_ms, all_ms = [], [], []
    for digest in digests:
        elapsed_ms, pages = bringer.host(digest)
        read_ms.append(elapsed_ms)
        place_ms.append(bringer.place(digest, pages))
        all_ms.append(bringer.bring(digest))
    slowest_ms = max(statistics.median(read_ms[warm:]), statistics.median(place_ms[warm:]))
    print(f"  reads {statistics.median(read_ms[warm:]):.3f} ms, placements {statistics.median(place_ms[warm:]):.3f} ms")
    results.append(_first_use(bench, "first-use-page-cache", all_ms[warm:], slowest_ms))
    ratio = [elapsed_ms / slowest_ms for elapsed_ms in all_ms[warm:]]
    results.append(bench.result("first-use-page-cache", "of_slowest_stage", "", ratio, floor=1.0))
    against = beside(bench.known(goal=STAGE_LIMIT), None)
    print(f"first-use-page-cache takes {results[-1].value:.2f} of its slowest stage {against}", flush=True)
    return results


def _first_use(bench: Bench, case: str, samples: Sequence[float], floor: float) -> Result:
    known = bench.known(goal=GOALS.get(case), vllm=VLLM.get(case))
    settings = {**known, "adapter_bytes": payload_bytes(bench.base.spec, kind_of(0))}
    found = bench.result(case, "added_ms", "ms", samples, floor=floor, settings=settings)
    print(f"{case:20} {found.value:8.3f} ms {found.spread} {beside(known, found.floor)}", flush=True)
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
    known = bench.known(goal=GOALS["itl-p99"])
    settings = {**known, "streams": STREAMS}
    found_ratio = bench.result("itl-p99", "ratio", "", samples, floor=1.0, settings=settings)
    print(f"itl-p99    {found_ratio.value:8.3f} {found_ratio.spread} {beside(known, found_ratio.floor)}", flush=True)
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


def _warm(bench: Bench, engine: GpuEngine, images: RandomImages, adapter_bytes: int | None = None) -> None:
    engine.use(random_loader(bench.base, images), ADAPTERS, adapter_bytes)
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
        results += against_resident(bench, engine, images, "warm", kind_of)
    if "mix" in chosen:
        mixed = RandomImages(bench.base.spec, [*PROBES, *drawn(mixed_kind_of)], torch.device("cuda"))
        results += against_resident(bench, engine, mixed, "mix", mixed_kind_of)
    if {"cold", "itl-p99", "first-use"} & set(chosen):
        with written(images) as folder:
            if "first-use" in chosen:
                results += first_use(bench, engine, images, folder)
            if "cold" in chosen:
                make_loader = disk_loader(bench, folder)
                results.append(churn(bench, engine, "cold", lambda: engine.use(make_loader, ADAPTERS)))
            if "itl-p99" in chosen:
                results.append(gaps(bench, engine, folder))
    if "room-8" in chosen:
        results += first_tokens(bench, engine, images)
    engine.close()
    return results


def main(arguments: list[str]) -> int:
    """Measure the chosen cases, then peers on the warm one."""
    parser = gpu_parser("churn")
    add_case_options(parser, CASES)
    options = parser.parse_args(arguments)
    bench = gpu_bench("churn", options)
    kinds = drawn(kind_of)
    results = ours(bench, kinds, options.cases)
    for peer_class in installed(options.peer if "warm" in options.cases else ()):
        with peer_class.serving(bench.base, kinds, REQUESTS, PEER_SLOTS) as peer:
            results.append(theirs(bench, peer))
    if options.record:
        record(results, ("torch", "triton"))
    return 0
