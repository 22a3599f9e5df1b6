"""Alerts in SQL: rules that were changed, and incidents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.alerts.incidents import Incident, Moves, State, Subject
from stencilpress.gateway.alerts.rules import Kind, Place, RuleChange, Rules, Severity, check_change
from stencilpress.gateway.catalog.alert_models import AlertRuleRow, IncidentRow
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.rows import find_adapter
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_sums import parts
from stencilpress.gateway.errors import ConflictError, NotFoundError

HISTORY = timedelta(days=90)
"""How long resolved incidents are kept."""
_MAX_NOTE_CHARS = 300
_FIELDS = tuple(one.name for one in fields(RuleChange))


@dataclass(frozen=True, slots=True)
class Alert:
    """An incident with its number, its tenant's name, and who has seen it."""

    id: int
    tenant: str | None
    incident: Incident
    acknowledged_at: datetime | None = None
    acknowledged_by: str = ""


async def read_rules(db: Database, tenant_id: int | None = None) -> Rules:
    """All rules, or those that can matter to a tenant."""
    query = select(AlertRuleRow)
    if tenant_id is not None:
        query = query.where(or_(AlertRuleRow.tenant_id.is_(None), AlertRuleRow.tenant_id == tenant_id))
    async with db.read() as session:
        rows = await session.scalars(query)
        return Rules({(Place(row.tenant_id, row.adapter), Kind(row.kind)): _change_of(row) for row in rows})


async def set_rule(db: Database, kind: Kind, place: Place, change: RuleChange, *, actor: Actor = SYSTEM) -> RuleChange:
    """Set what is changed of a rule at a place, in place of what was set there.

    Raises :class:`InvalidRequestError` naming the field, :class:`NotFoundError` for an adapter that does not exist.
    """
    check_change(kind, place, change)
    async with db.write() as session:
        row = await _rule_row(session, kind, place)
        before = None if row is None else _facts(_change_of(row))
        if row is None:
            row = AlertRuleRow(tenant_id=place.tenant_id, adapter=place.adapter, kind=kind.value)
            session.add(row)
        for name in _FIELDS:
            setattr(row, name, getattr(change, name))
        row.updated_at = datetime.now(UTC)
        audit(session, actor, "alert_rule.set", _rule_target(kind, place), before, _facts(change))
    return change


async def reset_rule(db: Database, kind: Kind, place: Place, *, actor: Actor = SYSTEM) -> None:
    """Let the wider scope's rule hold again. Raises :class:`NotFoundError` where nothing is set."""
    async with db.write() as session:
        row = await _rule_row(session, kind, place)
        if row is None:
            raise NotFoundError(f"kind: no rule of {kind} is set here", param="kind")
        audit(session, actor, "alert_rule.reset", _rule_target(kind, place), _facts(_change_of(row)))
        await session.delete(row)


async def open_incidents(db: Database) -> dict[Subject, Incident]:
    """All that is pending or firing."""
    query = select(IncidentRow).where(IncidentRow.state.in_((State.PENDING.value, State.FIRING.value)))
    async with db.read() as session:
        found = [_incident_of(row) for row in await session.scalars(query)]
    return {one.subject: one for one in found}


async def apply_moves(session: AsyncSession, moves: Moves) -> set[Subject]:
    """Write what an evaluation changed; the caller's transaction holds what is to be sent as well.

    Returns whose state is another now: somebody else may have come to the same before.
    """
    known = await _open_rows(session, [one.fingerprint for one in (*moves.changed, *moves.dropped)])
    moved: set[Subject] = set()
    for subject in moves.dropped:
        if subject.fingerprint in known:
            await session.delete(known[subject.fingerprint])
    for subject, incident in moves.changed.items():
        row = known.get(subject.fingerprint)
        if row is None:
            row = IncidentRow(fingerprint=subject.fingerprint, state="", **_subject_columns(subject))
            session.add(row)
        if row.state != incident.state.value:
            moved.add(subject)
        _write(row, incident)
    await session.flush()
    return moved


async def purge_incidents(db: Database, before: datetime) -> int:
    """Forget what was resolved earlier; returns how many."""
    old = (IncidentRow.state == State.RESOLVED.value, IncidentRow.resolved_at < before)
    async with db.write() as session:
        gone = await session.execute(delete(IncidentRow).where(*old).returning(IncidentRow.id))
        return len(gone.all())


async def list_alerts(
    db: Database,
    *,
    tenant_id: int | None = None,
    states: Sequence[State] = (),
    kind: Kind | None = None,
    before_id: int | None = None,
    limit: int = 50,
) -> tuple[Alert, ...]:
    """Incidents, the newest first, below ``before_id``; of one tenant, or of all and the installation's with None."""
    query = _with_tenant()
    if tenant_id is not None:
        query = query.where(IncidentRow.tenant_id == tenant_id)
    if states:
        query = query.where(IncidentRow.state.in_([state.value for state in states]))
    if kind is not None:
        query = query.where(IncidentRow.kind == kind.value)
    if before_id is not None:
        query = query.where(IncidentRow.id < before_id)
    async with db.read() as session:
        rows = await session.execute(query.order_by(IncidentRow.id.desc()).limit(limit))
        return tuple(_alert_of(row, tenant) for row, tenant in rows)


async def count_firing(db: Database) -> dict[str, int]:
    """Firing incidents that nobody has acknowledged, by tenant; "" has all of them and the installation's."""
    query = (
        select(TenantRow.name, func.count())
        .outerjoin_from(IncidentRow, TenantRow, IncidentRow.tenant_id == TenantRow.id)
        .where(IncidentRow.state == State.FIRING.value, IncidentRow.acknowledged_at.is_(None))
        .group_by(TenantRow.name)
    )
    async with db.read() as session:
        counts = {row[0]: row[1] for row in await session.execute(query)}
    return {**{tenant: count for tenant, count in counts.items() if tenant is not None}, "": sum(counts.values())}


async def acknowledge(db: Database, alert_id: int, *, tenant_id: int | None = None, actor: Actor = SYSTEM) -> Alert:
    """Say that somebody has seen a firing alert; repeating it changes nothing.

    With ``tenant_id`` only one of that tenant's. Raises :class:`NotFoundError`, :class:`ConflictError` for an alert
    that does not fire.
    """
    async with db.write() as session:
        query = _with_tenant().where(IncidentRow.id == alert_id)
        if tenant_id is not None:
            query = query.where(IncidentRow.tenant_id == tenant_id)
        found = (await session.execute(query)).one_or_none() if 0 < alert_id < 2**63 else None
        if found is None:
            raise NotFoundError(f"alert: {alert_id} does not exist", param="alert")
        row, tenant = found
        if row.state != State.FIRING.value:
            raise ConflictError(f"alert: {alert_id} is {row.state}, so there is nothing to acknowledge", param="alert")
        if row.acknowledged_at is None:
            row.acknowledged_at, row.acknowledged_by = datetime.now(UTC), actor.name[:100]
            after = {"kind": row.kind, "adapter": row.adapter, "item": row.item}
            audit(session, actor, "alert.acknowledge", Target("alert", str(row.id), row.tenant_id), after=after)
        return _alert_of(row, tenant)


async def tenant_names(session: AsyncSession, ids: set[int]) -> dict[int, str]:
    """The names that notifications show."""
    rows = await session.execute(select(TenantRow.id, TenantRow.name).where(TenantRow.id.in_(ids)))
    return {row.id: row.name for row in rows}


async def _open_rows(session: AsyncSession, fingerprints: Sequence[str]) -> dict[str, IncidentRow]:
    found: dict[str, IncidentRow] = {}
    for some in parts(fingerprints):
        these = (IncidentRow.state != State.RESOLVED.value, IncidentRow.fingerprint.in_(some))
        query = select(IncidentRow).where(*these).with_for_update()
        found.update({row.fingerprint: row for row in await session.scalars(query)})
    return found


def _with_tenant() -> Any:
    return select(IncidentRow, TenantRow.name).outerjoin(TenantRow, IncidentRow.tenant_id == TenantRow.id)


async def _rule_row(session: AsyncSession, kind: Kind, place: Place) -> AlertRuleRow | None:
    if place.tenant_id is not None and place.adapter:
        await find_adapter(session, place.tenant_id, place.adapter)
    of_tenant: ColumnElement[bool] = (
        AlertRuleRow.tenant_id.is_(None) if place.tenant_id is None else AlertRuleRow.tenant_id == place.tenant_id
    )
    query = select(AlertRuleRow).where(
        of_tenant, AlertRuleRow.adapter == place.adapter, AlertRuleRow.kind == kind.value
    )
    found: AlertRuleRow | None = await session.scalar(query.with_for_update())
    return found


def _rule_target(kind: Kind, place: Place) -> Target:
    return Target("alert_rule", f"{place.adapter}/{kind}" if place.adapter else kind.value, place.tenant_id)


def _facts(change: RuleChange) -> dict[str, Any]:
    return {name: value for name, value in asdict(change).items() if value is not None}


def _change_of(row: AlertRuleRow) -> RuleChange:
    values = {name: getattr(row, name) for name in _FIELDS}
    return RuleChange(**{**values, "severity": None if row.severity is None else Severity(row.severity)})


def _subject_columns(subject: Subject) -> dict[str, Any]:
    return {
        "kind": subject.kind.value,
        "tenant_id": subject.tenant_id,
        "adapter": subject.adapter,
        "item": subject.item[:63],
    }


def _write(row: IncidentRow, incident: Incident) -> None:
    row.state, row.severity = incident.state.value, incident.severity.value
    row.value, row.threshold, row.note = incident.value, incident.threshold, incident.note[:_MAX_NOTE_CHARS]
    row.since, row.fired_at = incident.since, incident.fired_at
    row.good_since, row.resolved_at = incident.good_since, incident.resolved_at


def _incident_of(row: IncidentRow) -> Incident:
    return Incident(
        Subject(Kind(row.kind), row.tenant_id, row.adapter, row.item),
        State(row.state),
        row.since,
        row.value,
        row.threshold,
        Severity(row.severity),
        row.note,
        row.fired_at,
        row.good_since,
        row.resolved_at,
    )


def _alert_of(row: IncidentRow, tenant: str | None) -> Alert:
    return Alert(row.id, tenant, _incident_of(row), row.acknowledged_at, row.acknowledged_by)
