"""The embedded store: the counts of this process, which are all there are when one gateway serves a catalog."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stencilpress.gateway.quota.ledger import Ledger
from stencilpress.gateway.quota.terms import Ask, Levels, Outcome, Periods, Renewal, Seeds

SWEEP_AT = 1024
"""Ledgers beyond this number are looked through for idle ones before another is made."""


def monotonic_ms() -> int:
    """Milliseconds of a clock that nobody can set."""
    return time.monotonic_ns() // 1_000_000


class LocalStore:
    """A ledger per tenant. Nothing in here waits, so an operation is atomic among the tasks of the loop."""

    def __init__(self, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._clock_ms = clock_ms
        self._ledgers: dict[int, Ledger] = {}
        self._sweep_at = SWEEP_AT

    async def reserve(self, ask: Ask, seeds: Seeds | None) -> Outcome | None:
        return self._ledger(ask.tenant_id).reserve(ask, self._clock_ms(), seeds)

    def settle_now(self, ask: Ask, used: int, reported: int) -> None:
        """Settle without a task: a request that is cancelled gives its slot back in the same moment."""
        self._ledger(ask.tenant_id).settle(ask.lease_id, used, reported, self._clock_ms())

    async def settle(self, ask: Ask, used: int, reported: int) -> None:
        self.settle_now(ask, used, reported)

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        for renewal in renewals:
            self._ledger(renewal.ask.tenant_id).renew(renewal, self._clock_ms())

    async def levels(self, tenant_id: int, periods: Periods) -> Levels:
        return self._ledgers.get(tenant_id, Ledger()).levels(periods, self._clock_ms())

    async def close(self) -> None:
        self._ledgers.clear()

    def _ledger(self, tenant_id: int) -> Ledger:
        ledger = self._ledgers.get(tenant_id)
        if ledger is None:
            if len(self._ledgers) >= self._sweep_at:
                self._sweep()
            ledger = self._ledgers[tenant_id] = Ledger()
        return ledger

    def _sweep(self) -> None:
        now_ms = self._clock_ms()
        for ledger in self._ledgers.values():
            ledger.expire(now_ms)
        self._ledgers = {tenant: ledger for tenant, ledger in self._ledgers.items() if not ledger.idle}
        self._sweep_at = max(SWEEP_AT, 2 * len(self._ledgers))
