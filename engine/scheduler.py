"""Who runs: continuous batching with chunked prefill over one pool, base and any adapters in one step.

A request waits in its adapter's line (engine/waiting.py), is *seated* with KV pages for all its tokens and a lease of
its adapter, and runs until it ends or is preempted. The order is first come, first served, bent in two ways: a cold
adapter holds up its own requests alone, and a request of a seated adapter may pass an older one that lacks an adapter
slot or room for its adapter, for a while (engine/turns.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from stencilpress.engine.flight import Batch, Flight
from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import Finished, FinishReason, Pages, Stats, Step, Submit, Token, unpack_tokens
from stencilpress.engine.plan import FAILED, Fetched, LoadResult, RequestKey, Sampled, StepPlan
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.reports import page_map
from stencilpress.engine.request import Request, State
from stencilpress.engine.residency import Residency
from stencilpress.engine.seats import Seats
from stencilpress.engine.turns import Turns
from stencilpress.engine.waiting import Waiting


@dataclass(slots=True)
class _Outgoing:
    tokens: list[Token] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class Scheduler:
    """Turns requests into step plans and draws into replies. One thread; nothing here touches a device."""

    def __init__(self, limits: Limits, pool: Pool, residency: Residency, prefixes: PrefixCache) -> None:
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._requests: dict[RequestKey, Request] = {}
        self._connections: dict[int, dict[RequestKey, Request]] = {}
        self._waiting = Waiting()
        self._prefixes = prefixes
        self._seats = Seats(limits, pool, residency, prefixes)
        self._parked: set[int] = set()
        self._outgoing: dict[int, _Outgoing] = {}
        self._flights: deque[Flight] = deque()
        self._turns = Turns(
            self._waiting,
            residency,
            self._seats.granted,
            max_loras=limits.max_loras,
            patience_steps=limits.patience_steps,
        )
        self._arrivals = 0
        self._blocked: int | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._preemptions = 0

    # Requests come and go

    def add(self, key: RequestKey, submit: Submit) -> None:
        """Queue a request, or answer it at once if it can never run. Raises ``ValueError`` for an id in use."""
        if key in self._requests:
            raise ValueError(f"request id {key[1]} is in use")
        try:
            prompt = unpack_tokens(submit.prompt)
        except ValueError:
            prompt = []
        self._arrivals += 1
        request = Request(
            key=key,
            arrival=self._arrivals,
            adapter=submit.adapter or None,
            history=prompt,
            prompt_len=len(prompt),
            max_tokens=submit.max_tokens,
            sampling=submit.sampling,
            stop_ids=frozenset(submit.stop_ids),
            tenant=submit.tenant,
            salt=submit.salt,
        )
        refusal = self._refuse_new(request)
        self._requests[key] = request
        self._connections.setdefault(key[0], {})[key] = request
        if refusal is None:
            self._wait(request)
        else:
            self._end(request, "error", *refusal)

    def abort(self, key: RequestKey) -> None:
        """End a request, whatever it is doing; nothing if it has ended already."""
        request = self._requests.get(key)
        if request is not None:
            self._end(request, "aborted")

    def abort_connection(self, connection: int) -> None:
        """Forget a gateway that is gone: its requests, its pages and what it was to be told."""
        for key in list(self._connections.get(connection, ())):
            self.abort(key)
        self._outgoing.pop(connection, None)
        self._parked.discard(connection)

    def abort_all(self) -> None:
        """End every request with its terminal message: the engine shuts down."""
        for key in list(self._requests):
            self.abort(key)

    def park(self, connection: int) -> None:
        """Plan nothing for this gateway: its reply ring is full. Its requests give up their seats if others wait."""
        if connection not in self._parked:
            for request in self._standing(connection):
                self._leave_line(request)
            self._parked.add(connection)

    def unpark(self, connection: int) -> None:
        """Its reply ring has room again: its requests step back into their places."""
        if connection in self._parked:
            self._parked.discard(connection)
            for request in self._standing(connection):
                self._wait(request)

    def loaded(self, result: LoadResult) -> None:
        """The loader's answer, with what it means for the requests that wait for that adapter."""
        self._residency.completed(result)
        if result.error or isinstance(result, Fetched):
            for request in self._waiting.line(result.digest):
                refusal = self._refuse(request)
                if refusal is not None:
                    self._end(request, "error", *refusal)

    def check_adapter(self, digest: str) -> None:
        """Have an adapter read and checked, in its turn among the requests."""
        self._arrivals += 1
        self._residency.check(digest, self._arrivals)

    def forget(self, adapter: str) -> int:
        """An adapter is no more. Returns the pages that running requests hold of it, and of its common prefixes."""
        return self._residency.forget(adapter) + self._prefixes.forget(adapter)

    # Steps

    def plan(self) -> StepPlan | None:
        """The next step: decodes first, then prefills, then newcomers. None if nothing can run now.

        Takes pages, changes nothing on the device. Every plan is followed by :meth:`commit` or :meth:`fail`.
        """
        if self._flights:
            raise RuntimeError(f"step {self._flights[0].plan.number} is still in flight")
        self._turns.begin_step(self._arrivals)
        if self._parked and len(self._waiting):
            for request in list(self._parked_seats()):
                self._preempt(request)
        batch = Batch(self._limits.max_num_batched_tokens)
        self._plan_seated(batch)
        self._plan_newcomers(batch)
        return self._take_off(batch)

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one in flight, whose tokens are not known yet. Nobody is preempted: where somebody should
        be, None, and :meth:`plan` does it once the step has landed. None also if nothing can run.

        A request that ends meanwhile was computed in vain. Also followed by :meth:`commit` or :meth:`fail`, in order.
        """
        if len(self._flights) != 1:
            raise RuntimeError(f"{len(self._flights)} steps are in flight")
        if (len(self._waiting) and self._parked) or self._flights[0].heeds_history:
            return None
        if not all(self._seats.grow(request) for request in self._going_on() if request.drawing):
            return None
        self._turns.begin_step(self._arrivals)
        batch = Batch(self._limits.max_num_batched_tokens)
        self._plan_seated(batch)
        self._plan_newcomers(batch)
        return self._take_off(batch)

    def _take_off(self, batch: Batch) -> StepPlan | None:
        waits = [arrival for arrival in (self._blocked, self._turns.aged_squeeze()) if arrival is not None]
        self._residency.pump(newest=min(waits, default=None))
        segments = batch.segments()
        if not segments:
            return None
        self._steps += 1
        self._pool.begin(self._steps)
        plan = StepPlan(self._steps, segments)
        self._flights.append(Flight(plan, batch.requests))
        return plan

    def commit(self, plan: StepPlan, sampled: Sequence[Sampled]) -> None:
        """Take what the step computed, the oldest in flight.

        Raises ``ValueError``, and changes nothing, unless every draw has its token.
        """
        self._must_be_in_flight(plan)
        chunks = [chunk for segment in plan.segments for chunk in segment.chunks]
        if [chunk.key for chunk in chunks if chunk.draw is not None] != [draw.key for draw in sampled]:
            raise ValueError(f"step {plan.number}: the draws do not match the plan")
        on_board = self._land(plan)
        for chunk in chunks:
            request = on_board[chunk.key]
            if request.seated:
                request.landed(chunk)
                self._seats.landed(request, len(chunk.tokens))
        for draw in sampled:
            request = on_board[draw.key]
            if request.seated:
                self._deliver(request, draw)

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step raised: end its requests with code ``internal``. They are not tried again."""
        self._must_be_in_flight(plan)
        for request in self._land(plan).values():
            if request.seated:
                self._end(request, "error", "internal", message)

    def take_replies(self) -> dict[int, Step]:
        """What each gateway is to be told since the last call."""
        outgoing, self._outgoing = self._outgoing, {}
        return {
            connection: Step(tuple(replies.tokens), tuple(replies.finished)) for connection, replies in outgoing.items()
        }

    # Seen from outside

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._requests

    def stats(self, ask: int) -> Stats:
        """Gauges and counters, as the answer to question ``ask``."""
        return Stats(
            id=ask,
            running=len(self._seats.taken),
            waiting=self._unseated,
            pages_total=self._pool.total,
            pages_free=self._pool.free,
            pages_kv=self._pool.kv + self._pool.cached - self._prefixes.idle_pages,
            pages_adapter=self._pool.adapter,
            adapters_hbm=self._residency.in_hbm,
            adapters_host=self._residency.in_host,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            preemptions=self._preemptions,
            adapter_loads=self._residency.loads,
            adapter_evictions=self._residency.evictions,
            pages_cached=self._prefixes.idle_pages,
            cached_tokens=self._prefixes.hit_tokens,
            adapter_host_bytes=self._residency.host.bytes,
            adapter_failures=self._residency.failures,
        )

    def waiting_for(self, adapter: str) -> int:
        """Requests in an adapter's line."""
        return len(self._waiting.line(adapter))

    def page_map(self, ask: int) -> Pages:
        """Who holds which page, as the answer to question ``ask``."""
        return page_map(self._pool, lambda key: self._requests[key].tenant, ask)

    def check(self) -> None:
        """Raise :class:`PoolError` unless every page is free, common, or held by exactly one request or adapter."""
        self._pool.check(chain(self._seats.holdings(), self._residency.holdings()))

    # Refusals

    def _refuse_new(self, request: Request) -> tuple[str, str] | None:
        limits, prompt = self._limits, request.history
        if not prompt or request.max_tokens < 1 or min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            return "internal", "malformed request: no prompt, nothing to generate, or ids outside the vocabulary"
        if len(prompt) + request.max_tokens > limits.max_model_len:
            return "context_exceeded", f"prompt and answer exceed the context of {limits.max_model_len} tokens"
        if self._queued(request.key[0]) >= limits.max_waiting + self._seats.free:
            return "overloaded", f"{limits.max_waiting} requests are waiting"
        return None

    def _refuse(self, request: Request) -> tuple[str, str] | None:
        """Why this request can never run, by what is known of its adapter now."""
        needs = self._limits.pages_for(request.prompt_len + request.max_tokens)
        if request.adapter is not None:
            failure = self._residency.failure(request.adapter)
            if failure:
                return "adapter_unavailable", failure
            if self._residency.too_large(request.adapter):
                return (
                    "capacity",
                    f"its adapter needs {self._residency.pages(request.adapter)} pages, more than allowed",
                )
            needs += self._residency.pages(request.adapter)
        if needs > self._pool.total:
            return "capacity", f"it needs {needs} pages of a pool of {self._pool.total}"
        return None

    def _queued(self, connection: int) -> int:
        """Requests that a newcomer finds waiting. A parked gateway fills a queue of its own, not everybody's."""
        return len(self._connections.get(connection, ())) if connection in self._parked else len(self._waiting)

    # Lines

    def _wait(self, request: Request) -> None:
        refusal = self._refuse(request)
        if refusal is not None:
            self._end(request, "error", *refusal)
        elif request.key[0] not in self._parked:
            self._waiting.add(request)
            self._want(request.adapter)

    def _leave_line(self, request: Request) -> None:
        if self._waiting.discard(request):
            self._want(request.adapter)

    def _want(self, adapter: str | None) -> None:
        """Residency wants what the head of a line wants."""
        if adapter is None:
            return
        head = self._waiting.head(adapter)
        if head is None:
            self._residency.unwant(adapter)
        else:
            self._residency.want(adapter, head.arrival, head.tenant)

    def _standing(self, connection: int) -> list[Request]:
        return [request for request in self._connections.get(connection, {}).values() if not request.seated]

    @property
    def _unseated(self) -> int:
        return len(self._requests) - len(self._seats.taken)

    # Seats

    def _going_on(self) -> Iterator[Request]:
        """Those seated who have more to compute than what is in flight, unless they are parked."""
        for request in list(self._seats.taken.values()):
            if request.seated and not request.complete and request.key[0] not in self._parked:
                yield request

    def _plan_seated(self, batch: Batch) -> None:
        prefills = []
        for request in self._going_on():
            if not request.drawing:
                prefills.append(request)
            elif self._grow(request):
                batch.add(request, 1)
        for request in prefills:
            if batch.budget and request.remaining:
                batch.add(request, min(batch.budget, request.remaining))

    def _plan_newcomers(self, batch: Batch) -> None:
        self._blocked = None
        while batch.budget and self._seats.free:
            request = self._turns.next()
            if request is None:
                return
            if not self._seats.take(request):
                self._blocked = request.arrival
                return
            self._leave_line(request)
            batch.add(request, min(batch.budget, request.remaining))

    def _grow(self, request: Request) -> bool:
        """Get the next token a page: those seated last are preempted, parked ones before them.

        False: the request is itself the last, or pages come back when this step has ended. It keeps its seat.
        """
        while not self._seats.grow(request):
            victim = next(self._parked_seats(), self._seats.last)
            if victim is request or self._pool.quarantined:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self._preemptions += 1
        self._seats.leave(request)
        request.move(State.PREEMPTED)
        self._wait(request)

    def _parked_seats(self) -> Iterator[Request]:
        return (request for request in self._seats.taken.values() if request.key[0] in self._parked)

    # Ends

    def _must_be_in_flight(self, plan: StepPlan) -> None:
        if not self._flights or plan is not self._flights[0].plan:
            raise ValueError(f"step {plan.number} is not in flight, or not the oldest")

    def _land(self, plan: StepPlan) -> dict[RequestKey, Request]:
        """The device is done with the step. Who was on board may have been aborted: those lost their seat."""
        self._pool.retire(plan.number)
        return self._flights.popleft().on_board

    def _deliver(self, request: Request, draw: Sampled) -> None:
        if not request.generated:
            self._prompt_tokens += request.prompt_len
        if draw.token == FAILED:
            self._seats.condemn(request)
            self._end(request, "error", "internal", "the model's output was not finite")
            return
        self._completion_tokens += 1
        reason = request.accept(draw.token)
        self._replies(request).tokens.append(Token(request.key[1], draw.token, draw.logprob, draw.top))
        if reason is not None:
            self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason, code: str = "", message: str = "") -> None:
        if request.seated:
            self._seats.leave(request)
        self._leave_line(request)
        del self._requests[request.key]
        mine = self._connections[request.key[0]]
        del mine[request.key]
        if not mine:
            del self._connections[request.key[0]]
        self._replies(request).finished.append(request.finish(reason, code, message))

    def _replies(self, request: Request) -> _Outgoing:
        return self._outgoing.setdefault(request.key[0], _Outgoing())
