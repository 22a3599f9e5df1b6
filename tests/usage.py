"""Rows of usage, for tests that care about some of their fields."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from stencilpress.gateway.usage.record import UsageRow, new_key


def usage_row(admitted_at: datetime, **given: Any) -> UsageRow:
    """A request of tenant 1 to ``pirate@1`` that ended well at once, but for what is given."""
    usual = UsageRow(
        key=new_key(int(admitted_at.timestamp() * 1e9)),
        request_id="req",
        tenant_id=1,
        key_id="kkkkkkkkkkkk",
        adapter="pirate",
        version=1,
        admitted_at=admitted_at,
        finished_at=admitted_at,
        status="completed",
        error_code="",
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=7,
        undelivered_tokens=0,
        ttft_ms=100.0,
        inter_token_ms=5.0,
        queue_ms=1.0,
        cold_start_ms=0.0,
        duration_ms=200.0,
        gaps=None,
    )
    return replace(usual, **given)
