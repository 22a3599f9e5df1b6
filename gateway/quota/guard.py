"""What happens to requests while the shared store does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.quota.local import LocalStore
from stencilpress.gateway.quota.shared import SharedStore
from stencilpress.gateway.quota.terms import (
    Ask,
    Levels,
    Outcome,
    Periods,
    QuotaStore,
    Renewal,
    Seeds,
    StoreUnavailableError,
)
from stencilpress.gateway.settings import FailurePolicy

PAUSE_S = 1.0
"""After a failure the store is left alone for so long: requests must not wait for its time limit one by one."""

logger = logging.getLogger(__name__)


class GuardedStore:
    """A shared store with a policy for its outages, which are logged, and counted request by request.

    ``local``: each gateway counts for itself. ``allow``: nobody counts. ``refuse``: 503.
    """

    def __init__(
        self,
        shared: SharedStore,
        policy: FailurePolicy,
        failures: Counter,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shared = shared
        self._policy = policy
        self._failures = failures
        self._clock_s = clock_s
        self._down_until = 0.0
        self._is_down = False
        self.local = LocalStore()

    async def reserve(self, ask: Ask, seeds: Seeds | None) -> tuple[QuotaStore | None, Outcome | None]:
        """The outcome, and the store that it is to be settled with: None if nobody counts.

        Raises :class:`UnavailableError` where the policy is to refuse.
        """
        if self._clock_s() >= self._down_until:
            try:
                outcome = await self.shared.reserve(ask, seeds)
            except StoreUnavailableError as error:
                self._note_failure(error)
            else:
                self._note_answer()
                return self.shared, outcome
        self._failures.labels(self._policy).inc()
        match self._policy:
            case "local":
                return self.local, await self.local.reserve(ask, seeds)
            case "allow":
                return None, Outcome(None)
            case "refuse":
                raise UnavailableError("Quotas cannot be checked now; try again shortly.")

    async def levels(self, tenant_id: int, periods: Periods) -> Levels:
        """What the shared store has counted. Raises :class:`UnavailableError` while it does not answer."""
        try:
            return await self.shared.levels(tenant_id, periods)
        except StoreUnavailableError as error:
            self._note_failure(error)
            raise UnavailableError("The quota store does not answer; try again shortly.") from error

    async def renew(self, renewals: Sequence[Renewal]) -> bool:
        """Renew in the shared store; False if it could not be done."""
        try:
            await self.shared.renew(renewals)
        except StoreUnavailableError as error:
            self._note_failure(error)
            return False
        return True

    async def close(self) -> None:
        await self.shared.close()

    def _note_failure(self, error: Exception) -> None:
        self._down_until = self._clock_s() + PAUSE_S
        if not self._is_down:
            self._is_down = True
            logger.error("the quota store does not answer, policy %s: %s", self._policy, error)

    def _note_answer(self) -> None:
        if self._is_down:
            self._is_down = False
            logger.warning("the quota store answers again")
