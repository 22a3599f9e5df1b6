"""One tenant's counts: a pure state machine over given times. ``script.lua`` is the same one for a shared store.

A request holds a lease from admission to its end. Its tokens are charged to the minute's window and to the budgets of
day and month when it is admitted, all of them or none, and corrected by :meth:`Ledger.settle`. A lease that is
neither settled nor renewed expires: it then counts as what it last reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stencilpress.gateway.quota.plan import Quota
from stencilpress.gateway.quota.terms import (
    BUCKET_MS,
    TRANSIENT_MS,
    WINDOW_MS,
    Ask,
    Dimension,
    Levels,
    Outcome,
    Periods,
    Renewal,
    Seeds,
    Span,
)


class Window:
    """What was used in the last minute, kept by whole seconds."""

    __slots__ = ("_buckets", "used")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}  # in the order of time
        self.used = 0

    def expire(self, now_ms: int) -> None:
        while self._buckets:
            bucket = next(iter(self._buckets))
            if _leaves_ms(bucket) > now_ms:
                return
            self.used -= self._buckets.pop(bucket)

    def add(self, bucket: int, amount: int) -> None:
        """Charge, or with a negative amount give back; what has left the window stays out."""
        if amount > 0 or bucket in self._buckets:
            self._buckets[bucket] = self._buckets.get(bucket, 0) + amount
            self.used += amount

    def wait_ms(self, now_ms: int, over: int) -> int:
        """When ``over`` of what is used will have left."""
        for bucket, amount in self._buckets.items():
            over -= amount
            if over <= 0:
                return _leaves_ms(bucket) - now_ms
        return 0

    def reset_ms(self, now_ms: int) -> int:
        """When all of it will have left."""
        return next((_leaves_ms(bucket) - now_ms for bucket in reversed(self._buckets) if self._buckets[bucket]), 0)


def _leaves_ms(bucket: int) -> int:
    return (bucket + 1) * BUCKET_MS + WINDOW_MS


@dataclass(slots=True)
class Budget:
    """Tokens of one day or month: used by requests that have ended, reserved by those that run."""

    span: Span
    used: int
    reserved: int = 0


@dataclass(slots=True)
class Lease:
    """``base`` tokens were charged to the budgets for good before this lease was made again."""

    expires_ms: int
    bucket: int
    tokens: int
    reported: int
    base: int
    day: int
    """Start of the day that it is charged to; 0 for none."""
    month: int


@dataclass(slots=True)
class Ledger:
    """The counts. ``now_ms`` is any clock that never goes back; budgets are told apart by ``Periods``."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    leases: dict[str, Lease] = field(default_factory=dict)
    day: Budget | None = None
    month: Budget | None = None

    def reserve(self, ask: Ask, now_ms: int, seeds: Seeds | None) -> Outcome | None:
        """Charge every dimension or none. None: a budget is limited and not known, so ``seeds`` are needed."""
        self.expire(now_ms)
        if not self._open_budgets(ask.quota, ask.periods, seeds):
            return None
        refused, retry_ms, left = self._refusal(ask, now_ms)
        if refused is None or ask.quota.shadow:
            self._charge(ask, now_ms)
        return Outcome(
            refused,
            retry_ms,
            self.requests.used,
            self.requests.reset_ms(now_ms),
            self.tokens.used,
            self.tokens.reset_ms(now_ms),
            left,
        )

    def settle(self, lease_id: str, used: int, reported: int, now_ms: int) -> None:
        """End a lease. Of one that has expired only what was used since its last report is charged."""
        self.expire(now_ms)
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            if used < 0:
                self.requests.add(lease.bucket, -1)
            self._end(lease, max(used, 0))
            return
        for budget in (self.day, self.month):
            if budget is not None:
                budget.used += max(used - reported, 0)

    def renew(self, renewal: Renewal, now_ms: int) -> None:
        """Hold a lease on; one that is not here, since it expired or the store began anew, is made again."""
        self.expire(now_ms)
        ask = renewal.ask
        lease = self.leases.pop(ask.lease_id, None) or self._lease(ask, base=renewal.reported, bucket=0)
        lease.expires_ms = now_ms + ask.lease_ms
        lease.reported = renewal.used
        self.leases[ask.lease_id] = lease

    def expire(self, now_ms: int) -> None:
        """Let go of what has had its time."""
        self.requests.expire(now_ms)
        self.tokens.expire(now_ms)
        while self.leases:  # in the order of their last renewal
            lease_id, lease = next(iter(self.leases.items()))
            if lease.expires_ms > now_ms:
                return
            del self.leases[lease_id]
            self._end(lease, lease.reported)

    def levels(self, periods: Periods, now_ms: int) -> Levels:
        """What is used now; a budget that was never begun is None."""
        self.expire(now_ms)
        day, month = _turned(self.day, periods.day, None), _turned(self.month, periods.month, None)
        budgets = [None if budget is None else budget.used + budget.reserved for budget in (day, month)]
        return Levels(len(self.leases), self.requests.used, self.tokens.used, *budgets)

    @property
    def idle(self) -> bool:
        """Nothing here that could not be had again: budgets can be seeded."""
        return not (self.leases or self.requests.used or self.tokens.used)

    def _open_budgets(self, quota: Quota, periods: Periods, seeds: Seeds | None) -> bool:
        """Begin the budgets of these periods. False if what was used in one before we counted is not known."""
        day = _turned(self.day, periods.day, None if seeds is None else seeds.day)
        month = _turned(self.month, periods.month, None if seeds is None else seeds.month)
        if (quota.tokens_per_day is not None and day is None) or (quota.tokens_per_month is not None and month is None):
            return False
        self._carry(self.day, day, "day")
        self._carry(self.month, month, "month")
        self.day, self.month = day, month
        return True

    def _carry(self, old: Budget | None, new: Budget | None, name: Literal["day", "month"]) -> None:
        """After a change of the time zone running requests are charged to the span in place of theirs: no row tells
        of them yet."""
        if old is None or new is None or new is old or old.span.end <= new.span.start:
            return
        new.reserved = old.reserved
        for lease in self.leases.values():
            if getattr(lease, name) == old.span.start:
                setattr(lease, name, new.span.start)

    def _refusal(self, ask: Ask, now_ms: int) -> tuple[Dimension | None, int, int]:
        """The first dimension without room, when there may be some, and how much is left of it now."""
        quota, tokens = ask.quota, ask.tokens
        limit = quota.concurrent_streams
        if limit is not None and len(self.leases) >= limit:
            return "concurrent_streams", TRANSIENT_MS if limit else 0, 0
        limit = quota.requests_per_minute
        if limit is not None and self.requests.used >= limit:
            wait_ms = self.requests.wait_ms(now_ms, self.requests.used + 1 - limit) if limit else 0
            return "requests_per_minute", wait_ms, 0
        limit = quota.tokens_per_minute
        if limit is not None and self.tokens.used + tokens > limit:
            over = self.tokens.used + tokens - limit
            wait_ms = self.tokens.wait_ms(now_ms, over) if tokens <= limit else 0
            return "tokens_per_minute", wait_ms, max(limit - self.tokens.used, 0)
        limit, budget = quota.tokens_per_day, self.day
        if limit is not None and budget is not None and budget.used + budget.reserved + tokens > limit:
            return "tokens_per_day", _budget_wait_ms(budget, tokens, limit), _left(budget, limit)
        limit, budget = quota.tokens_per_month, self.month
        if limit is not None and budget is not None and budget.used + budget.reserved + tokens > limit:
            return "tokens_per_month", _budget_wait_ms(budget, tokens, limit), _left(budget, limit)
        return None, 0, 0

    def _charge(self, ask: Ask, now_ms: int) -> None:
        bucket = now_ms // BUCKET_MS
        self.requests.add(bucket, 1)
        self.tokens.add(bucket, ask.tokens)
        lease = self._lease(ask, base=0, bucket=bucket)
        lease.expires_ms = now_ms + ask.lease_ms
        self.leases[ask.lease_id] = lease

    def _lease(self, ask: Ask, base: int, bucket: int) -> Lease:
        """A new lease, for which what it may still use is reserved in the budgets at hand."""
        for budget in (self.day, self.month):
            if budget is not None:
                budget.reserved += ask.tokens - base
        starts = [0 if budget is None else budget.span.start for budget in (self.day, self.month)]
        return Lease(0, bucket, ask.tokens, base, base, *starts)

    def _end(self, lease: Lease, used: int) -> None:
        self.tokens.add(lease.bucket, min(used - lease.tokens, 0))
        for budget, start in ((self.day, lease.day), (self.month, lease.month)):
            if budget is not None and budget.span.start == start:
                budget.reserved -= lease.tokens - lease.base
                budget.used += max(used - lease.base, 0)
            elif budget is not None and start == 0:
                budget.used += max(used - lease.base, 0)  # it began before anybody counted


def _turned(budget: Budget | None, span: Span, seed: int | None) -> Budget | None:
    """The budget of ``span``: the one at hand, a new one after it, or one that begins at ``seed``.

    A span before the one at hand comes from a host whose clock is behind: time goes on from the one at hand. One that
    overlaps it comes from a change of the tenant's time zone.
    """
    if budget is not None and (budget.span == span or span.end <= budget.span.start):
        return budget
    if budget is not None and budget.span.end <= span.start:
        return Budget(span, 0)
    return None if seed is None else Budget(span, seed)


def _budget_wait_ms(budget: Budget, tokens: int, limit: int) -> int:
    """Running requests may give back enough; if they cannot, the budget is spent."""
    return TRANSIENT_MS if budget.used + tokens <= limit else 0


def _left(budget: Budget, limit: int) -> int:
    return max(limit - budget.used - budget.reserved, 0)
