"""What is known of the request at hand, for its log lines: filled in by whoever learns it."""

from __future__ import annotations

import logging
import os
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from stencilpress.engine.logs import FIELDS

access_logger = logging.getLogger("stencilpress.access")


@dataclass(slots=True)
class Observation:
    """One request, or one response on a WebSocket. What does not apply is empty or 0."""

    request_id: str = field(default_factory=lambda: "req_" + os.urandom(16).hex())
    arrived_at: float = field(default_factory=time.perf_counter)
    """``time.perf_counter()`` when the head of the request was read."""
    tenant: str = ""
    key_id: str = ""
    trace_id: str = ""
    """Where traces are made."""
    model: str = ""
    """As the answer names it: resolved to a version."""
    adapter: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token_s: float = 0.0
    failed: bool = False
    """It ended with a fault of ours; of a stream that had begun, the status does not say so."""

    def first_token(self, now: float) -> None:
        """Text for the client has come, for the first time."""
        self.time_to_first_token_s = now - self.arrived_at

    def log(self, method: str, route: str, status: str, level: int = logging.INFO) -> None:
        """The one line that the access log has of it."""
        if not access_logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round((time.perf_counter() - self.arrived_at) * 1000, 1),
            "request_id": self.request_id,
            "tenant": self.tenant,
            "key": self.key_id,
        }
        if self.model:
            fields |= {
                "model": self.model,
                "ttft_ms": round(self.time_to_first_token_s * 1000, 1),
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
            }
        text = " ".join([f"{name}={value or '-'}" for name, value in fields.items()][3:])  # those three stand before it
        access_logger.log(level, "%s %s %s %s", method, route, status, text, extra={FIELDS: fields})


CURRENT: ContextVar[Observation] = ContextVar("observation")
"""Of the request that this task works for; unset outside of any."""


def log_context() -> dict[str, str]:
    """What every log line of a request carries."""
    observed = CURRENT.get(None)
    if observed is None:
        return {}
    trace = {"trace_id": observed.trace_id} if observed.trace_id else {}
    return {"request_id": observed.request_id, "tenant": observed.tenant, **trace}
