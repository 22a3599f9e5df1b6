"""The quota engine of a gateway: a reservation before any work, settled however the work ends."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakSet, WeakValueDictionary

from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.quota.answers import rate_headers, refusal
from stencilpress.gateway.quota.calendar import Calendar
from stencilpress.gateway.quota.guard import GuardedStore
from stencilpress.gateway.quota.local import LocalStore
from stencilpress.gateway.quota.plan import Quota
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

LEASE_MS = 30_000
"""How long a gateway that was killed holds its slots in a shared store."""
RENEW_S = LEASE_MS / 3000
RETRY_S = 0.5
MAX_SETTLEMENTS = 100_000
"""Settlements that wait for a store that does not answer; beyond these leases are left to expire."""
PARALLEL_SETTLEMENTS = 16
LAST_SETTLEMENTS_S = 1.0

Seeder = Callable[[int, Periods], Awaitable[Seeds]]
"""Tokens that a tenant has used in a day and a month so far, by its usage rows."""


class Reservation:
    """One admitted request's hold on its quota. :meth:`settle` it whatever happens; the first call counts."""

    __slots__ = ("__weakref__", "_ask", "_give_back", "_outcome", "progress", "reported", "settled", "store")

    def __init__(
        self,
        ask: Ask | None,
        store: QuotaStore | None,
        outcome: Outcome | None,
        give_back: Callable[[Reservation, int], None],
    ) -> None:
        self._ask = ask
        self._give_back = give_back
        self.store = store
        self._outcome = outcome
        self.progress: Callable[[], int] = _nothing
        """Tells the tokens used so far: what counts if this gateway dies."""
        self.reported = 0
        self.settled = store is None

    @property
    def ask(self) -> Ask:
        if self._ask is None:
            raise ValueError("nothing was reserved")
        return self._ask

    @property
    def headers(self) -> Mapping[str, str]:
        """``x-ratelimit-*`` as of the admission."""
        return rate_headers(self._ask.quota, self._outcome) if self._ask and self._outcome else {}

    def settle(self, used: int) -> None:
        """Charge what was used in place of what was reserved, and free the slot. Does not wait."""
        if not self.settled:
            self.settled = True
            self._give_back(self, used)

    def undo(self) -> None:
        """The request was not taken after all: it counts in no dimension."""
        self.settle(-1)


@dataclass(frozen=True, slots=True)
class _Settlement:
    store: QuotaStore
    ask: Ask
    used: int
    reported: int


class Quotas:
    """Reserves for all requests of this process. :meth:`run` belongs in a task for as long as it lives."""

    def __init__(
        self, store: LocalStore | GuardedStore, seed: Seeder, metrics: Metrics, calendar: Calendar | None = None
    ) -> None:
        self._store = store
        self._local = store if isinstance(store, LocalStore) else store.local
        self._seed = seed
        self._metrics = metrics
        self._calendar = calendar or Calendar()
        self._holder = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._live: WeakSet[Reservation] = WeakSet()
        self._settlements: deque[_Settlement] = deque(maxlen=MAX_SETTLEMENTS)
        self._to_settle = asyncio.Event()
        self._seeding: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    async def reserve(self, tenant_id: int, quota: Quota, tokens: int) -> Reservation:
        """Charge a request of at most ``tokens`` to every dimension, or to none.

        Raises :class:`RateLimitError` or :class:`InsufficientQuotaError` for the first dimension without room, and
        :class:`UnavailableError` if the catalog is needed and does not answer, or by the outage policy.
        """
        if not _is_limited(quota):
            return Reservation(None, None, None, self._give_back)
        lease_id = f"{self._holder}-{next(self._numbers)}"
        ask = Ask(tenant_id, lease_id, tokens, quota, self._calendar.periods(quota.time_zone), LEASE_MS)
        store, outcome = await self._reserve(ask)
        if outcome.refused is not None:
            self._metrics.refused(tenant_id, outcome.refused, watched=quota.shadow)
            if not quota.shadow:
                raise refusal(ask, outcome, outcome.refused)
        reservation = Reservation(ask, store, outcome, self._give_back)
        if store is not None:
            self._live.add(reservation)
        return reservation

    async def levels(self, tenant_id: int, quota: Quota) -> Levels:
        """What a tenant uses now. Of one without limits only the day and the month are known, by its usage rows.

        Raises :class:`UnavailableError` if the store or the catalog does not answer.
        """
        periods = self._calendar.periods(quota.time_zone)
        counted = Levels(None, None, None, None, None)
        if _is_limited(quota):
            counted = await self._store.levels(tenant_id, periods)
        if counted.tokens_per_day is None or counted.tokens_per_month is None:
            seeds = await self._seed(tenant_id, periods)
            counted = replace(counted, tokens_per_day=seeds.day, tokens_per_month=seeds.month)
        return counted

    async def run(self) -> None:
        """Renew what is held and settle what is not, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew_for_ever())
            for _ in range(PARALLEL_SETTLEMENTS if isinstance(self._store, GuardedStore) else 0):
                group.create_task(self._settle_for_ever())

    async def close(self) -> None:
        """Settle what has ended, within a second, and let go of the store: leases that are left expire."""
        try:
            async with asyncio.timeout(LAST_SETTLEMENTS_S):
                while self._settlements:
                    await self._settle(self._settlements.popleft())
        except TimeoutError:
            pass
        await self._store.close()

    async def _reserve(self, ask: Ask) -> tuple[QuotaStore | None, Outcome]:
        store, outcome = await self._try(ask, None)
        if outcome is not None:
            return store, outcome
        lock = self._seeding.setdefault(ask.tenant_id, asyncio.Lock())
        async with lock:  # one look into the catalog for all that wait
            store, outcome = await self._try(ask, None)
            while outcome is None:
                store, outcome = await self._try(ask, await self._seed(ask.tenant_id, ask.periods))
        return store, outcome

    async def _try(self, ask: Ask, seeds: Seeds | None) -> tuple[QuotaStore | None, Outcome | None]:
        if isinstance(self._store, LocalStore):
            return self._store, await self._store.reserve(ask, seeds)
        try:
            return await self._store.reserve(ask, seeds)
        except asyncio.CancelledError:  # the store may have taken it: calls reach it in their order
            self._settle_soon(_Settlement(self._store.shared, ask, -1, 0))
            raise

    def _give_back(self, reservation: Reservation, used: int) -> None:
        self._live.discard(reservation)
        if reservation.store is self._local:
            self._local.settle_now(reservation.ask, used, reservation.reported)
        elif reservation.store is not None:
            self._settle_soon(_Settlement(reservation.store, reservation.ask, used, reservation.reported))

    def _settle_soon(self, settlement: _Settlement) -> None:
        self._settlements.append(settlement)
        self._to_settle.set()

    async def _settle_for_ever(self) -> None:
        while True:
            while self._settlements:
                await self._settle(self._settlements.popleft())
            self._to_settle.clear()
            await self._to_settle.wait()

    async def _settle(self, settlement: _Settlement) -> None:
        """One that may or may not have come through is repeated so that it cannot charge twice: where its lease is
        gone by then, all counts as reported."""
        try:
            await settlement.store.settle(settlement.ask, settlement.used, settlement.reported)
        except (StoreUnavailableError, asyncio.CancelledError) as error:
            self._settlements.append(replace(settlement, reported=max(settlement.used, settlement.reported)))
            if isinstance(error, asyncio.CancelledError):
                raise  # at shutdown: close() takes it from here
            await asyncio.sleep(RETRY_S)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew every lease that somebody still holds."""
        held = [(one, Renewal(one.ask, one.progress(), one.reported)) for one in self._live]
        await self._local.renew([renewal for one, renewal in held if one.store is self._local])
        shared = [(one, renewal) for one, renewal in held if one.store is not self._local]
        if not shared or isinstance(self._store, LocalStore):
            return
        if await self._store.renew([renewal for _, renewal in shared]):
            for one, renewal in shared:
                one.reported = renewal.used


def _nothing() -> int:
    return 0


def _is_limited(quota: Quota) -> bool:
    limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.concurrent_streams, quota.tokens_per_day)
    return any(limit is not None for limit in limits) or quota.tokens_per_month is not None
