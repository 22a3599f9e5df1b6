"""The time that a page shows: a range up to now, or from one instant to another for a link that keeps its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from aiohttp import web

from stencilpress.gateway.errors import InvalidRequestError

RANGES = {
    "1h": timedelta(hours=1),
    "6h": timedelta(hours=6),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
DEFAULT = "1h"


@dataclass(frozen=True, slots=True)
class Span:
    """``label`` is one of :data:`RANGES`, or empty for a fixed time."""

    label: str
    start: datetime
    end: datetime

    @property
    def live(self) -> bool:
        """Whether it ends now, so that there is something to follow."""
        return bool(self.label)


def shown_span(request: web.Request, now: datetime | None = None) -> Span:
    """By the parameters ``range``, or ``start`` and ``end``. Raises :class:`InvalidRequestError`."""
    query, now = request.query, now or datetime.now(UTC)
    if "start" in query or "end" in query:
        start, end = _instant(query.get("start", ""), "start"), _instant(query.get("end", ""), "end")
        if start >= end:
            raise InvalidRequestError("start: is not before the end", param="start")
        return Span("", start, end)
    label = query.get("range", DEFAULT)
    if label not in RANGES:
        raise InvalidRequestError(f"range: is not one of {', '.join(RANGES)}", param="range")
    end = now.replace(second=0, microsecond=0) + timedelta(minutes=1)
    return Span(label, end - RANGES[label], end)


def _instant(text: str, name: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(f"{name}: is not a time such as 2026-01-31T08:00:00+00:00", param=name) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
