"""Days and months as a tenant counts them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from stencilpress.gateway.quota.terms import Periods, Span


def periods_at(moment_s: float, time_zone: str) -> Periods:
    """The day and the month of a moment in seconds since the epoch; also on days of 23 or 25 hours.

    Raises ``zoneinfo.ZoneInfoNotFoundError`` or ``ValueError`` for a zone that does not exist.
    """
    zone = ZoneInfo(time_zone)
    now = datetime.fromtimestamp(moment_s, UTC).astimezone(zone)
    day, next_month = now.date(), (now.year + now.month // 12, now.month % 12 + 1)
    tomorrow = datetime.fromordinal(day.toordinal() + 1).date()
    return Periods(
        Span(_midnight(day.year, day.month, day.day, zone), _midnight(*tomorrow.timetuple()[:3], zone)),
        Span(_midnight(now.year, now.month, 1, zone), _midnight(*next_month, 1, zone)),
    )


def _midnight(year: int, month: int, day: int, zone: ZoneInfo) -> int:
    """The start of a day; where clocks skip midnight, the first moment after it."""
    return int(datetime(year, month, day, tzinfo=zone).timestamp())


class Calendar:
    """The periods of now, computed once a day and zone."""

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._known: dict[str, Periods] = {}

    def periods(self, time_zone: str) -> Periods:
        now_s = self._clock_s()
        known = self._known.get(time_zone)
        if known is None or not known.day.start <= now_s < known.day.end:
            known = self._known[time_zone] = periods_at(now_s, time_zone)
        return known
