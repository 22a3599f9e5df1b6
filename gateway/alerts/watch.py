"""The jobs: look at everything now and then, and send what is to be told. Of several gateways one does each.

Both run on a loop and connections of their own, so neither a slow question nor a slow receiver holds up a stream, and
no receiver holds up the other job: it only fills the outbox.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from stencilpress.gateway.alerts.courier import Courier, send
from stencilpress.gateway.alerts.evaluate import Readings, evaluate
from stencilpress.gateway.alerts.incidents import Incident, Measured, Moves, Subject
from stencilpress.gateway.alerts.rules import Kind, Rules
from stencilpress.gateway.alerts.traffic import Past, Traffic, TrafficJudge
from stencilpress.gateway.catalog import alert_outbox, alerts
from stencilpress.gateway.catalog.alert_outbox import OPERATOR, Delivery, Webhook
from stencilpress.gateway.catalog.alert_readings import (
    read_damaged,
    read_past,
    read_quotas,
    read_traffic,
    read_unmended,
)
from stencilpress.gateway.catalog.canaries import read_rolled_back
from stencilpress.gateway.catalog.leases import run_periodically
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.exposition import Disk
from stencilpress.gateway.lifecycle.canary_guard import guard_canaries
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.side import SideLoop

DELIVER_S = 5.0
PURGE_S = 3600.0
QUOTAS_S = 60.0
"""How long what is known of quotas is good enough: months are long."""
PAST_S = 300.0
"""Likewise of the day before this hour."""
MAX_RECEIVERS = 32
"""Receivers that are sent to at once."""
ROUND_S = 10.0
"""A round of deliveries begins nothing new after so long, to end within its lease."""

_DISK_KINDS = frozenset({Kind.DISK_SHARE_LOW, Kind.DISK_BYTES_LOW})

OnMain = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]

logger = logging.getLogger(__name__)


class Watch:
    """Looks at everything. One per gateway; which one acts, the lease decides."""

    def __init__(self, db: Database, engines: Engines, folder: Path, *, operator: bool, on_main: OnMain) -> None:
        """``folder`` is on the disk that must not be full; ``on_main`` runs on the loop of ``engines``."""
        self._db = db
        self._engines = engines
        self._folder = folder
        self._operator = operator
        self._on_main = on_main
        self._quotas: tuple[float, dict[Subject, Measured]] = (float("-inf"), {})
        self._past: tuple[float, Past] = (float("-inf"), {})
        self._failures: tuple[int, dict[str, str]] = (0, {})

    async def look(self, now: datetime | None = None) -> Moves:
        """Evaluate all rules once and write what came of it. Raises :class:`UnavailableError`."""
        now = now or datetime.now(UTC)
        rules = await alerts.read_rules(self._db)
        open_ = await alerts.open_incidents(self._db)
        moves = evaluate(open_, await self._read(now, rules, open_), rules, now)
        await alert_outbox.record(self._db, moves, operator=self._operator)
        for incident in (*moves.fired, *moves.resolved):
            _log(incident)
        return moves

    async def purge(self) -> None:
        """Forget what is too old to matter."""
        now = datetime.now(UTC)
        await alerts.purge_incidents(self._db, now - alerts.HISTORY)
        await alert_outbox.purge_deliveries(self._db, now - alert_outbox.KEPT)

    async def _read(self, now: datetime, rules: Rules, open_: Mapping[Subject, Incident]) -> Readings:
        judge = TrafficJudge(rules, open_, await self._known_past(now))
        traffic: dict[tuple[int, str], Traffic] = await read_traffic(self._db, now, rules.least_requests())
        for (tenant_id, adapter), one in traffic.items():
            judge.take(tenant_id, adapter, one)
        facts = {**judge.found(), **await self._known_quotas(now), **await self._engine_facts(open_)}
        facts |= await read_rolled_back(self._db, now)
        disk = await asyncio.to_thread(Disk.of, self._folder)
        unknown = _DISK_KINDS if disk is None else frozenset()
        return Readings({**facts, **_disk_facts(disk)}, unknown)

    async def _known_past(self, now: datetime) -> Past:
        read_at, known = self._past
        if monotonic() - read_at >= PAST_S:
            known = await read_past(self._db, now)
            self._past = (monotonic(), known)
        return known

    async def _known_quotas(self, now: datetime) -> dict[Subject, Measured]:
        read_at, known = self._quotas
        if monotonic() - read_at >= QUOTAS_S:
            known = await read_quotas(self._db, now)
            self._quotas = (monotonic(), known)
        return known

    async def _engine_facts(self, open_: Mapping[Subject, Incident]) -> dict[Subject, Measured]:
        stats = await self._on_main(self._engines.stats())
        facts = {
            Subject(Kind.ENGINE_DOWN, item=str(number)): Measured(float(one is None))
            for number, one in enumerate(stats, 1)
        }
        failures = sum(one.adapter_failures for one in stats if one is not None)
        marked = {subject: one.note for subject, one in open_.items() if subject.kind is Kind.ADAPTER_CORRUPT}
        seen, errors = self._failures
        if failures == seen and not errors and not marked:
            return facts
        errors, sound = await self._loads()  # what loads well again is looked for as well
        self._failures = (failures, errors)
        unmended = await read_unmended(self._db, marked, sound)
        return {**facts, **unmended, **await read_damaged(self._db, errors)}

    async def _loads(self) -> tuple[dict[str, str], set[str]]:
        """By digest why its last load failed, over all that engines remember, and the digests that they have loaded.

        An engine that was started anew, or does not answer, knows of no failure: that alone mends nothing.
        """
        answers = await self._on_main(self._engines.adapters())
        known = [one for answer in answers for one in answer or ()]
        errors = {one.digest: one.error for one in known if one.error}
        return errors, {one.digest for one in known if not one.error and one.reads}


class Postman:
    """Empties the outbox."""

    def __init__(self, db: Database, courier: Courier, operator: Webhook | None) -> None:
        self._db = db
        self._courier = courier
        self._operator = operator

    async def deliver(self) -> int:
        """Send all that is due, each receiver's in order, receivers beside each other; how many were taken.

        Raises :class:`UnavailableError`.
        """
        begun, taken = monotonic(), 0
        while monotonic() - begun < ROUND_S:
            due = await alert_outbox.due_deliveries(self._db, datetime.now(UTC), MAX_RECEIVERS)
            if not due:
                break
            taken += sum(await asyncio.gather(*(self._send(one, hook) for one, hook in due)))
        return taken

    async def _send(self, delivery: Delivery, webhook: Webhook | None) -> bool:
        trusted = delivery.receiver == OPERATOR
        hook = self._operator if trusted else webhook
        if hook is None:
            error = "there is no webhook any more"
        else:
            error = await send(
                self._courier, hook.url, hook.secret, f"msg_{delivery.id}", delivery.body, trusted=trusted
            )
        if not error:
            await alert_outbox.delivered(self._db, delivery.id)
            return True
        await alert_outbox.put_off(self._db, delivery, error)
        logger.warning("alert notification %d was not taken by its receiver: %s", delivery.id, error)
        return False


def operator_webhook(settings: GatewaySettings) -> Webhook | None:
    """The webhook of the settings."""
    if not settings.alert_webhook_url:
        return None
    return Webhook(settings.alert_webhook_url, settings.alert_webhook_secret, datetime.fromtimestamp(0, UTC))


@asynccontextmanager
async def alerting(settings: GatewaySettings, engines: Engines) -> AsyncIterator[None]:
    """Both jobs, while the block runs."""
    main = asyncio.get_running_loop()

    async def on_main(work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, main))

    hook, holder = operator_webhook(settings), secrets.token_hex(8)
    async with SideLoop() as behind:
        db = Database(settings.database_url)
        courier = await behind.call(_courier(settings))
        watch = Watch(db, engines, settings.data_folder, operator=hook is not None, on_main=on_main)
        jobs: list[tuple[str, float, Callable[[], Awaitable[object]]]] = [
            ("canary-guard", settings.alert_every_s, partial(guard_canaries, db)),
            ("alert-watch", settings.alert_every_s, watch.look),
            ("alert-delivery", DELIVER_S, Postman(db, courier, hook).deliver),
            ("alert-purge", PURGE_S, watch.purge),
        ]
        for name, every_s, job in jobs:
            behind.start(run_periodically(db, name, holder, every_s, job))
        try:
            yield
        finally:
            await behind.call(_wind_up(behind, courier, db))


async def _courier(settings: GatewaySettings) -> Courier:
    return Courier(private=settings.alert_private_webhooks)


async def _wind_up(behind: SideLoop, courier: Courier, db: Database) -> None:
    await behind.stop()
    await courier.close()
    await db.close()


def _disk_facts(disk: Disk | None) -> dict[Subject, Measured]:
    if disk is None:
        return {}
    note = f"{disk.free / (1 << 30):.1f} of {disk.total / (1 << 30):.1f} GiB are free"
    return {
        Subject(Kind.DISK_SHARE_LOW): Measured(disk.free / max(disk.total, 1), note),
        Subject(Kind.DISK_BYTES_LOW): Measured(float(disk.free), note),
    }


def _log(incident: Incident) -> None:
    subject = incident.subject
    logger.warning(
        "alert %s is %s: tenant %s, adapter %s, %s, value %g, threshold %g",
        subject.kind, incident.state, subject.tenant_id, subject.adapter or "-", subject.item or "-",
        incident.value, incident.threshold,
    )  # fmt: skip
