"""The loop behind the real link: gateways that are driven by hand, a virtual device and loader, no threads."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import pytest

from stencilpress.engine import reports
from stencilpress.engine import worker as worker_module
from stencilpress.engine.eviction import Room
from stencilpress.engine.limits import Limits
from stencilpress.engine.link import Closed, Link, Received
from stencilpress.engine.messages import (
    Abort,
    Adapters,
    AskAdapters,
    AskHeld,
    AskPages,
    AskStats,
    Ensure,
    Ensured,
    Finished,
    Forget,
    Forgotten,
    FromEngine,
    Held,
    Keep,
    Kept,
    PageOwner,
    Pages,
    Sampling,
    Stats,
    Step,
    Submit,
    pack_tokens,
    unpack_tokens,
)
from stencilpress.engine.plan import (
    DropOrder,
    Fetched,
    LoadOrder,
    LoadResult,
    Placed,
    Sampled,
    Sized,
    StepPlan,
)
from stencilpress.engine.pool import Pool, PoolError
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Capacity, Residency
from stencilpress.engine.scheduler import Scheduler
from stencilpress.engine.worker import MAX_FAILED_STEPS, DeviceLostError, Worker
from tests.fakes.engine import Options, listen
from tests.fakes.peer import Peer
from tests.unit.virtual_device import VOCAB, Device, Loader, expected_text

TURNS = 5000


class WakingLoader:
    """The virtual loader behind the interface of the real one: answers wait for the next drain."""

    def __init__(self, loader: Loader, wake: Callable[[], None]) -> None:
        self.loader = loader
        self._wake = wake
        self._results: deque[LoadResult] = deque()

    def held_back(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, order: LoadOrder) -> None:
        self.loader.orders.append(order)
        self._results.extend(self.loader.work(1))
        if not isinstance(order, DropOrder):
            self._wake()

    def results(self) -> list[LoadResult]:
        results = list(self._results)
        self._results.clear()
        return results


class FallibleDevice:
    """The virtual device, which raises for a prompt that begins with 13 and forgets to draw for one with 14."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.on_run: Callable[[StepPlan], None] | None = None

    def run(self, plan: StepPlan) -> Sequence[Sampled]:
        if self.on_run is not None:
            self.on_run(plan)
        begins = {chunk.tokens[0] for segment in plan.segments for chunk in segment.chunks if chunk.start == 0}
        if 13 in begins:
            raise RuntimeError("device-side assert")
        return [] if 14 in begins else self.device.run(plan)


class LaunchingDevice(FallibleDevice):
    """The same, but it computes a step as late as it is asked for the result, while the next is planned."""

    def launch(self, plan: StepPlan) -> Callable[[], Sequence[Sampled]]:
        adapters = dict(self.device.adapters)
        begins = {chunk.tokens[0] for segment in plan.segments for chunk in segment.chunks if chunk.start == 0}
        if self.on_run is not None:
            self.on_run(plan)
        if 13 in begins:
            raise RuntimeError("device-side assert")
        return lambda: [] if 14 in begins else self.device.run(plan, adapters)


class Shop:
    """An engine and its gateways."""

    def __init__(self, path: Path, kind: type[FallibleDevice]) -> None:
        self.path = path
        limits = Limits(
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_loras=2,
            max_waiting=100,
            max_model_len=2000,
            page_tokens=16,
            vocab_size=VOCAB,
        )
        self.pool = Pool(600)
        self.link = Link(listen(path), Options().welcome())
        room = Room()
        self.residency = Residency(self.pool, room, Capacity(max_cpu_loras=4, max_prefetched=2))
        self.prefixes = PrefixCache(self.pool, room, limits.page_tokens)
        self.scheduler = Scheduler(limits, self.pool, self.residency, self.prefixes)
        device = Device(limits.page_tokens)
        self.loader = WakingLoader(Loader(device, dict.fromkeys("ABC", 3)), self.link.wake)
        self.device = kind(device)
        self.worker = Worker(self.scheduler, self.residency, self.loader, self.device, self.link)
        self.peers: list[Gateway] = []

    def gateway(self, **sizes: int) -> Gateway:
        peer = Peer(self.path, **sizes)
        peer.hello()
        self.worker.step()  # accepts
        self.worker.step()  # greets
        peer.welcomed()
        self.peers.append(Gateway(peer))
        return self.peers[-1]

    def until(self, done: Callable[[], bool]) -> None:
        """Let the engine and every reading gateway take turns."""
        for _ in range(TURNS):
            for gateway in self.peers:
                gateway.hear()
            if done():
                return
            self.worker.step()
        raise AssertionError("it does not come to pass")


class Gateway:
    """What one gateway has been told, request by request."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.reads = True
        self.texts: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.answers: list[FromEngine] = []

    def submit(self, id_: int, prompt: list[int], max_tokens: int, adapter: str = "") -> list[int]:
        """Returns the text that must come."""
        self.peer.send(Submit(id_, pack_tokens(prompt), adapter, max_tokens, Sampling()))
        self.texts[id_] = []
        return expected_text(adapter or None, prompt, max_tokens, ())

    def hear(self) -> None:
        for message in self.peer.receive() if self.reads else ():
            if not isinstance(message, Step):
                self.answers.append(message)
                continue
            for token in message.tokens:
                assert token.id not in self.finished
                self.texts[token.id].append(token.token)
            for finished in message.finished:
                assert finished.id not in self.finished
                self.finished[finished.id] = finished

    def ended(self, *ids: int) -> Callable[[], bool]:
        return lambda: set(ids) <= set(self.finished)


def plain(finished: Finished) -> Finished:
    """Without the times, which are real ones here."""
    return msgspec.structs.replace(finished, queue_ms=0.0, cold_start_ms=0.0)


@pytest.fixture(params=[FallibleDevice, LaunchingDevice])
def shop(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(tmp_path / "engine.sock", request.param)
    yield shop
    shop.scheduler.check()
    shop.link.close()
    for gateway in shop.peers:
        gateway.peer.close()


def test_base_and_adapters_are_served_to_several_gateways(shop: Shop) -> None:
    first, second = shop.gateway(), shop.gateway()
    expected = [
        first.submit(1, [1, 2, 3], 9),
        first.submit(2, [1, 2, 3], 9, "A"),
        second.submit(1, [1, 2, 3], 9, "B"),
    ]
    shop.until(lambda: first.ended(1, 2)() and second.ended(1)())
    assert [first.texts[1], first.texts[2], second.texts[1]] == expected
    assert plain(first.finished[2]) == Finished(2, "length", 3, 9)


def test_a_missing_adapter_is_the_requests_own_fault(shop: Shop) -> None:
    shop.loader.loader.broken.add("A")
    gateway = shop.gateway()
    gateway.submit(1, [1], 3, "A")
    expected = gateway.submit(2, [1], 3)
    shop.until(gateway.ended(1, 2))
    assert (gateway.finished[1].code, gateway.finished[1].message) == ("adapter_unavailable", "no such file")
    assert gateway.texts[2] == expected


def test_a_deadline_ends_the_sleep_of_an_engine_that_has_nothing_to_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapter never comes from disk; no message and no load wakes the loop."""
    monkeypatch.setattr(shop.loader, "submit", lambda _: None)
    gateway = shop.gateway()
    asleep: list[float] = []
    poll = shop.link.poll

    def watched(timeout_s: float) -> Sequence[Received | Closed]:
        asleep.append(timeout_s)
        return poll(timeout_s)

    monkeypatch.setattr(shop.link, "poll", watched)
    gateway.peer.send(Submit(1, pack_tokens([1]), "A", 3, Sampling(), max_wait_ms=40))
    shop.until(gateway.ended(1))
    assert (gateway.finished[1].reason, gateway.finished[1].code) == ("error", "deadline")
    assert gateway.finished[1].queue_ms >= 40
    assert gateway.finished[1].cold_start_ms == gateway.finished[1].queue_ms
    assert any(0 < timeout_s <= 0.04 for timeout_s in asleep)


def test_an_abort_is_answered_and_the_rest_goes_on(shop: Shop) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [1], 1000)
    expected = gateway.submit(2, [2], 20)
    shop.until(lambda: bool(gateway.texts[1]))
    gateway.peer.send(Abort(1))
    gateway.peer.send(Abort(99))
    shop.until(gateway.ended(1, 2))
    assert gateway.finished[1].reason == "aborted"
    assert gateway.finished[1].completion_tokens == len(gateway.texts[1])
    assert gateway.texts[2] == expected


def test_a_gateway_that_hangs_up_frees_its_pages(shop: Shop) -> None:
    gateway, other = shop.gateway(), shop.gateway()
    gateway.submit(1, [1], 1000, "A")
    shop.until(lambda: bool(gateway.texts[1]))
    shop.peers.remove(gateway)
    gateway.peer.close()
    expected = other.submit(1, [2], 5)
    shop.until(other.ended(1))
    assert other.texts[1] == expected
    assert shop.scheduler.idle
    assert shop.pool.kv == 0


def test_ensure_answers_when_the_adapter_has_been_read(shop: Shop) -> None:
    shop.loader.loader.broken.add("B")
    gateway = shop.gateway()
    for id_, adapter in enumerate("ABA", 1):
        gateway.peer.send(Ensure(id_, adapter))
    shop.until(lambda: len(gateway.answers) == 3)
    assert sorted(gateway.answers, key=str) == [Ensured(1, ""), Ensured(2, "no such file"), Ensured(3, "")]
    gateway.peer.send(Ensure(4, "A"))
    gateway.peer.send(Ensure(5, "B"))
    shop.until(lambda: len(gateway.answers) == 5)
    assert gateway.answers[3:] == [Ensured(4, ""), Ensured(5, "no such file")]
    assert shop.loader.loader.fetches == ["A", "B"]


def test_ensure_is_answered_though_the_read_has_failed_that_a_placement_follows(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[LoadOrder] = []
    monkeypatch.setattr(shop.loader, "submit", orders.append)
    gateway = shop.gateway()
    gateway.submit(1, [1], 1, "A")
    shop.until(lambda: bool(orders))
    shop.loader._results.append(Sized("A", 3))
    shop.until(lambda: len(orders) == 2)
    shop.loader._results.append(Fetched("A", 0, 0, "damaged"))
    shop.until(gateway.ended(1))
    shop.residency.faults.clear("A")  # its pause is over
    gateway.peer.send(Ensure(2, "A"))
    shop.until(lambda: bool(shop.worker._ensures))
    shop.loader._results.append(Placed("A", "the read that was to be followed has failed"))
    shop.until(lambda: bool(gateway.answers))
    assert gateway.answers == [Ensured(2, "the read that was to be followed has failed")]


def test_ensures_beyond_the_bound_are_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_ENSURES", 1)
    gateway = shop.gateway()
    gateway.peer.send(Ensure(1, "A"))
    gateway.peer.send(Ensure(2, "B"))
    shop.until(lambda: len(gateway.answers) == 2)
    assert [(answer.id, answer.error[:10]) for answer in gateway.answers if isinstance(answer, Ensured)] == [
        (2, "overloaded"),
        (1, ""),
    ]


def test_adapters_are_shown_the_one_used_last_first(shop: Shop) -> None:
    shop.loader.loader.broken.add("C")
    gateway = shop.gateway()
    gateway.submit(1, [1], 1, "A")
    shop.until(gateway.ended(1))
    gateway.submit(2, [1], 1, "C")
    shop.until(gateway.ended(2))
    gateway.submit(3, [1], 1000, "B")
    gateway.submit(4, [1], 1000, "B")
    shop.until(lambda: bool(gateway.texts[3] and gateway.texts[4]))
    gateway.peer.send(AskAdapters(7))
    gateway.peer.send(AskAdapters(8, offset=1, limit=1))
    shop.until(lambda: len(gateway.answers) == 2)
    [all_, second] = gateway.answers
    assert isinstance(all_, Adapters)
    assert isinstance(second, Adapters)
    assert (all_.id, all_.total, second.total) == (7, 3, 3)
    b, c, a = all_.adapters
    assert (b.digest, b.tier, b.pages, b.active, b.hits, b.misses) == ("B", "hbm", 3, 2, 1, 1)
    assert (c.digest, c.tier, c.error, c.reads) == ("C", "disk", "no such file", 0)
    assert (a.digest, a.tier, a.active, a.reads, a.copies, a.host_bytes) == ("A", "hbm", 0, 1, 1, 1000)
    assert second.adapters == (c,)


def test_a_map_of_the_pool_says_who_holds_which_page(shop: Shop) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [1], 1, "A")
    gateway.peer.send(Submit(2, pack_tokens([1] * 40), "", 1000, Sampling(), tenant=5, salt=b"salt"))
    gateway.texts[2] = []
    shop.until(lambda: gateway.ended(1)() and bool(gateway.texts[2]))
    gateway.peer.send(AskPages(7))
    shop.until(lambda: bool(gateway.answers))
    [pages] = gateway.answers
    assert isinstance(pages, Pages)
    numbers = unpack_tokens(pages.runs)
    counts = Counter[PageOwner]()
    for index, count in zip(numbers[::2], numbers[1::2], strict=True):
        counts[pages.owners[index]] += count
    assert counts.total() == pages.total == shop.pool.total
    assert counts[PageOwner("adapter", "A")] == 3
    assert counts[PageOwner("cached")] == 2
    assert counts[PageOwner("kv", "5")] >= 1
    assert counts[PageOwner("free")] + counts[PageOwner("quarantined")] + 5 + counts[PageOwner("kv", "5")] == 600


def test_what_a_gateway_keeps_is_pinned_until_it_hangs_up(shop: Shop) -> None:
    gateway, other = shop.gateway(), shop.gateway()
    gateway.peer.send(Keep(1, pinned=("A",), preloaded=("B",)))
    shop.until(lambda: shop.residency.ready("A") and shop.residency.ready("B"))
    assert gateway.answers == [Kept(1, "")]
    assert [shop.residency.known(digest).kept for digest in "AB"] == [True, False]  # type: ignore[union-attr]
    shop.peers.remove(gateway)
    gateway.peer.close()
    other.submit(1, [1], 3)
    shop.until(other.ended(1))
    assert not shop.residency.known("A").kept  # type: ignore[union-attr]


def test_a_deleted_versions_memory_is_free_when_its_last_request_has_ended(shop: Shop) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [1], 1, "B")
    shop.until(gateway.ended(1))
    baseline = shop.pool.free
    gateway.peer.send(Submit(2, pack_tokens([1] * 40), "A", 300, Sampling(), tenant=1, salt=b"salt"))
    gateway.texts[2] = []
    shop.until(lambda: len(gateway.texts[2]) > 2)
    gateway.peer.send(Forget(3, "A"))
    shop.until(lambda: bool(gateway.answers))
    assert gateway.answers == [Forgotten(3, 3 + 2)]
    shop.until(gateway.ended(2))
    assert gateway.texts[2] == expected_text("A", [1] * 40, 300, ()), "it ends on the version it began with"
    gateway.peer.send(Forget(4, "A"))
    shop.until(lambda: len(gateway.answers) == 2)
    assert gateway.answers[1] == Forgotten(4, 0)
    shop.pool.retire(shop.pool.begun)
    assert shop.pool.free == baseline
    assert shop.residency.known("A") is None
    assert shop.loader.loader.hosted == {"B"}


def test_what_is_held_is_told_in_parts_and_ends_with_its_deletion(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_HELD_SHOWN", 2)
    gateway = shop.gateway()
    for id_, adapter in enumerate(("", "C", "A", "B"), 1):
        gateway.peer.send(Submit(id_, pack_tokens([1] * 40), adapter, 1, Sampling(), tenant=1, salt=b"salt"))
        gateway.texts[id_] = []
        shop.until(gateway.ended(id_))
    gateway.peer.send(AskHeld(5))
    gateway.peer.send(AskHeld(6, after="B"))
    gateway.peer.send(Forget(7, "A"))
    gateway.peer.send(Forget(8, "C"))
    gateway.peer.send(AskHeld(9))
    shop.until(lambda: len(gateway.answers) == 5)
    assert gateway.answers == [
        Held(5, ("A", "B")),
        Held(6, ("C",)),
        Forgotten(7, 0),
        Forgotten(8, 0),
        Held(9, ("B",)),
    ]


def test_what_only_its_prefixes_have_left_is_held_too(shop: Shop) -> None:
    gateway = shop.gateway()
    gateway.peer.send(Submit(1, pack_tokens([1] * 40), "A", 1, Sampling(), tenant=1, salt=b"salt"))
    gateway.texts[1] = []
    shop.until(gateway.ended(1))
    shop.residency.forget("A")
    assert shop.residency.known("A") is None
    assert list(shop.scheduler.held()) == ["A"]
    assert shop.pool.cached == 2
    shop.scheduler.forget("A")
    assert list(shop.scheduler.held()) == []
    assert shop.pool.cached == 0


def test_stats_tell_what_runs(shop: Shop) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [1, 2], 1000)
    shop.until(lambda: len(gateway.texts[1]) > 3)
    gateway.peer.send(AskStats(7))
    shop.until(lambda: bool(gateway.answers))
    [stats] = gateway.answers
    assert isinstance(stats, Stats)
    assert (stats.id, stats.running, stats.waiting, stats.prompt_tokens) == (7, 1, 0, 2)
    assert stats.pages_free + stats.pages_kv + stats.pages_adapter == stats.pages_total == 600


def test_a_step_that_raises_ends_its_requests_alone(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [13], 5)
    shop.until(gateway.ended(1))
    assert (gateway.finished[1].reason, gateway.finished[1].code) == ("error", "internal")
    assert "device-side assert" in caplog.text
    expected = gateway.submit(2, [1], 5)
    shop.until(gateway.ended(2))
    assert gateway.texts[2] == expected


def test_a_runner_that_answers_wrongly_is_a_failed_step(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [14], 5)
    shop.until(gateway.ended(1))
    assert gateway.finished[1].code == "internal"
    assert "do not match" in caplog.text
    gateway.submit(2, [1], 5)
    shop.until(gateway.ended(2))
    assert gateway.finished[2].reason == "length"


def test_a_device_that_fails_every_step_is_given_up(shop: Shop) -> None:
    gateway = shop.gateway()
    for id_ in range(MAX_FAILED_STEPS - 1):
        gateway.submit(id_, [13], 5)
        shop.until(gateway.ended(id_))
    gateway.submit(MAX_FAILED_STEPS, [13], 5)
    with pytest.raises(DeviceLostError):
        shop.until(gateway.ended(MAX_FAILED_STEPS))


def test_failures_of_single_requests_never_add_up(shop: Shop) -> None:
    gateway = shop.gateway()
    for id_ in range(2 * MAX_FAILED_STEPS):
        gateway.submit(id_, [13 * (id_ % 2)], 2)
        shop.until(gateway.ended(id_))


def test_a_full_reply_ring_stalls_its_own_gateway_and_loses_nothing(shop: Shop) -> None:
    slow, fast = shop.gateway(), shop.gateway(reply_bytes=1 << 20)
    slow.reads = False
    expected = [slow.submit(1, [1, 2], 700), slow.submit(2, [3], 700, "A")]
    longer = fast.submit(1, [4], 1000)
    shop.until(fast.ended(1))
    assert fast.texts[1] == longer
    assert shop.scheduler.stats(0).running == 2, "they keep their seats, for nobody waits"
    slow.reads = True
    shop.until(slow.ended(1, 2))
    assert [slow.texts[1], slow.texts[2]] == expected


def test_a_gateway_that_only_talks_is_dropped(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_HELD", 20)
    deaf, other = shop.gateway(), shop.gateway()
    deaf.reads = False
    for id_ in range(600):
        deaf.peer.send(AskStats(id_))
        shop.worker.step()
        if len(shop.link._connections) == 1:
            break
    expected = other.submit(1, [4], 9)
    shop.until(other.ended(1))
    assert other.texts[1] == expected
    assert not shop.worker._held
    assert len(shop.link._connections) == 1


def test_an_id_used_twice_drops_the_gateway(shop: Shop) -> None:
    gateway, other = shop.gateway(), shop.gateway()
    gateway.submit(1, [1], 1000)
    gateway.submit(1, [1], 1000)
    expected = other.submit(1, [4], 9)
    shop.until(other.ended(1))
    assert other.texts[1] == expected
    assert len(shop.link._connections) == 1
    assert shop.pool.kv == 0


def test_stopping_finishes_the_step_and_ends_every_request(shop: Shop) -> None:
    """SIGTERM comes while the device computes."""
    gateway = shop.gateway()
    expected = gateway.submit(1, [1], 1000)
    gateway.peer.send(Ensure(5, "C"))
    shop.device.on_run = lambda plan: signal.raise_signal(signal.SIGTERM) if plan.number == 3 else None
    before = signal.signal(signal.SIGTERM, lambda *_: shop.worker.stop())
    try:
        shop.worker.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    gateway.hear()
    assert gateway.texts[1] == expected[:3]
    assert plain(gateway.finished[1]) == Finished(1, "aborted", 1, 3)
    assert shop.pool.kv == 0


def test_stopping_answers_what_is_open(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = shop.gateway()
    monkeypatch.setattr(shop.loader, "submit", lambda _: shop.worker.stop())
    gateway.peer.send(Ensure(1, "A"))
    shop.worker.run()
    gateway.hear()
    assert gateway.answers == [Ensured(1, "the engine is shutting down")]
    shop.worker.stop()
    shop.link.wake()  # as the loader's thread may


def test_the_books_are_checked_when_the_engine_falls_idle(shop: Shop) -> None:
    gateway = shop.gateway()
    gateway.submit(1, [1], 2)
    shop.until(gateway.ended(1))
    shop.pool._free.append(shop.pool._free[0])
    gateway.submit(2, [1], 2)
    with pytest.raises(PoolError, match="free twice"):
        shop.until(lambda: False)
    shop.pool._free.pop()
