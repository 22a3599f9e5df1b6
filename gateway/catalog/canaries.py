"""Canaries and how they do: out of the roll-ups by version, one question for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, Select, and_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM
from stencilpress.gateway.alerts.incidents import Measured, Subject
from stencilpress.gateway.alerts.rules import Kind
from stencilpress.gateway.catalog.aliases import guard_of
from stencilpress.gateway.catalog.models import AdapterRow, AliasMoveRow, AliasRow, CanaryRow, ShareRow, TenantRow
from stencilpress.gateway.catalog.records import Canary
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageVersionRollupRow
from stencilpress.gateway.catalog.usage_sums import UsageSum, parts, stored_sum
from stencilpress.gateway.errors import NotFoundError

DEFAULT_WINDOW_S = 600
"""For canaries without a guard, to be looked at."""
TOLD_FOR = timedelta(hours=1)
"""How long a canary that was taken back stays an alert."""


@dataclass(frozen=True, slots=True)
class RunningCanary:
    """An alias with its canary, as it is since ``since``."""

    adapter_id: int
    tenant_id: int
    adapter: str
    alias: str
    version: int
    canary: Canary
    move_id: int
    since: datetime

    @property
    def window_s(self) -> int:
        return self.canary.guard.window_s if self.canary.guard is not None else DEFAULT_WINDOW_S

    def begins(self, now: datetime) -> datetime:
        """The minute from which on requests count: the window's, or that of the move that made it what it is."""
        since = max(self.since, now - timedelta(seconds=self.window_s))
        return since.replace(second=0, microsecond=0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What both versions did meanwhile, for all tenants that may use them."""

    running: RunningCanary
    since: datetime
    current: UsageSum
    canary: UsageSum


async def compare_canary(db: Database, tenant_id: int, adapter: str, alias: str, now: datetime) -> Comparison:
    """How one canary does. Raises :class:`NotFoundError` for an alias without one."""
    query = _running().where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == adapter, AliasRow.name == alias)
    async with db.read() as session:
        found = [_running_of(row) for row in await session.execute(query)]
        if not found:
            raise NotFoundError(f"alias: {adapter[:64]}@{alias[:64]} has no canary", param="alias")
        (comparison,) = await _compare(session, found, now)
    return comparison


async def compare_guarded(db: Database, now: datetime) -> list[Comparison]:
    """How all canaries do that have a guard, of tenants that are in force."""
    query = _running().where(
        CanaryRow.guard.is_not(None), TenantRow.deleted_at.is_(None), TenantRow.disabled_at.is_(None)
    )
    async with db.read() as session:
        return await _compare(session, [_running_of(row) for row in await session.execute(query)], now)


async def read_rolled_back(db: Database, now: datetime) -> dict[Subject, Measured]:
    """Canaries that the system took back in the last hour, for the alert that tells it."""
    query = (
        select(AdapterRow.tenant_id, AdapterRow.name, AliasMoveRow.alias, AliasMoveRow.reason)
        .join(AdapterRow, AdapterRow.id == AliasMoveRow.adapter_id)
        .where(AliasMoveRow.kind == "rollback", AliasMoveRow.at > now - TOLD_FOR, AliasMoveRow.actor == SYSTEM.name)
        .order_by(AliasMoveRow.id)
    )
    async with db.read() as session:
        return {
            Subject(Kind.CANARY_ROLLED_BACK, tenant_id, adapter, alias): Measured(1.0, reason)
            for tenant_id, adapter, alias, reason in await session.execute(query)
        }


def _running() -> Select[Any]:
    return (
        select(
            AdapterRow.id, AdapterRow.tenant_id, AdapterRow.name, AliasRow.name, AliasRow.version,
            CanaryRow.version, CanaryRow.percent, CanaryRow.guard, AliasRow.move_id, AliasRow.updated_at,
        )
        .join(AliasRow, AliasRow.adapter_id == AdapterRow.id)
        .join(CanaryRow, and_(CanaryRow.adapter_id == AliasRow.adapter_id, CanaryRow.alias == AliasRow.name))
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .where(AdapterRow.deleted_at.is_(None))
    )  # fmt: skip


def _running_of(row: Row[Any]) -> RunningCanary:
    adapter_id, tenant_id, adapter, alias, version, canary, percent, guard, move_id, since = tuple[Any, ...](row)
    return RunningCanary(
        adapter_id, tenant_id, adapter, alias, version, Canary(canary, percent, guard_of(guard)), move_id, since
    )


async def _compare(session: AsyncSession, canaries: Sequence[RunningCanary], now: datetime) -> list[Comparison]:
    by_adapter: defaultdict[int, list[tuple[datetime, int, UsageSum]]] = defaultdict(list)
    begins = min((one.begins(now) for one in canaries), default=now)
    for adapter_ids in parts(sorted({one.adapter_id for one in canaries})):
        for adapter_id, *_, row in await session.execute(_rollups(adapter_ids, begins)):
            by_adapter[adapter_id].append((row.starts_at, row.version, stored_sum(row)))
    return [_comparison(one, by_adapter[one.adapter_id], now) for one in canaries]


def _rollups(adapter_ids: Iterable[int], begins: datetime) -> Select[Any]:
    """Minutes of an adapter's versions, of its owner and of those that it is shared with."""
    owners = select(AdapterRow.id.label("id"), AdapterRow.tenant_id, AdapterRow.name)
    guests = select(ShareRow.adapter_id.label("id"), ShareRow.tenant_id, ShareRow.name)
    ids = list(adapter_ids)
    users = union_all(owners.where(AdapterRow.id.in_(ids)), guests.where(ShareRow.adapter_id.in_(ids))).subquery(
        "users"
    )
    row = UsageVersionRollupRow
    return select(users.c.id, row).join(
        users,
        and_(
            row.tenant_id == users.c.tenant_id,
            row.period == "minute",
            row.adapter == users.c.name,
            row.starts_at >= begins,
        ),
    )


def _comparison(one: RunningCanary, sums: Iterable[tuple[datetime, int, UsageSum]], now: datetime) -> Comparison:
    since = one.begins(now)
    current, canary = UsageSum(), UsageSum()
    for starts_at, version, usage in sums:
        if starts_at < since:
            continue
        if version == one.version:
            current.merge(usage)
        elif version == one.canary.version:
            canary.merge(usage)
    return Comparison(one, since, current, canary)
