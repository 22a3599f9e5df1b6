"""A virtual engine around the real policy: a device and a loader of its own kind, and clients.

The clients know the text that they must get and check what they are told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stencilpress.engine.eviction import Room
from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import Finished, Sampling, Step, Submit, pack_tokens
from stencilpress.engine.plan import (
    DropOrder,
    LoadOrder,
    LoadResult,
    Page,
    RequestKey,
    StepPlan,
)
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Capacity, Residency
from stencilpress.engine.scheduler import Scheduler
from stencilpress.engine.seats import Seats
from tests.unit.books import check_books
from tests.unit.virtual_device import VOCAB, Device, Loader, QuickDevice


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
        self.risen: set[RequestKey] = set()
        self.scheduler._seats.leave = self._leave  # type: ignore[method-assign]
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
        kept, stayed = self._kept(), set(self.scheduler._seats.taken)
        self.risen.clear()
        plan = self.scheduler.plan_ahead() if self.flights else self.scheduler.plan()
        self._check_plan(plan)
        orders = self.residency.take_orders()
        self._check_drops(orders, kept, stayed - self.risen)
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
        if self.steps % (7 * self.check_every) == 0:
            check_books(self.scheduler, self.residency, self.prefixes, self.room)

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

    def _leave(self, request: Request) -> None:
        """Somebody gives up a seat, be it to have another at once."""
        self.risen.add(request.key)
        Seats.leave(self.scheduler._seats, request)

    def _kept(self) -> set[str]:
        """What an operator has pinned in the pool."""
        known = (self.residency.known(digest) for digest in self.loader.needs)
        return {adapter.digest for adapter in known if adapter is not None and adapter.kept}

    def _check_drops(self, orders: Sequence[LoadOrder], kept: set[str], stayed: set[RequestKey]) -> None:
        """No adapter is taken from a request that runs; an operator's only while one runs at most. ``stayed`` are those
        who have had their seats since before the step."""
        for digest in (order.digest for order in orders if isinstance(order, DropOrder) and order.tier == "hbm"):
            adapter = self.residency.known(digest)
            assert adapter is None or not adapter.leases, "an adapter in use was evicted"
            assert digest not in kept or len(stayed) <= 1, "a pinned adapter was evicted"

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
