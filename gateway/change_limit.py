"""How many changes a tenant may ask one gateway for in a minute: each is a transaction, and a row of the audit log that
stays. Operators are not counted."""

from __future__ import annotations

import time
from collections.abc import Callable

from stencilpress.gateway.access import Role
from stencilpress.gateway.errors import RateLimitError

MAX_CHANGES = 1200
WINDOW_S = 60.0
TRIAL_COST = 120
"""Of a test notification: ten a minute, lest the server be somebody's way to flood an address."""

INVITATION_COST = 60
"""Of an invitation: twenty a minute, since each tells whether somebody has an account, of this tenant or another."""


class ChangeLimit:
    """Counts by tenant within one window for all, so that it holds no more than who has asked in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + WINDOW_S
        self._counts: dict[int, int] = {}

    def admit(self, tenant_id: int, role: Role, cost: int = 1) -> None:
        """Count a change that somebody of a tenant asks for. Raises :class:`RateLimitError`."""
        if role is Role.OPERATOR:
            return
        now = self._clock()
        if now >= self._ends_at:
            self._counts.clear()
            self._ends_at = now + WINDOW_S
        count = self._counts.get(tenant_id, 0) + cost
        if count > MAX_CHANGES:
            text = (
                f"More than {MAX_CHANGES} changes a minute; a test notification counts as {TRIAL_COST}, "
                f"an invitation as {INVITATION_COST}."
            )
            wait_ms = max(1, int(1000 * (self._ends_at - now)))
            raise RateLimitError(text, dimension="changes_per_minute", retry_ms=wait_ms)
        self._counts[tenant_id] = count
