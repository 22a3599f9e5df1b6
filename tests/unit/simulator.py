"""A virtual engine around the real policy: a device whose memory is a dict, a loader with delays, and clients.

The device computes each token from the *contents of the pages* that a plan names, so a page reused too early, a lost
token or a wrong adapter changes the text. Clients know the text that they must get and check what they are told.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stencilpress.engine.eviction import Room
from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import Finished, Sampling, Step, Submit, pack_tokens
from stencilpress.engine.plan import (
    PENDING,
    Chunk,
    DropOrder,
    Fetched,
    FetchOrder,
    LoadOrder,
    LoadResult,
    Page,
    Placed,
    PlaceOrder,
    RequestKey,
    Sampled,
    Sized,
    StepPlan,
)
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Capacity, Residency
from stencilpress.engine.scheduler import Scheduler

VOCAB = 97


def next_token(adapter: str | None, history: Sequence[int]) -> int:
    """The model: a token that depends on the adapter and on every token so far."""
    return zlib.crc32(repr((adapter, list(history))).encode()) % VOCAB


def expected_text(adapter: str | None, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """What a request gets when it runs alone."""
    text: list[int] = []
    while len(text) < max_tokens:
        text.append(next_token(adapter, [*prompt, *text]))
        if text[-1] in stop_ids:
            break
    return text


@dataclass
class Device:
    """Pool memory as the device sees it, and the adapters that it can use."""

    page_tokens: int
    memory: dict[Page, dict[int, tuple[str | None, int]] | str] = field(default_factory=dict)
    drawn: dict[RequestKey, int] = field(default_factory=dict)
    adapters: dict[str, tuple[Page, ...]] = field(default_factory=dict)

    def text(self, adapter: str | None, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
        """What a request must get."""
        return expected_text(adapter, prompt, max_tokens, stop_ids)

    def run(self, plan: StepPlan, adapters: dict[str, tuple[Page, ...]] | None = None) -> list[Sampled]:
        """``adapters`` are those of the time when the step was launched."""
        if adapters is None:
            adapters = self.adapters
        keys = [chunk.key for segment in plan.segments for chunk in segment.chunks]
        slots = [chunk.slot for segment in plan.segments for chunk in segment.chunks]
        self._check_tables([chunk for segment in plan.segments for chunk in segment.chunks])
        assert len(set(keys)) == len(keys)
        assert len(set(slots)) == len(slots)
        assert len({segment.adapter for segment in plan.segments}) == len(plan.segments)
        for adapter in (segment.adapter for segment in plan.segments if segment.adapter is not None):
            assert all(self.memory[page] == adapter for page in adapters[adapter]), "an adapter in use was overwritten"
        return [sampled for segment in plan.segments for sampled in self._run_segment(segment.adapter, segment.chunks)]

    def _check_tables(self, chunks: Sequence[Chunk]) -> None:
        """Requests may share pages that they read, never one that somebody writes in this step or later."""
        uses = Counter(page for chunk in chunks for page in chunk.pages)
        for chunk in chunks:
            assert len(set(chunk.pages)) == len(chunk.pages)
            written = chunk.pages[chunk.start // self.page_tokens :]
            assert all(uses[page] == 1 for page in written), "a request writes a page that another one uses"

    def _run_segment(self, adapter: str | None, chunks: Sequence[Chunk]) -> Iterator[Sampled]:
        lengths = [len(chunk.tokens) for chunk in chunks]
        assert chunks
        assert lengths == sorted(lengths, key=lambda length: length > 1), "a prefill precedes a decode"
        for chunk in chunks:
            self._write(adapter, chunk)
            if chunk.draw is not None:
                history = self._read(adapter, chunk, chunk.start + len(chunk.tokens))
                known = list(chunk.draw.history)  # of one that is gone, the pending token stays unknown
                assert history[: len(known)] == known
                assert len(history) - len(known) <= 1
                assert chunk.draw.position == len(history) - chunk.draw.prompt_len
                self.drawn[chunk.key] = next_token(adapter, history)
                yield Sampled(chunk.key, self.drawn[chunk.key])

    def _write(self, adapter: str | None, chunk: Chunk) -> None:
        assert len(chunk.tokens) > 0
        assert chunk.start + len(chunk.tokens) <= len(chunk.pages) * self.page_tokens
        for position, token in enumerate(chunk.tokens, chunk.start):
            page = chunk.pages[position // self.page_tokens]
            content = self.memory.get(page)
            if isinstance(content, str) or content is None or position % self.page_tokens == 0:
                content = self.memory[page] = {}
            content[position] = (adapter, self.drawn[chunk.key] if token == PENDING else token)

    def _read(self, adapter: str | None, chunk: Chunk, length: int) -> list[int]:
        history = []
        for position in range(length):
            content = self.memory[chunk.pages[position // self.page_tokens]]
            assert not isinstance(content, str), "a KV page was overwritten by an adapter"
            owner, token = content[position]
            assert owner == adapter
            history.append(token)
        return history


class QuickDevice(Device):
    """A device for long runs that are about who runs and when: every token is 1, and memory is not looked at."""

    def text(self, _adapter: str | None, _prompt: Sequence[int], max_tokens: int, _stops: Sequence[int]) -> list[int]:
        return [1] * max_tokens

    def run(self, plan: StepPlan, _adapters: dict[str, tuple[Page, ...]] | None = None) -> list[Sampled]:
        chunks = (chunk for segment in plan.segments for chunk in segment.chunks)
        return [Sampled(chunk.key, 1) for chunk in chunks if chunk.draw is not None]


@dataclass
class Loader:
    """Carries out orders in sequence, at most ``speed`` a step. ``broken`` digests fail to be read.

    ``tells``: how large an adapter is is told a step before it has been read, so that its placement may be ordered.
    """

    device: Device
    needs: dict[str, int]
    broken: set[str] = field(default_factory=set)
    jammed: set[str] = field(default_factory=set)
    tells: bool = False
    told: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    hosted: set[str] = field(default_factory=set)
    orders: deque[LoadOrder] = field(default_factory=deque)
    fetches: list[str] = field(default_factory=list)

    def work(self, speed: int) -> list[LoadResult]:
        results: list[LoadResult] = []
        while speed > 0 and self.orders:
            order = self.orders.popleft()
            if isinstance(order, DropOrder):
                self._drop(order)
                continue
            if self.tells and isinstance(order, FetchOrder) and order.digest not in self.told:
                self.told.add(order.digest)
                self.orders.appendleft(order)
                return [*results, Sized(order.digest, self.needs[order.digest])]
            speed -= 1
            results.append(self._fetch(order) if isinstance(order, FetchOrder) else self._place(order))
        return results

    def _drop(self, order: DropOrder) -> None:
        if order.tier == "host":
            self.hosted.remove(order.digest)
        else:
            del self.device.adapters[order.digest]

    def _fetch(self, order: FetchOrder) -> Fetched:
        assert order.digest not in self.hosted
        self.told.discard(order.digest)
        self.fetches.append(order.digest)
        if order.digest in self.broken:
            self.unread.add(order.digest)
            return Fetched(order.digest, 0, 0, "no such file")
        self.unread.discard(order.digest)
        self.hosted.add(order.digest)
        return Fetched(order.digest, 1000, self.needs[order.digest])

    def _place(self, order: PlaceOrder) -> Placed:
        assert len(order.pages) == self.needs[order.digest]
        if order.digest in self.unread:
            return Placed(order.digest, "the read that it follows has failed")
        assert order.digest in self.hosted
        if order.digest in self.jammed:
            return Placed(order.digest, "the copy failed")
        for page in order.pages:
            self.device.memory[page] = order.digest
        self.device.adapters[order.digest] = order.pages
        return Placed(order.digest)


@dataclass
class Client:
    """One request and what its gateway has heard of it. ``began_at_step`` is that of its first token."""

    submit: Submit
    prompt: list[int]
    expected: list[int]
    came_at_step: int
    began_at_step: int | None = None
    text: list[int] = field(default_factory=list)
    finished: Finished | None = None


class Engine:
    """The real scheduler, pool and residency between the virtual device, loader and clients.

    ``ahead``: a step is planned while the one before it is in flight. The device computes as late as it may.
    ``quick``: a :class:`QuickDevice`, and the books are checked now and then only.
    ``eager``: the loader carries out orders at once, while the device has yet to compute the steps in flight.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        pages: int,
        needs: dict[str, int],
        max_cpu_loras: int = 4,
        ahead: bool = False,
        quick: bool = False,
        max_adapter_pages: int = 1 << 30,
        max_prefetched: int = 0,
    ) -> None:
        self.ahead = ahead
        self.eager = False
        self.loaded: list[LoadResult] = []
        self.check_every = 100 if quick else 1
        self.flights: deque[tuple[StepPlan, dict[str, tuple[Page, ...]]]] = deque()
        self.now_s = 0.0
        self.limits = limits
        self.pool = Pool(pages)
        self.room = Room(clock=lambda: self.now_s)
        prefetched = max_prefetched or limits.max_loras
        capacity = Capacity(max_cpu_loras, prefetched, max_adapter_pages=max_adapter_pages)
        self.residency = Residency(self.pool, self.room, capacity)
        self.prefixes = PrefixCache(self.pool, self.room, limits.page_tokens)
        self.scheduler = Scheduler(limits, self.pool, self.residency, self.prefixes, clock=lambda: self.now_s)
        self.device = (QuickDevice if quick else Device)(limits.page_tokens)
        self.loader = Loader(self.device, needs)
        self.max_cpu_loras = max_cpu_loras
        self.clients: dict[RequestKey, Client] = {}
        self.live: set[RequestKey] = set()
        self.parked: set[int] = set()
        self.steps = 0

    def submit(
        self,
        key: RequestKey,
        prompt: list[int],
        max_tokens: int,
        adapter: str | None = None,
        stop_ids: tuple[int, ...] = (),
        **asked: Any,
    ) -> Client:
        """``asked`` are further fields of :class:`Submit`."""
        submit = Submit(key[1], pack_tokens(prompt), adapter or "", max_tokens, Sampling(), stop_ids, **asked)
        expected = self.device.text(adapter, prompt, max_tokens, stop_ids)
        client = self.clients[key] = Client(submit, prompt, expected, self.steps)
        self.live.add(key)
        self.scheduler.add(key, submit)
        return client

    def step(
        self, *, load_speed: int = 100, in_flight: Sequence[RequestKey] = (), fails: bool = False
    ) -> StepPlan | None:
        """One turn of the worker's loop; ``in_flight`` requests are aborted while the device computes."""
        self.steps += 1
        self.now_s += 0.02
        for result in (*self.loaded, *self.loader.work(load_speed)):
            self.scheduler.loaded(result)
        kept, seated = self._kept(), set(self.scheduler._seats.taken)
        plan = self.scheduler.plan_ahead() if self.flights else self.scheduler.plan()
        self._check_plan(plan)
        orders = self.residency.take_orders()
        self._check_drops(orders, kept, seated & set(self.scheduler._seats.taken))
        self.loader.orders.extend(orders)
        idle = plan is None and not self.flights
        if plan is not None:
            self.flights.append((plan, dict(self.device.adapters)))
            for key in in_flight:
                self.scheduler.abort(key)
            self._check_books()
        self.loaded = self.loader.work(load_speed) if self.eager else []
        if self.flights and (plan is None or len(self.flights) > self.ahead):
            self._land(fails)
        self.deliver()
        self._check_books()
        if idle and not self.loader.orders and not self.loaded:
            assert {key[0] for key in self.live} <= self.parked, "nothing runs, nothing loads, and somebody waits"
        return plan

    def _land(self, fails: bool) -> None:
        """The oldest step ends; if it fails, so does the one after it, whose tokens it should have drawn."""
        while self.flights:
            plan, adapters = self.flights.popleft()
            if not fails:
                self.scheduler.commit(plan, self.device.run(plan, adapters))
                return
            self.scheduler.fail(plan, "the device is on fire")

    def deliver(self) -> None:
        """Every client hears what it is told, in order, once."""
        for connection, step in self.scheduler.take_replies().items():
            self._hear(connection, step)

    def run_until_idle(self, limit: int = 10_000) -> int:
        """Steps taken until no request is left. Fails when there are still some after ``limit``."""
        start = self.steps
        while self.flights or not self.scheduler.idle:
            assert self.steps - start < limit, f"still live: {sorted(self.live)}"
            self.step()
        self.deliver()
        assert not self.live
        return self.steps - start

    def _check_books(self) -> None:
        if self.steps % self.check_every == 0:
            self.scheduler.check()

    def _check_plan(self, plan: StepPlan | None) -> None:
        adapters = [s.adapter for s in plan.segments if s.adapter is not None] if plan else []
        assert len(adapters) <= self.limits.max_loras
        assert all(self.residency.ready(adapter) for adapter in adapters)
        assert self.residency.in_host <= self.max_cpu_loras
        if plan is not None:
            chunks = [chunk for segment in plan.segments for chunk in segment.chunks]
            assert plan.num_tokens <= self.limits.max_num_batched_tokens
            assert len(chunks) <= self.limits.max_num_seqs
            assert all(chunk.slot < self.limits.max_num_seqs for chunk in chunks)
            assert not {chunk.key[0] for chunk in chunks} & self.parked

    def _kept(self) -> set[str]:
        """What an operator has pinned in the pool."""
        known = (self.residency.known(digest) for digest in self.loader.needs)
        return {adapter.digest for adapter in known if adapter is not None and adapter.kept}

    def _check_drops(self, orders: Sequence[LoadOrder], kept: set[str], seated: set[RequestKey]) -> None:
        """No adapter is taken from a request that runs; an operator's only while one runs at most. ``seated`` are those
        who have been so since before the step."""
        for digest in (order.digest for order in orders if isinstance(order, DropOrder) and order.tier == "hbm"):
            adapter = self.residency.known(digest)
            assert adapter is None or not adapter.leases, "an adapter in use was evicted"
            assert digest not in kept or len(seated) <= 1, "a pinned adapter was evicted"

    def _hear(self, connection: int, step: Step) -> None:
        for token in step.tokens:
            client = self.clients[connection, token.id]
            assert client.finished is None, "a token after the terminal message"
            if client.began_at_step is None:
                client.began_at_step = self.steps
            client.text.append(token.token)
            assert token.token == client.expected[len(client.text) - 1]
        for finished in step.finished:
            client = self.clients[connection, finished.id]
            assert client.finished is None, "a second terminal message"
            client.finished = finished
            self.live.discard((connection, finished.id))
            _check_end(client, finished)


def _check_end(client: Client, finished: Finished) -> None:
    assert finished.prompt_tokens == len(client.prompt)
    assert finished.completion_tokens == len(client.text)
    assert bool(finished.code) == (finished.reason == "error")
    assert 0 <= finished.cold_start_ms <= finished.queue_ms
    limit_ms = client.submit.max_wait_ms
    if finished.code == "deadline":
        assert not client.text
        assert 0 < limit_ms < finished.queue_ms + 1e-6
    elif client.text and limit_ms:
        assert finished.queue_ms <= limit_ms + 1e-6, "served late"
    if finished.reason in ("stop", "length"):
        assert client.text == client.expected
        stopped = client.text[-1] in client.submit.stop_ids
        assert finished.reason == ("stop" if stopped else "length")


LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_loras=4,
    max_waiting=100,
    max_model_len=64,
    page_tokens=4,
    vocab_size=VOCAB,
)


def make_engine(
    *,
    pages: int = 100,
    needs: dict[str, int] | None = None,
    cpu_loras: int = 4,
    adapter_pages: int = 1 << 30,
    prefetched: int = 0,
    quick: bool = False,
    **limits: Any,
) -> Engine:
    adapters = needs if needs is not None else dict.fromkeys("ABCDEFGH", 2)
    return Engine(
        replace(LIMITS, **limits),
        pages=pages,
        needs=adapters,
        max_cpu_loras=cpu_loras,
        max_adapter_pages=adapter_pages,
        max_prefetched=prefetched,
        quick=quick,
    )


def shape(plan: StepPlan | None) -> dict[str | None, list[tuple[int, int]]]:
    """A plan as ``{adapter: [(request id, tokens), ...]}``."""
    assert plan is not None
    return {
        segment.adapter: [(chunk.key[1], len(chunk.tokens)) for chunk in segment.chunks] for segment in plan.segments
    }


def code(client: Client) -> str:
    assert client.finished is not None
    return client.finished.code


def check_nothing_is_left(engine: Engine) -> None:
    """All requests have had their one end, and every page is free once what idles is evicted."""
    assert all(client.finished is not None for client in engine.clients.values())
    assert engine.pool.kv == 0
    assert engine.pool.free + engine.pool.cached + engine.pool.adapter == engine.pool.total
    settle(engine)  # what was used of late may still be on its way back
    while engine.residency.evict_one():
        pass
    assert engine.pool.free == engine.pool.total


def settle(engine: Engine) -> None:
    """Step until nothing runs and nothing is on its way."""
    while engine.step() is not None or engine.loader.orders or engine.loaded:
        pass


class Storm:
    """Random traffic and random faults from one seed."""

    def __init__(self, seed: int, *, ahead: bool = False) -> None:
        self.random = random.Random(seed)
        draw = self.random.randint
        self.digests = [f"adapter-{i}" for i in range(draw(1, 10))]
        limits = Limits(
            max_num_seqs=draw(1, 8),
            max_num_batched_tokens=self.random.choice((1, 3, 8, 32)),
            max_loras=draw(1, 4),
            max_waiting=draw(1, 30),
            max_model_len=self.random.choice((24, 64)),
            page_tokens=self.random.choice((1, 4)),
            vocab_size=VOCAB,
            patience_steps=draw(1, 40),
        )
        self.engine = Engine(
            limits,
            pages=draw(10, 80),
            needs={digest: draw(1, 9) for digest in self.digests},
            max_cpu_loras=draw(1, 6),
            ahead=ahead,
            max_adapter_pages=self.random.choice((9, 20, 1 << 30)),
        )
        self.engine.loader.tells = self.random.random() < 0.5
        self.engine.eager = self.random.random() < 0.5
        self.rate = self.random.choice((0.05, 0.3, 1.0))
        self.tenants = draw(1, 5)
        self.prompts = [[self.random.randrange(VOCAB) for _ in range(longest)] for longest in (24, 24, 64)]
        self.last_id = 0

    def run(self, steps: int) -> Engine:
        """So many stormy steps, then calm until every request has ended. The pool's books are checked after each."""
        for _ in range(steps):
            self._events()
            live = sorted(self.engine.live)
            self.engine.step(
                load_speed=self.random.choice((0, 0, 1, 3)),
                in_flight=self.random.sample(live, min(len(live), 2)) if self.random.random() < 0.05 else (),
                fails=self.random.random() < 0.01,
            )
        for connection in (1, 2, 3):
            self._unpark(connection)
            self.engine.residency.keep(connection, (), ())
        self.engine.loader.broken.clear()
        self.engine.loader.jammed.clear()
        self.engine.run_until_idle()
        return self.engine

    def _events(self) -> None:
        while self.random.random() < self.rate / (1 + self.rate):
            self._submit()
        chance = self.random.random()
        if chance < 0.03 and self.engine.live:
            self.engine.scheduler.abort(self.random.choice(sorted(self.engine.live)))
        elif chance < 0.05:
            self._park(self.random.randint(1, 3))
        elif chance < 0.10 and self.engine.parked:
            self._unpark(self.random.choice(sorted(self.engine.parked)))
        elif chance < 0.105:
            self._hang_up(self.random.randint(1, 3))
        elif chance < 0.12:
            faults = self.random.choice((self.engine.loader.broken, self.engine.loader.jammed))
            faults ^= {self.random.choice(self.digests)}
        elif chance < 0.13:
            self.engine.scheduler.check_adapter(self.random.choice(self.digests))
        elif chance < 0.14:
            self.engine.scheduler.forget(self.random.choice(self.digests))
        elif chance < 0.15:
            wished = [
                self.random.sample(self.digests, self.random.randint(0, min(2, len(self.digests)))) for _ in range(2)
            ]
            assert self.engine.residency.keep(self.random.randint(1, 3), *wished) == ""

    def _submit(self) -> None:
        self.last_id += 1
        longest = self.engine.limits.max_model_len
        length = self.random.randint(1, longest)
        prompt = [self.random.randrange(VOCAB) for _ in range(length)]
        if self.random.random() < 0.5:  # it begins as others do
            common = self.random.choice(self.prompts)[: self.random.randint(1, length)]
            prompt[: len(common)] = common
        tenant = self.random.randrange(self.tenants)
        stop_ids = tuple(self.random.sample(range(VOCAB), self.random.choice((0, 2))))
        self.engine.submit(
            (self.random.randint(1, 3), self.last_id),
            prompt,
            self.random.randint(1, max(1, min(24, longest - len(prompt) + 1))),
            self.random.choice((None, *self.digests)),
            stop_ids,
            tenant=tenant,
            salt=b"salt %d" % tenant if tenant < 3 else b"",
            weight=1.0 + tenant,
            priority=self.random.choice((0, 0, -1, 3)),
            max_wait_ms=self.random.choice((0, 0, 0, 100, 2000)),
        )

    def _park(self, connection: int) -> None:
        self.engine.parked.add(connection)
        self.engine.scheduler.park(connection)

    def _unpark(self, connection: int) -> None:
        self.engine.parked.discard(connection)
        self.engine.scheduler.unpark(connection)

    def _hang_up(self, connection: int) -> None:
        """A gateway dies: its clients hear nothing more. The number stands for another gateway afterwards."""
        self.engine.scheduler.abort_connection(connection)
        self.engine.residency.keep(connection, (), ())
        self.engine.parked.discard(connection)
        for key in [key for key in self.engine.live if key[0] == connection]:
            self.engine.live.discard(key)
            del self.engine.clients[key]
