"""One request's life inside the engine: its tokens, its pages and one state."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stencilpress.engine.accounts import ANSWER_PRICE, PROMPT_PRICE, Account
from stencilpress.engine.messages import Finished, FinishReason, Sampling
from stencilpress.engine.plan import PENDING, Chunk, Draw, Page, RequestKey


class State(enum.Enum):
    """Where a request stands. Whether its adapter is cold is residency's to know, not repeated here."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.RUNNING, State.PREEMPTED, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.PREFILLING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


_PENDING = (PENDING,)


class IllegalMoveError(RuntimeError):
    """A state change that no request may make: a bug in the scheduler."""


@dataclass(slots=True, eq=False)
class Request:
    """``history`` is the prompt and all tokens drawn so far; KV of the first ``computed`` of them is in ``pages``.

    Steps in flight compute ``in_flight`` more; ``pending`` is 1 if the newest of them draws the next token.

    ``arrival`` numbers all requests of an engine; ``urgency`` orders those of a tenant, and ends in it.
    ``slot`` is -1 and ``pages`` is empty unless the request is seated (prefilling or running).
    ``charged`` tokens are on its tenant's account already, and while it is seated ``owing`` may still come. ``ahead``
    is the cost of the tenant's requests that waited before it, so long as it waits. ``came_s``, ``warm_s`` (its adapter
    is in the pool) and ``begun_s`` are clock times.
    ``cached_tokens`` of the prompt needed no computing when it was first seated; -1 before.
    """

    key: RequestKey
    arrival: int
    came_step: int
    urgency: tuple[int, int]
    priority: int
    account: Account
    came_s: float
    adapter: str | None
    history: list[int]
    prompt_len: int
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    salt: bytes = b""
    state: State = State.WAITING
    slot: int = -1
    pages: tuple[Page, ...] = ()
    computed: int = 0
    in_flight: int = 0
    pending: int = 0
    cached_tokens: int = -1
    charged: int = 0
    owing: float = 0.0
    ahead: float = 0.0
    warm_s: float | None = None
    begun_s: float | None = None

    @property
    def tenant(self) -> int:
        return self.account.tenant

    @property
    def generated(self) -> int:
        return len(self.history) - self.prompt_len

    @property
    def length(self) -> int:
        """Tokens of the history and the pending one."""
        return len(self.history) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens of :attr:`length` that no step has computed or computes now."""
        return self.length - self.computed - self.in_flight

    @property
    def drawing(self) -> bool:
        """Whether its history is computed, or will be when the steps in flight have landed."""
        return self.state is State.RUNNING or self.pending > 0

    @property
    def complete(self) -> bool:
        """Whether the pending token is the last one, whatever it is."""
        return self.length - self.prompt_len >= self.max_tokens

    @property
    def owed(self) -> int:
        """Tokens of the answer that may still come."""
        return self.max_tokens - self.generated

    @property
    def seated(self) -> bool:
        return self.slot >= 0

    @property
    def unbegun(self) -> bool:
        """Whether it still waits for its first seat."""
        return self.state is State.WAITING

    @property
    def cost(self) -> float:
        """The most that it will be charged. Its tenant's later requests wait for so much."""
        return PROMPT_PRICE * self.prompt_len + ANSWER_PRICE * self.max_tokens

    @property
    def standing(self) -> float:
        """What its tenant's counter will be when its turn comes."""
        return self.account.standing(max(0.0, self.ahead - self.account.begun))

    @property
    def order(self) -> int:
        """Its place in residency's order of wants: smaller goes first."""
        return order_of(self.standing, self.arrival)

    def charge(self, count: int) -> float:
        """Put the next ``count`` tokens to be computed on the account, and the one that is drawn after the last of all;
        what was computed and drawn before costs nothing.

        Returns the price.
        """
        end = self.computed + self.in_flight + count
        end += end == self.length
        fresh = end - self.charged
        if fresh <= 0:
            return 0.0
        asked = max(0, min(end, self.prompt_len) - self.charged)
        self.charged = end
        price = PROMPT_PRICE * asked + ANSWER_PRICE * (fresh - asked)
        self._owe(-price)
        return self.account.charge(price)

    def move(self, state: State) -> None:
        """The only way to change ``state``. Raises :class:`IllegalMoveError`."""
        if state not in MOVES[self.state]:
            raise IllegalMoveError(f"request {self.key}: {self.state.value} cannot become {state.value}")
        self.state = state

    def sit(self, slot: int, pages: tuple[Page, ...]) -> None:
        """Take a seat: pages for the whole history, of which nothing is computed yet."""
        self.move(State.PREFILLING)
        asked = min(self.charged, self.prompt_len)
        self._owe(self.cost - PROMPT_PRICE * asked - ANSWER_PRICE * (self.charged - asked))
        self.slot, self.pages, self.computed = slot, pages, 0

    def skip(self, tokens: int) -> None:
        """The first ``tokens`` of the history need no computing, and cost nothing: their pages hold them already."""
        self.computed = tokens
        self._owe(-PROMPT_PRICE * max(0, tokens - self.charged))
        self.charged = max(self.charged, tokens)
        if self.cached_tokens < 0:
            self.cached_tokens = tokens

    def rise(self) -> tuple[Page, ...]:
        """Leave the seat and hand over its pages; the tokens stay, to be computed again."""
        self._owe(-self.owing)
        pages, self.pages, self.slot = self.pages, (), -1
        self.in_flight = self.pending = 0
        return pages

    def chunk(self, count: int) -> Chunk:
        """Take off with the next ``count`` tokens, and with a draw if they are all that remain."""
        start, history = self.computed + self.in_flight, self.history
        tokens = tuple(history[start : start + count]) or _PENDING
        draw = None
        if count == self.remaining:
            draw = Draw(self.sampling, history, self.prompt_len, self.length - self.prompt_len)
        self.in_flight += count
        self.pending = int(draw is not None)
        return Chunk(self.key, self.slot, start, tokens, self.pages, draw)

    def decode(self) -> Chunk:
        """:meth:`chunk` of the one token that is left of a request that is :attr:`drawing`."""
        start, history = self.computed + self.in_flight, self.history
        tokens = (history[start],) if start < len(history) else _PENDING
        self.in_flight += 1
        self.pending = 1
        draw = Draw(self.sampling, history, self.prompt_len, start + 1 - self.prompt_len)
        return Chunk(self.key, self.slot, start, tokens, self.pages, draw)

    def landed(self, chunk: Chunk) -> None:
        """The device has computed a chunk. A later one may be in flight."""
        self.computed += len(chunk.tokens)
        self.in_flight -= len(chunk.tokens)
        if not self.in_flight:
            self.pending = 0

    def accept(self, token: int) -> FinishReason | None:
        """Take a drawn token; the reason if it is the last one. What a step in flight draws after that is credited."""
        if self.state is State.PREFILLING:
            self.move(State.RUNNING)
        self.history.append(token)
        if token in self.stop_ids:
            self.account.credit += ANSWER_PRICE * max(0, self.charged - len(self.history))
            return "stop"
        return "length" if self.generated >= self.max_tokens else None

    def _owe(self, price: float) -> None:
        self.owing += price
        self.account.owed += price

    def finish(self, reason: FinishReason, now_s: float, code: str = "", message: str = "") -> Finished:
        """End the request and make its one terminal message. Raises :class:`IllegalMoveError` the second time."""
        self.move(State.FINISHED)
        begun_s = now_s if self.begun_s is None else self.begun_s
        warm_s = begun_s if self.warm_s is None else min(self.warm_s, begun_s)
        return Finished(
            self.key[1],
            reason,
            self.prompt_len,
            self.generated,
            cached_tokens=max(self.cached_tokens, 0),
            code=code,
            message=message,
            queue_ms=(begun_s - self.came_s) * 1000,
            cold_start_ms=(warm_s - self.came_s) * 1000,
        )


def order_of(standing: float, arrival: int) -> int:
    """Residency's order of wants: by the tenant's counter when the turn comes, of equal ones by arrival."""
    return (round(standing * 16) << 40) + arrival
