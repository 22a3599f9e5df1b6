"""What happens on one gateway right now, by tenant. While nobody looks it is a set of the open requests, no more.

Rates are over the time since the last look: counts are read off the requests' meters then, so tokens cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from stencilpress.gateway.usage.histogram import bucket_of
from stencilpress.gateway.usage.recorder import Meter

FRESH_S = 1.5
"""Looks that come sooner one after the other see the same."""
WATCHED_S = 10.0
"""After so long without a look counting ends."""
MAX_TENANTS = 2000
"""Of one slice: those with the most tokens."""


class LiveTenant(msgspec.Struct, array_like=True):
    """One tenant on one gateway; ``open`` and ``waiting`` (for the first token) are now, the rest is of the window."""

    tenant_id: int
    open: int = 0
    waiting: int = 0
    requests: int = 0
    """Admitted."""
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: dict[str, int] = {}
    """By dimension."""
    ttft: dict[int, int] = {}
    """Histogram of times to the first token."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class LiveSlice(msgspec.Struct, array_like=True, frozen=True):
    """One gateway's share of what happens. ``window_s`` is 0 for the first look, which has no counts."""

    gateway: int
    window_s: float
    tenants: list[LiveTenant]


class OpenRequest:
    """A request that is being answered, and how much of it has been counted."""

    __slots__ = ("counted", "meter", "tenant_id", "timed")

    def __init__(self, tenant_id: int, meter: Meter) -> None:
        self.tenant_id = tenant_id
        self.meter = meter
        self.counted = 0
        self.timed = False


class LiveCounts:
    """Belongs to the loop that serves requests."""

    def __init__(self, gateway: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        self._open: set[OpenRequest] = set()
        self._window: dict[int, LiveTenant] | None = None
        """None while nobody looks."""
        self._looked_at = float("-inf")
        self._slice = LiveSlice(gateway, 0.0, [])

    def began(self, tenant_id: int, meter: Meter) -> OpenRequest:
        """A request was admitted. Tell :meth:`ended`."""
        request = OpenRequest(tenant_id, meter)
        self._open.add(request)
        if self._watched():
            counts = self._of(tenant_id)
            counts.requests += 1
            counts.prompt_tokens += meter.prompt_tokens
        return request

    def ended(self, request: OpenRequest, *, failed: bool) -> None:
        self._open.discard(request)
        if self._watched():
            counts = self._of(request.tenant_id)
            counts.failures += failed
            _count(request, counts)

    def refused(self, tenant_id: int, dimension: str) -> None:
        if self._watched():
            refused = self._of(tenant_id).refused
            refused[dimension] = refused.get(dimension, 0) + 1

    def look(self) -> LiveSlice:
        """What happened since the last look, and what is open now."""
        now = self._clock()
        since_s = now - self._looked_at
        if since_s < FRESH_S:
            return self._slice
        first = not self._watched()
        if first:
            self._window, since_s = {}, 0.0
        for request in self._open:
            if first:
                request.counted, request.timed = request.meter.delivered, request.meter.ttft_ms is not None
            counts = self._of(request.tenant_id)
            counts.open += 1
            counts.waiting += request.meter.ttft_ms is None
            _count(request, counts)
        tenants = _busiest((self._window or {}).values())
        self._slice = LiveSlice(self._gateway, since_s, tenants)
        self._window, self._looked_at = {}, now
        return self._slice

    def _watched(self) -> bool:
        if self._window is None:
            return False
        if self._clock() - self._looked_at > WATCHED_S:
            self._window = None
        return self._window is not None

    def _of(self, tenant_id: int) -> LiveTenant:
        window = self._window if self._window is not None else {}
        counts = window.get(tenant_id)
        if counts is None:
            counts = window[tenant_id] = LiveTenant(tenant_id)
        return counts


def _count(request: OpenRequest, counts: LiveTenant) -> None:
    meter = request.meter
    counts.completion_tokens += meter.delivered - request.counted
    request.counted = meter.delivered
    if not request.timed and meter.ttft_ms is not None:
        request.timed = True
        bucket = bucket_of(meter.ttft_ms)
        counts.ttft[bucket] = counts.ttft.get(bucket, 0) + 1


def _busiest(tenants: Iterable[LiveTenant]) -> list[LiveTenant]:
    return sorted(tenants, key=lambda one: (-one.tokens, -one.open, one.tenant_id))[:MAX_TENANTS]
