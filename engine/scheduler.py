"""Who runs: continuous batching with chunked prefill over one pool, base and any adapters in one step.

A request waits in its adapter's line (engine/waiting.py), is *seated* with KV pages for all its tokens and a lease of
its adapter, and runs until it ends or is preempted. The tenant that has had least goes first (engine/accounts.py), bent
in two ways: a cold adapter holds up its own requests alone, and a request of a seated adapter may pass one that lacks
an adapter slot or room for its adapter, for a while (engine/turns.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from stencilpress.engine.accounts import Accounts
from stencilpress.engine.admission import Admission, Refusal, open_request, sound_weight
from stencilpress.engine.counters import Counters
from stencilpress.engine.deadlines import Deadlines
from stencilpress.engine.flight import Batch, Flight
from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import FinishReason, Stats, Step, Submit, Token
from stencilpress.engine.plan import FAILED, LoadResult, Placed, RequestKey, Sampled, StepPlan
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.register import Register
from stencilpress.engine.replies import Replies
from stencilpress.engine.reports import PageMap
from stencilpress.engine.request import Request, State, order_of
from stencilpress.engine.residency import Residency
from stencilpress.engine.seats import Seats
from stencilpress.engine.turns import Turns, prefill_turn
from stencilpress.engine.waiting import Waiting
from stencilpress.engine.wants import Wants


class Scheduler:
    """Turns requests into step plans and draws into replies. One thread; nothing here touches a device.

    ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        limits: Limits,
        pool: Pool,
        residency: Residency,
        prefixes: PrefixCache,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._clock = clock
        self._register = Register()
        self._accounts = Accounts()
        self._waiting = Waiting(self._accounts)
        self._wants = Wants(self._waiting, residency)
        self._deadlines = Deadlines()
        self._admission = Admission(limits, pool, residency)
        self._seats = Seats(limits, pool, residency, prefixes)
        self._replies = Replies()
        self._flights: deque[Flight] = deque()
        self._turns = Turns(limits, self._waiting, residency, self._seats)
        self._arrivals = 0
        self._planned_s = 0.0
        self._blocked: Request | None = None
        self._counters = Counters(limits, pool, residency, prefixes)

    # Requests come and go

    def add(self, key: RequestKey, submit: Submit) -> None:
        """Queue a request, or answer it at once if it can never run. Raises ``ValueError`` for an id in use."""
        if key in self._register:
            raise ValueError(f"request id {key[1]} is in use")
        self._arrivals += 1
        account = self._accounts.open(submit.tenant, sound_weight(submit.weight))
        request = open_request(key, submit, account, arrival=self._arrivals, step=self._turns.step, now_s=self._clock())
        refusal = self._admission.malformed(request) or self._crowded(request)
        self._register.add(request)
        if refusal is not None:
            self._end(request, "error", *refusal)
            return
        if submit.max_wait_ms > 0:
            self._deadlines.add(request, submit.max_wait_ms / 1000)
        self._wait(request)

    def abort(self, key: RequestKey) -> None:
        """End a request, whatever it is doing; nothing if it has ended already."""
        request = self._register.get(key)
        if request is not None:
            self._end(request, "aborted")

    def abort_connection(self, connection: int) -> None:
        """Forget a gateway that is gone: its requests, its pages and what it was to be told."""
        for key in self._register.keys_of(connection):
            self.abort(key)
        self._replies.forget(connection)
        self._register.parked.discard(connection)

    def abort_all(self) -> None:
        """End every request with its terminal message: the engine shuts down."""
        for key in self._register.all_keys():
            self.abort(key)

    def park(self, connection: int) -> None:
        """Plan nothing for this gateway: its reply ring is full. Its requests give up their seats if others wait."""
        if connection not in self._register.parked:
            for request in self._register.standing(connection):
                self._leave_line(request)
            self._register.parked.add(connection)

    def unpark(self, connection: int) -> None:
        """Its reply ring has room again: its requests step back into their places."""
        if connection in self._register.parked:
            self._register.parked.discard(connection)
            for request in self._register.standing(connection):
                self._wait(request)

    def loaded(self, result: LoadResult) -> None:
        """The loader's answer, with what it means for the requests that wait for that adapter."""
        self._residency.completed(result)
        warm = self._residency.ready(result.digest)
        if isinstance(result, Placed) and not (warm or result.error):
            return
        now_s = self._clock()
        for request in self._waiting.line(result.digest):
            refusal = self._admission.impossible(request)
            if refusal is not None:
                self._end(request, "error", *refusal)
            elif warm and request.warm_s is None:
                request.warm_s = now_s

    def check_adapter(self, digest: str) -> None:
        """Have an adapter read and checked, in its turn among the requests."""
        self._arrivals += 1
        self._residency.check(digest, order_of(self._accounts.virtual_time, self._arrivals))

    def seconds_to_deadline(self) -> float:
        """How long the loop may sleep before a request has waited too long. Infinite if none has a limit."""
        due_s = self._deadlines.next_s()
        return math.inf if due_s is None else max(0.0, due_s - self._clock())

    def forget(self, adapter: str) -> int:
        """An adapter is no more. Returns the pages that running requests hold of it, and of its common prefixes."""
        return self._seats.forget(adapter)

    def held(self) -> Iterator[str]:
        """What :meth:`forget` would matter to, some adapters more than once."""
        return self._seats.held()

    # Steps

    def plan(self) -> StepPlan | None:
        """The next step: decodes first, then prefills and newcomers in their turns. None if nothing can run now.

        Takes pages, changes nothing on the device. Every plan is followed by :meth:`commit` or :meth:`fail`.
        """
        if self._flights:
            raise RuntimeError(f"step {self._flights[0].plan.number} is still in flight")
        self._refuse_late()
        for request in self._seated_in_vain():
            self._preempt(request)
        yielding = self._turns.yielding(blocked=self._blocked is not None)
        if yielding is not None:
            self._preempt(yielding)
        decodes, prefills = self._seated()
        grown = [request for request in decodes if request.seated and self._grow(request)]
        batch = Batch(self._limits.max_num_batched_tokens)
        batch.add_decodes([request for request in grown if request.seated])
        return self._fill(batch, [request for request in prefills if request.seated])

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one in flight, whose tokens are not known yet. Nobody is preempted: where somebody should
        be, None, and :meth:`plan` does it once the step has landed. None also if nothing can run.

        A request that ends meanwhile was computed in vain. Also followed by :meth:`commit` or :meth:`fail`, in order.
        """
        if len(self._flights) != 1:
            raise RuntimeError(f"{len(self._flights)} steps are in flight")
        self._refuse_late()
        if self._seated_in_vain() or self._flights[0].heeds_history:
            return None
        decodes, prefills = self._seated()
        if self._turns.yielding(blocked=self._blocked is not None) or not all(map(self._seats.grow, decodes)):
            return None
        batch = Batch(self._limits.max_num_batched_tokens)
        batch.add_decodes(decodes)
        return self._fill(batch, prefills)

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
        return self._replies.take()

    # Seen from outside

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._register

    def stats(self, ask: int) -> Stats:
        """Gauges and counters, as the answer to question ``ask``."""
        running = len(self._seats.taken)
        return self._counters.stats(ask, running=running, waiting=len(self._register) - running)

    def waiting_for(self, adapter: str) -> int:
        """Requests in an adapter's line."""
        return sum(1 for _ in self._waiting.line(adapter))

    def page_map(self) -> PageMap:
        """Who holds which page now."""
        return PageMap(self._pool, {request.key: request.tenant for request in self._seats.taken.values()})

    def check(self) -> None:
        """Raise :class:`PoolError` unless every page is free, common, or held by exactly one request or adapter."""
        self._pool.check(chain(self._seats.holdings(), self._residency.holdings()))

    # Lines

    def _crowded(self, request: Request) -> Refusal | None:
        """Why there is no place to wait. A parked gateway fills a queue of its own, not everybody's."""
        places = self._limits.max_waiting + self._seats.free
        if self._register.is_parked(request):
            full = len(self._register.keys_of(request.key[0])) >= places
            return self._admission.overloaded if full else None
        if len(self._waiting) < places:
            return None
        loser = self._accounts.loser(request)
        if loser is request:
            return self._admission.overloaded
        self._end(loser, "error", *self._admission.overloaded)
        return None

    def _wait(self, request: Request) -> None:
        refusal = self._admission.impossible(request)
        if refusal is not None:
            self._end(request, "error", *refusal)
        elif not self._register.is_parked(request):
            self._waiting.add(request, self._turns.step)
            if request.warm_s is None and (request.adapter is None or self._residency.ready(request.adapter)):
                request.warm_s = request.came_s
            self._wants.renew(request.adapter)

    def _leave_line(self, request: Request) -> None:
        if self._waiting.discard(request):
            self._wants.renew(request.adapter)

    def _refuse_late(self) -> None:
        """End whoever has waited too long. It happens at the head of each step, so nobody is served late."""
        now_s = self._planned_s = self._clock()
        while (request := self._deadlines.pop_missed(now_s)) is not None:
            waited_ms = round((now_s - request.came_s) * 1000)
            self._end(request, "error", "deadline", f"it had not begun after {waited_ms} ms")

    # Seats

    def _seated(self) -> tuple[list[Request], list[Request]]:
        """Those who draw in the next step, and those whose prompts are not complete by then; parked ones apart."""
        decodes, prefills, parked = [], [], self._register.parked
        for request in self._seats.taken.values():
            if request.key[0] in parked:
                continue
            if not request.drawing:
                prefills.append(request)
            elif not request.complete:
                decodes.append(request)
        return decodes, prefills

    def _seated_in_vain(self) -> list[Request]:
        """Those of parked gateways, if somebody waits for seats."""
        return self._register.of_parked(self._seats.taken.values()) if len(self._waiting) else []

    def _fill(self, batch: Batch, prefills: list[Request]) -> StepPlan | None:
        """What the decodes leave of the budget goes to prompts: of seated requests and of newcomers, in their turns."""
        self._turns.begin_step()
        self._blocked = None
        if not self._seats.taken and self._turns.squeezed_is_next():
            self._turns.bring_in_squeezed()  # the pages that it lacks are free, or held for those whose turn is later
        prefills.sort(key=prefill_turn)
        prefills.reverse()
        newcomer = self._newcomer(batch)
        while batch.budget:
            if newcomer is not None and (not prefills or prefill_turn(newcomer) < prefill_turn(prefills[-1])):
                if self._seats.take(newcomer, self._turns.step):
                    self._begin(newcomer)
                    batch.add(newcomer, min(batch.budget, newcomer.remaining))
                    newcomer = self._newcomer(batch)
                else:
                    self._blocked, newcomer = newcomer, None
            elif prefills:
                request = prefills.pop()
                batch.add(request, min(batch.budget, request.remaining))
            else:
                break
        return self._take_off(batch)

    def _newcomer(self, batch: Batch) -> Request | None:
        return self._turns.next() if batch.budget and self._seats.free and len(self._waiting) else None

    def _begin(self, request: Request) -> None:
        self._turns.take(request)
        self._wants.renew(request.adapter)
        if request.begun_s is None:
            request.begun_s = self._planned_s

    def _take_off(self, batch: Batch) -> StepPlan | None:
        if len(self._waiting):
            self._wants.refresh()
        if not self._turns.bring_in_squeezed():
            self._residency.pump(newest=self._blocked.order if self._blocked is not None else None)
            if not self._seats.taken:
                self._turns.bring_in_squeezed()
        segments = batch.segments()
        if not segments:
            return None
        number = self._counters.step(adapters=batch.adapters, requests=len(batch.requests))
        self._accounts.served(batch.price)
        self._pool.begin(number)
        plan = StepPlan(number, segments)
        self._flights.append(Flight(plan, batch.requests))
        return plan

    def _grow(self, request: Request) -> bool:
        """Get the next token a page, if need be from whoever has to give up a seat.

        False: it is the request itself, or pages come back when this step has ended. It keeps its seat.
        """
        while not self._seats.grow(request):
            victim = self._seats.victim(self._register.parked)
            if victim is request or self._pool.quarantined:
                return False
            self._seats.pressed()
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self._counters.preemptions += 1
        self._turns.leave(request)
        request.move(State.PREEMPTED)
        self._wait(request)

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
            self._counters.prompt_tokens += request.prompt_len
        if draw.token == FAILED:
            self._seats.condemn(request)
            self._end(request, "error", "internal", "the model's output was not finite")
            return
        self._counters.completion_tokens += 1
        reason = request.accept(draw.token)
        self._seats.answered()
        self._replies.token(request.key[0], Token(request.key[1], draw.token, draw.logprob, draw.top))
        if reason is not None:
            self._seats.relieved()
            self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason, code: str = "", message: str = "") -> None:
        if request.seated:
            self._turns.leave(request)
        self._leave_line(request)
        self._accounts.close(request.account)
        self._register.remove(request)
        self._replies.finished(request.key[0], request.finish(reason, self._clock(), code, message))
