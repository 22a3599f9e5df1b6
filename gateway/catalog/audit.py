"""The audit log: every change of the catalog, with who made it, written in the change's own transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, exists, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.catalog.account_models import UserRow
from stencilpress.gateway.catalog.models import AuditRow, KeyRow, TenantRow
from stencilpress.gateway.catalog.records import AuditEntry
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.stamps import touch

MAX_TARGET_CHARS = 200


@dataclass(frozen=True, slots=True)
class Target:
    """What was changed: ``Target("adapter", "helper", tenant.id)``. ``tenant_id`` None is nobody's in particular."""

    kind: str
    name: str
    tenant_id: int | None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"[:MAX_TARGET_CHARS]


def audit(
    session: AsyncSession,
    actor: Actor,
    action: str,
    target: Target,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Record a change, and make gateways forget what they know of the target's tenant.

    Of two states only the fields that differ are kept; two equal states are no change and leave no entry. Neither may
    hold a secret: tenants read their entries.
    """
    old, new = _plain(before), _plain(after)
    if old is not None and new is not None:
        differing = [field for field in {**old, **new} if old.get(field) != new.get(field)]
        if not differing:
            return
        old, new = ({field: state.get(field) for field in differing} for state in (old, new))
    if target.tenant_id is not None:
        touch(session, target.tenant_id)
    session.add(
        AuditRow(
            at=datetime.now(UTC),
            actor=actor.name[:100],
            role=actor.role.value,
            tenant_id=target.tenant_id,
            action=action,
            target=str(target),
            before=old,
            after=new,
            source=actor.source[:100],
            request_id=actor.request_id[:40],
        )
    )


async def list_audit(
    db: Database,
    *,
    tenant_id: int | None = None,
    target: str = "",
    actor: str = "",
    action: str = "",
    before_id: int | None = None,
    limit: int = 50,
    operators: bool = True,
) -> tuple[AuditEntry, ...]:
    """Entries, newest first, below ``before_id``; of one tenant, or of all with ``tenant_id`` None.

    ``target`` and ``actor`` are whole, ``action`` may be the begin of one: ``alias.``. Without ``operators`` what
    was done to operators and to their keys is left out: for others they do not exist.
    """
    place: list[ColumnElement[bool]] = []
    if tenant_id is not None:
        place.append(AuditRow.tenant_id == tenant_id)
    if actor:
        place.append(AuditRow.actor == actor)
    wanted = list(place)
    if target:
        wanted.append(AuditRow.target == target)
    if not operators:
        wanted += [~_is_about_operator(UserRow, "user"), ~_is_about_operator(KeyRow, "key")]
    if before_id is not None:
        wanted.append(AuditRow.id < before_id)
    async with db.read() as session:
        alternatives = [wanted]
        if actor or action:
            actions = [one for one in await _actions(session, place) if one.startswith(action)]
            alternatives = [[AuditRow.action == one, *wanted] for one in actions]
        if not alternatives:
            return ()
        rows = await session.execute(_newest(alternatives, limit))
        return tuple(_to_entry(row, tenant) for row, tenant in rows)


async def _actions(session: AsyncSession, place: Sequence[ColumnElement[bool]]) -> list[str]:
    """What was ever done there: some dozens of words, each found by a step along an index."""
    first = select(func.min(AuditRow.action).label("action")).where(*place).cte("actions", recursive=True)
    following = select(func.min(AuditRow.action)).where(*place, AuditRow.action > first.c.action).scalar_subquery()
    actions = first.union_all(select(following).where(first.c.action.is_not(None)))
    return [one for one in await session.scalars(select(actions.c.action)) if one is not None]


def _newest(alternatives: Sequence[Sequence[ColumnElement[bool]]], limit: int) -> Select[AuditRow, str | None]:
    """The newest entries to which all conditions of one alternative apply.

    Each has an index in the order of its entries, so a page costs the same however many entries there are.
    """
    each = [
        select(AuditRow.id).where(*conditions).order_by(AuditRow.id.desc()).limit(limit).subquery()
        for conditions in alternatives
    ]
    ids = union_all(*(select(one.c.id) for one in each)).subquery()
    query = select(AuditRow, TenantRow.name).outerjoin(TenantRow, AuditRow.tenant_id == TenantRow.id)
    return query.join(ids, AuditRow.id == ids.c.id).order_by(AuditRow.id.desc()).limit(limit)


def _is_about_operator(row: type[UserRow | KeyRow], kind: str) -> ColumnElement[bool]:
    """Whether an entry's target is an operator, or one's key. Looked up for each entry, since keys are many."""
    prefix = f"{kind}:"
    is_target = row.public_id == func.substr(AuditRow.target, len(prefix) + 1)
    return exists().where(AuditRow.target.startswith(prefix), is_target, row.role == Role.OPERATOR.value)


async def actors_of(db: Database, tenant_id: int, action: str, targets: Sequence[str]) -> dict[str, str]:
    """Who first made a change to each of some things of a tenant, such as who added a version."""
    query = select(AuditRow.target, AuditRow.actor).where(
        AuditRow.tenant_id == tenant_id, AuditRow.action == action, AuditRow.target.in_(targets)
    )
    async with db.read() as session:
        return {row.target: row.actor for row in await session.execute(query.order_by(AuditRow.id.desc()))}


def _plain(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if state is None else msgspec.to_builtins(dict(state))


def _to_entry(row: AuditRow, tenant: str | None) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        at=row.at,
        actor=row.actor,
        role=row.role,
        tenant=tenant,
        action=row.action,
        target=row.target,
        before=row.before,
        after=row.after,
        source=row.source,
        request_id=row.request_id,
    )
