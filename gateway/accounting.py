"""What every request goes through on its way in and out: its quota is reserved and its row begun, both or neither."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stencilpress.engine.messages import Finished
from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.answer import Answer
from stencilpress.gateway.catalog.leases import run_periodically
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage import tokens_used
from stencilpress.gateway.catalog.usage_roll_up import BATCH, purge_usage, retention, roll_up
from stencilpress.gateway.errors import ApiError, EngineLostError
from stencilpress.gateway.keys import Principal
from stencilpress.gateway.live_counts import LiveCounts
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.quota.engine import Quotas, Reservation
from stencilpress.gateway.quota.guard import GuardedStore
from stencilpress.gateway.quota.local import LocalStore
from stencilpress.gateway.quota.shared import SharedStore
from stencilpress.gateway.quota.terms import Periods, Seeds
from stencilpress.gateway.route import Route
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.side import SideLoop
from stencilpress.gateway.usage.record import Status
from stencilpress.gateway.usage.recorder import Admitted, Meter, Recorder
from stencilpress.gateway.usage.refusals import RefusalCounts

ROLL_UP_S = 5.0
PURGE_S = 60.0
MAX_PURGES = 50
"""Of one round: what is left of a day without purges waits for the next."""
MINUTES_DAYS = 3
"""Roll-ups of minutes are kept for so long; those of hours and days for good."""
STRAGGLERS_S = 0.3
"""At shutdown, for the engine's last word on requests whose clients had left."""


class Charge:
    """One admitted request. :meth:`close` it whatever happens: it settles the quota and makes the row."""

    def __init__(self, accounting: Accounting, reservation: Reservation, meter: Meter, tenant_id: int) -> None:
        self._accounting = accounting
        self._open = accounting.live.began(tenant_id, meter)
        self._reservation = reservation
        self.meter = meter
        reservation.progress = meter.billed
        self._status = Status.COMPLETED

    @property
    def headers(self) -> Mapping[str, str]:
        """``x-ratelimit-*``."""
        return self._reservation.headers

    def note(self, error: BaseException) -> None:
        """Why the request did not end in the regular way."""
        if isinstance(error, ConnectionError | asyncio.CancelledError | GeneratorExit):
            self._status = Status.DISCONNECTED
            return
        self._status = Status.FAILED
        self.meter.error = (error.code if isinstance(error, ApiError) else None) or "internal_error"

    def close(self, answers: Sequence[Answer]) -> None:
        """Free the quota at once; the row follows when the engine has told what it made in vain. Does not wait."""
        self._accounting.live.ended(self._open, failed=self._status is Status.FAILED)
        if not answers:  # no engine has seen it
            self._reservation.undo()
            self.meter.prompt_tokens = 0
            self.meter.close(self._status, 0, [])
            return
        if self._status is Status.COMPLETED and any(answer.cancelled for answer in answers):
            self._status = Status.CANCELLED
        self._reservation.settle(self.meter.bill(self._status))
        running = [answer for answer in answers if answer.finished is None]
        if running:
            self._accounting.follow(self._close_later(answers, running))
        else:
            self._end(answers)

    async def _close_later(self, answers: Sequence[Answer], running: Sequence[Answer]) -> None:
        for answer in running:
            answer.abort()
        try:
            for answer in running:
                await answer.settle()
        except EngineLostError:
            pass  # then what has come so far is all that is known
        finally:
            self._end(answers)

    def _end(self, answers: Sequence[Answer]) -> None:
        finished: list[Finished] = [answer.finished for answer in answers if answer.finished is not None]
        self.meter.close(self._status, sum(answer.completion_tokens for answer in answers), finished)


class Accounting:
    """The quota engine and the usage recorder of one gateway."""

    def __init__(self, quotas: Quotas, usage: Recorder, live: LiveCounts, behind: SideLoop) -> None:
        self.quotas = quotas
        self.usage = usage
        self.live = live
        self._behind = behind
        self._tasks: set[asyncio.Task[None]] = set()

    async def flush(self) -> None:
        """Write all rows of requests that have ended. Raises :class:`UnavailableError`."""
        await self._behind.call(self.usage.flush())

    async def admit(
        self, caller: Principal, route: Route, request_id: str, prompt_tokens: int, most_tokens: int, arrived_at: float
    ) -> Charge:
        """Reserve ``most_tokens`` and begin the row, or raise: :class:`RateLimitError`, :class:`UnavailableError`."""
        reservation = await self.quotas.reserve(caller.tenant_id, caller.limits.quota, most_tokens)
        who = Admitted(request_id, caller.tenant_id, caller.key_id, route.adapter, route.version, prompt_tokens)
        try:
            return Charge(self, reservation, self.usage.open(who, arrived_at), caller.tenant_id)
        except BaseException:
            reservation.undo()
            raise

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Let the end of a request that nobody waits for happen."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let the stragglers end, settle and write what can be."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STRAGGLERS_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self.quotas.close()


@asynccontextmanager
async def accounting(settings: GatewaySettings, metrics: Metrics) -> AsyncIterator[Accounting]:
    """Everything that runs behind it included. Raises :class:`SettingsError` for a bad folder or store.

    All its SQL is on a loop and connections of its own: batches of rows and roll-ups are milliseconds of Python.
    """
    async with SideLoop() as behind:
        db = Database(settings.database_url)
        try:
            usage = Recorder(db, _spool(settings), settings.usage_spool_bytes)
        except OSError as error:
            raise SettingsError(f"STENCILPRESS_USAGE_DIR: {error.strerror}") from error
        store = LocalStore() if not settings.quota_store else _guarded(settings, metrics)

        async def used(tenant_id: int, periods: Periods) -> Seeds:
            await usage.flush()  # what has ended here is in no ledger that begins now
            day, month = [await tokens_used(db, tenant_id, *span) for span in periods]
            return Seeds(day, month)

        async def seed(tenant_id: int, periods: Periods) -> Seeds:
            return await behind.call(used(tenant_id, periods))

        opened = Accounting(Quotas(store, seed, metrics), usage, metrics.live, behind)
        for work in _background(usage, metrics.refusals, db, settings.usage_retention_days):
            behind.start(work)
        renewing = asyncio.create_task(opened.quotas.run())
        try:
            yield opened
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await opened.close()
            await behind.call(_wind_up(behind, usage, metrics.refusals, db))
            usage.close()


async def _wind_up(behind: SideLoop, usage: Recorder, refusals: RefusalCounts, db: Database) -> None:
    """On the loop behind: end the jobs, write the last rows, close the connections."""
    await behind.stop()
    await usage.last_flush()
    await refusals.last_flush(db)
    await db.close()


def _background(
    usage: Recorder, refusals: RefusalCounts, db: Database, retention_days: int
) -> list[Coroutine[Any, Any, None]]:
    holder = secrets.token_hex(8)

    async def roll_up_all() -> None:
        while await roll_up(db) == BATCH:
            pass

    async def purge() -> None:
        for _ in range(MAX_PURGES):
            if await purge_usage(db, *retention(datetime.now(UTC), retention_days, MINUTES_DAYS)) < BATCH:
                break

    return [
        usage.run(),
        usage.recover_for_ever(),
        refusals.run(db),
        run_periodically(db, "usage-roll-up", holder, ROLL_UP_S, roll_up_all),
        run_periodically(db, "usage-purge", holder, PURGE_S, purge),
    ]


def _spool(settings: GatewaySettings) -> Path:
    """Beside the engine's socket, which is in the data folder, unless the operator names a folder."""
    return Path(settings.usage_dir or Path(settings.engine_socket).parent / "usage")


def _guarded(settings: GatewaySettings, metrics: Metrics) -> GuardedStore:
    return GuardedStore(
        SharedStore(settings.quota_store), settings.quota_on_store_failure, metrics.quota_store_failures
    )
