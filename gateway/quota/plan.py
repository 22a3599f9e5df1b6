"""What a tenant may use over time: the part of its plan that the quota engine enforces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None is no limit.

    Tokens are those of the prompt and of the answer. A request reserves its prompt and the longest answer that it
    allows, and gives back what it did not use. Days and months begin at midnight in ``time_zone``, an IANA name.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_streams: int | None = None
    """Requests in progress at once, streamed or not; the choices of one request count as one."""
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    time_zone: str = "UTC"
    shadow: bool = False
    """Count, and report what would have been refused, but refuse nothing."""


UNLIMITED = Quota()
