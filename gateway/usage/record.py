"""The row that is kept of each admitted request."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum


class Status(IntEnum):
    """How a request ended; the number is what a journal stores, the name in small letters what a row does."""

    COMPLETED = 1
    CANCELLED = 2
    """By the client's wish, over a connection that goes on."""
    DISCONNECTED = 3
    """The client left, or was cut off because it did not read."""
    FAILED = 4
    LOST = 5
    """Its gateway was killed: what is recorded is what was told last."""

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class UsageRow:
    """``prompt_tokens`` and ``completion_tokens`` are what is billed, and what ``usage`` showed the client."""

    key: bytes
    """Identifies the row: however often it is written it is there once. Begins with the time, so keys sort by it."""
    request_id: str
    """``x-request-id`` of the request, or the id of a WebSocket's response."""
    tenant_id: int
    key_id: str
    """Public id of the API key."""
    adapter: str
    """"" for the base alone."""
    version: int
    admitted_at: datetime
    finished_at: datetime
    status: str
    error_code: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    undelivered_tokens: int
    """Generated, but not part of the answer: after a stop string, after the client left."""
    ttft_ms: float | None
    """From the request's arrival to its first token here; None if none came."""
    inter_token_ms: float | None
    """Mean time from a token to the next of the same choice; None if no choice had two arrivals."""
    queue_ms: float
    cold_start_ms: float
    duration_ms: float
    gaps: bytes | None
    """Packed histogram of the times between arrivals; None if unknown or empty."""


def new_key(now_ns: int | None = None) -> bytes:
    """16 bytes, ordered by time to the millisecond (the layout of UUID version 7, RFC 9562, without its version)."""
    milliseconds = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    return milliseconds.to_bytes(6) + os.urandom(10)


def at(moment_us: int) -> datetime:
    """An instant from microseconds since the epoch."""
    return datetime.fromtimestamp(moment_us / 1e6, UTC)
