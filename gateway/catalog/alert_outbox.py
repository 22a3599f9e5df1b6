"""Webhooks in SQL, and the notifications that wait to be sent to them: a restart loses none.

They are sent in their order, each until it was taken: at least once, so receivers go by ``webhook-id``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.alerts.incidents import Incident, Moves
from stencilpress.gateway.alerts.notification import notifications
from stencilpress.gateway.catalog.alert_models import DeliveryRow, WebhookRow
from stencilpress.gateway.catalog.alerts import apply_moves, tenant_names
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.rows import locked_tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import InvalidRequestError, NotFoundError

OPERATOR = 0
"""The operator's webhook among receivers; tenants' ids begin at 1."""
MAX_WAITING = 1000
"""Notifications of one receiver; with one more the oldest is given up."""
GIVE_UP = timedelta(hours=24)
KEPT = timedelta(days=7)
"""How long what was sent or given up can be looked at."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 10.0, 600.0
_MAX_ERROR_CHARS = 200
_NONE = "webhook: there is none"
SECRET_CHARS = range(16, 201)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where a tenant's alerts go."""

    url: str
    secret: str
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Delivery:
    """A notification and how it fares."""

    id: int
    receiver: int
    body: Mapping[str, Any]
    state: str
    attempts: int
    created_at: datetime
    done_at: datetime | None
    error: str


async def find_webhook(db: Database, tenant_id: int) -> Webhook | None:
    """Where a tenant's alerts go; None: nowhere."""
    async with db.read() as session:
        row = await session.get(WebhookRow, tenant_id)
        return None if row is None else _webhook_of(row)


async def get_webhook(db: Database, tenant_id: int) -> Webhook:
    """As :func:`find_webhook`. Raises :class:`NotFoundError` if there is none."""
    found = await find_webhook(db, tenant_id)
    if found is None:
        raise NotFoundError(_NONE, param="webhook")
    return found


async def set_webhook(db: Database, tenant_id: int, url: str, secret: str | None, *, actor: Actor = SYSTEM) -> Webhook:
    """Send a tenant's alerts there; None keeps the secret, "" takes it away. What waits is tried at once.

    The address is the caller's to check. Raises :class:`InvalidRequestError` for a secret that is too short or long.
    """
    if secret and len(secret) not in SECRET_CHARS:
        text = f"must have {SECRET_CHARS.start} to {SECRET_CHARS.stop - 1} characters, has {len(secret)}"
        raise InvalidRequestError(f"secret: {text}", param="secret")
    async with db.write() as session:
        tenant = await locked_tenant(session, tenant_id)
        row = await session.get(WebhookRow, tenant_id)
        before = None if row is None else _facts(row)
        if row is None:
            row = WebhookRow(tenant_id=tenant_id, secret="")
            session.add(row)
        row.url, row.updated_at = url, datetime.now(UTC)
        changed_secret = secret is not None and secret != row.secret
        row.secret = row.secret if secret is None else secret
        after = {**_facts(row), "secret_changed": changed_secret}
        audit(session, actor, "alert_webhook.set", Target("alert_webhook", tenant.name, tenant_id), before, after)
        await session.execute(update(DeliveryRow).where(*_waiting(tenant_id)).values(due_at=row.updated_at))
        await session.flush()
        return _webhook_of(row)


async def remove_webhook(db: Database, tenant_id: int, *, actor: Actor = SYSTEM) -> None:
    """Send nothing more, nor what waits. Raises :class:`NotFoundError` if there is none."""
    async with db.write() as session:
        tenant = await locked_tenant(session, tenant_id)
        row = await session.get(WebhookRow, tenant_id)
        if row is None:
            raise NotFoundError(_NONE, param="webhook")
        audit(session, actor, "alert_webhook.remove", Target("alert_webhook", tenant.name, tenant_id), _facts(row))
        await session.delete(row)
        await session.execute(delete(DeliveryRow).where(*_waiting(tenant_id)))


async def record(db: Database, moves: Moves, *, operator: bool) -> None:
    """Write an evaluation's incidents, and what is to be sent of them, all or nothing.

    ``operator``: there is an operator's webhook, which is told everything; a tenant's is told of the tenant's.
    """
    if not moves.changed and not moves.dropped:
        return
    try:
        async with db.write() as session:
            moved = await apply_moves(session, moves)
            told = [one for one in (*moves.fired, *moves.resolved) if one.subject in moved]
            await _enqueue(session, told, operator=operator)
    except IntegrityError:  # a gateway that has lost its lease was at it at the same time, and was first
        logger.info("another gateway has written the same alerts")


async def due_deliveries(db: Database, now: datetime, limit: int) -> list[tuple[Delivery, Webhook | None]]:
    """The first waiting notification of each receiver whose time has come, with the receiver's webhook.

    None is the operator's, or that of a tenant that has none any more.
    """
    waiting = DeliveryRow.state == "waiting"
    first = select(func.min(DeliveryRow.id)).where(waiting).group_by(DeliveryRow.receiver)
    query = (
        select(DeliveryRow, WebhookRow)
        .outerjoin(WebhookRow, DeliveryRow.receiver == WebhookRow.tenant_id)
        .where(DeliveryRow.id.in_(first), DeliveryRow.due_at <= now)
        .order_by(DeliveryRow.due_at)
        .limit(limit)
    )
    async with db.read() as session:
        rows = (await session.execute(query)).all()
        return [(_delivery_of(row), None if hook is None else _webhook_of(hook)) for row, hook in rows]


async def delivered(db: Database, delivery_id: int) -> None:
    """It was taken."""
    async with db.write() as session:
        values = {"state": "delivered", "done_at": datetime.now(UTC), "error": "", "attempts": DeliveryRow.attempts + 1}
        await session.execute(update(DeliveryRow).where(DeliveryRow.id == delivery_id).values(values))


async def put_off(db: Database, delivery: Delivery, error: str) -> None:
    """It was not taken: try again after a pause that doubles, up to ten minutes; a day later it is given up."""
    now = datetime.now(UTC)
    attempts = delivery.attempts + 1
    pause = timedelta(seconds=min(_LEAST_PAUSE_S * 2.0 ** min(attempts - 1, 10), _MOST_PAUSE_S))
    values: dict[str, Any] = {"attempts": attempts, "error": error[:_MAX_ERROR_CHARS], "due_at": now + pause}
    if now - delivery.created_at >= GIVE_UP:
        values |= {"state": "failed", "done_at": now}
    async with db.write() as session:
        await session.execute(update(DeliveryRow).where(DeliveryRow.id == delivery.id).values(values))


async def list_deliveries(db: Database, receiver: int, limit: int = 20) -> tuple[Delivery, ...]:
    """The last notifications of a receiver, the newest first."""
    query = select(DeliveryRow).where(DeliveryRow.receiver == receiver).order_by(DeliveryRow.id.desc()).limit(limit)
    async with db.read() as session:
        return tuple(_delivery_of(row) for row in await session.scalars(query))


async def purge_deliveries(db: Database, before: datetime) -> None:
    """Forget what was sent or given up earlier."""
    async with db.write() as session:
        await session.execute(delete(DeliveryRow).where(DeliveryRow.state != "waiting", DeliveryRow.done_at < before))


async def _enqueue(session: AsyncSession, told: Sequence[Incident], *, operator: bool) -> None:
    tenants = {one.subject.tenant_id for one in told if one.subject.tenant_id is not None}
    names = await tenant_names(session, tenants)
    bodies = [(OPERATOR, body) for body in notifications(told, names, "operator")] if operator else []
    hooked = await session.scalars(select(WebhookRow.tenant_id).where(WebhookRow.tenant_id.in_(tenants)))
    for tenant_id in hooked.all():
        own = [one for one in told if one.subject.tenant_id == tenant_id]
        bodies += [(tenant_id, body) for body in notifications(own, names, f"tenant/{names[tenant_id]}")]
    now = datetime.now(UTC)
    fixed = {"state": "waiting", "attempts": 0, "created_at": now, "due_at": now, "error": ""}
    session.add_all([DeliveryRow(receiver=receiver, body=body, **fixed) for receiver, body in bodies])
    await session.flush()
    for receiver in Counter(receiver for receiver, _ in bodies):
        await _give_up_beyond(session, receiver, now)


async def _give_up_beyond(session: AsyncSession, receiver: int, now: datetime) -> None:
    newest = select(DeliveryRow.id).where(*_waiting(receiver)).order_by(DeliveryRow.id.desc())
    last = await session.scalar(newest.offset(MAX_WAITING).limit(1))
    if last is not None:
        values = {"state": "failed", "done_at": now, "error": f"more than {MAX_WAITING} notifications wait"}
        await session.execute(update(DeliveryRow).where(*_waiting(receiver), DeliveryRow.id <= last).values(values))


def _waiting(receiver: int) -> Sequence[Any]:
    return (DeliveryRow.receiver == receiver, DeliveryRow.state == "waiting")


def _facts(row: WebhookRow) -> dict[str, Any]:
    """For the audit log, which viewers read: a path is often a secret, so only the host is told."""
    return {"host": urlsplit(row.url).netloc, "signed": bool(row.secret)}


def _webhook_of(row: WebhookRow) -> Webhook:
    return Webhook(row.url, row.secret, row.updated_at)


def _delivery_of(row: DeliveryRow) -> Delivery:
    return Delivery(row.id, row.receiver, row.body, row.state, row.attempts, row.created_at, row.done_at, row.error)
