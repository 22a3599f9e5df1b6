"""What waiting requests want of residency: each adapter in the order of the first request of its line."""

from __future__ import annotations

from collections.abc import Iterator

from stencilpress.engine.residency import Residency
from stencilpress.engine.seats import NEXT
from stencilpress.engine.waiting import Waiting

REFRESHED = 4
"""Adapters a step whose place is worked out anew: tenants have been served since it was."""


class Wants:
    """Keeps residency's wants in step with the lines."""

    def __init__(self, waiting: Waiting, residency: Residency) -> None:
        self._waiting = waiting
        self._residency = residency
        self._round: Iterator[str] = iter(())

    def renew(self, adapter: str | None) -> None:
        """Residency wants what the head of this line wants now; the base wants nothing."""
        if adapter is None:
            return
        head = self._waiting.head(adapter)
        if head is None:
            self._residency.unwant(adapter)
        else:
            order = NEXT if head is self._waiting.favoured else head.order
            self._residency.want(adapter, order, head.tenant)

    def refresh(self) -> None:
        """Renew the next few, in turn."""
        for _ in range(REFRESHED):
            adapter = next(self._round, None)
            if adapter is None:
                self._round = self._waiting.adapters()
                return
            self.renew(adapter)
