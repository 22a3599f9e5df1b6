"""The words of the quota engine: what a reservation asks for, and what a store answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from stencilpress.gateway.quota.plan import Quota

Dimension = Literal[
    "concurrent_streams", "requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month"
]
DIMENSIONS: tuple[Dimension, ...] = (
    "concurrent_streams", "requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month"
)  # fmt: skip
"""In the order in which they are checked; a request that any of them refuses is charged to none."""

WINDOW_MS = 60_000
BUCKET_MS = 1_000
"""What is used in one such span leaves the window as a whole, once all of it is older than the window: so the limit
holds in every span of :data:`WINDOW_MS`, wherever it begins."""
TRANSIENT_MS = 1_000
"""Suggested wait for something that other requests hold and give back at a time that nobody knows."""


class Span(NamedTuple):
    """A day or a month of a tenant, in seconds since the epoch; the end is not part of it."""

    start: int
    end: int


class Periods(NamedTuple):
    """The day and the month of one moment."""

    day: Span
    month: Span


class Ask(msgspec.Struct, frozen=True):
    """One request's reservation. ``lease_ms`` is how long it holds unless it is renewed."""

    tenant_id: int
    lease_id: str
    tokens: int
    """Of the prompt and of the longest answer."""
    quota: Quota
    periods: Periods
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Seeds:
    """Tokens used in the day and the month so far, for a store that does not know them."""

    day: int
    month: int


class Outcome(msgspec.Struct, frozen=True):
    """What became of a reservation. Levels are those after it."""

    refused: Dimension | None
    """The dimension without room; None if there is room in all. In shadow the charge is made in either case."""
    retry_ms: int = 0
    """When to try again; 0 if waiting does not help: the request is larger than the limit, or the budget is spent."""
    requests_used: int = 0
    requests_reset_ms: int = 0
    tokens_used: int = 0
    tokens_reset_ms: int = 0
    left: int = 0
    """Of the refusing dimension."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease that is still held. ``used`` tokens so far, of which ``reported`` were told with the last renewal."""

    ask: Ask
    used: int
    reported: int


@dataclass(frozen=True, slots=True)
class Levels:
    """What a tenant uses at one moment, what its running requests have reserved included; None is not known here."""

    concurrent_streams: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None


class QuotaStore(Protocol):
    """Where the counts are. Raises :class:`StoreUnavailableError` where it is remote."""

    async def reserve(self, ask: Ask, seeds: Seeds | None) -> Outcome | None:
        """Charge all dimensions or none. None: it needs ``seeds`` first."""

    async def settle(self, ask: Ask, used: int, reported: int) -> None:
        """Give back a lease and what of its tokens was not used. ``used`` -1 undoes the request altogether."""

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        """Hold leases for another ``lease_ms``, also those that the store has lost."""

    async def levels(self, tenant_id: int, periods: Periods) -> Levels:
        """What is used; a budget that nothing was charged to since the store began is None."""

    async def close(self) -> None:
        """Let go of connections."""


class StoreUnavailableError(Exception):
    """The shared store does not answer."""
