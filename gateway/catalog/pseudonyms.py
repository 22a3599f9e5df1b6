"""What stands for the names of a tenant that is erased, in records that stay.

A pseudonym is an HMAC of the name under the tenant's salt, which goes with the tenant. So the same name has the same
pseudonym in every record, also when erasing was interrupted and begins again, and afterwards nobody can tell it from a
guessed name. It has a colon, which no name may have, so nothing is replaced twice.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from sqlalchemy import bindparam, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import AuditRow, TenantRow
from stencilpress.gateway.catalog.tenants import TOMBSTONE
from stencilpress.gateway.catalog.usage_models import (
    UsageRankRow,
    UsageRequestRow,
    UsageRollupRow,
    UsageVersionRollupRow,
)
from stencilpress.gateway.names import DEFAULT_ALIAS

ERASED = "erased:"
BATCH = 1000
"""Entries of the log, or rows of a roll-up, that change in one transaction."""
ROLL_UPS: tuple[Any, ...] = (UsageRollupRow, UsageVersionRollupRow, UsageRankRow)
_CHARS = 12
_VOCABULARY = frozenset(
    {"base_id", "kept", "kind", "role", "routes", "severity", "target_modules", "time_zone", "with"}
)
"""Fields of an entry whose texts nobody of the tenant chose. ``with`` is another tenant, which has its own name."""
_SHARES = ("adapter.share", "adapter.unshare")


class Pseudonyms:
    """Of one tenant, which still has its name and its salt."""

    def __init__(self, tenant: TenantRow) -> None:
        self._salt = tenant.prefix_salt
        self.tenant = tenant.name
        self.tombstone = TOMBSTONE + self._digest(f"tenant:{tenant.name}")

    def of(self, text: str) -> str:
        """An adapter, an alias or any other text of the tenant's; "" stays."""
        return text if not text or text.startswith(ERASED) else ERASED + self._digest(text)

    def target(self, target: str) -> str:
        """What an entry is about. Keys, people and alerts are known by opaque ids already."""
        kind, _, name = target.partition(":")
        match kind:
            case "tenant" | "alert_webhook":
                return f"{kind}:{self.tombstone}"
            case "adapter":
                return f"adapter:{self.of(name)}"
            case "version":
                adapter, _, number = name.rpartition("@")
                return f"version:{self.of(adapter)}@{number}"
            case "alias":
                adapter, _, alias = name.partition("@")
                return f"alias:{self.of(adapter)}@{alias if alias == DEFAULT_ALIAS else self.of(alias)}"
            case "alert_rule":
                adapter, slash, rule = name.rpartition("/")
                return f"alert_rule:{self.of(adapter)}{slash}{rule}"
        return target

    def state(self, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The state before or after a change: numbers, instants and words of ours stay, texts do not."""
        return None if state is None else {field: self._value(field, value) for field, value in state.items()}

    def _value(self, field: str, value: Any) -> Any:
        if field in _VOCABULARY or field.endswith("_at"):
            return value
        if isinstance(value, str):
            return self.of(value)
        if isinstance(value, Mapping):
            return self.state(value)
        return [self._value(field, one) for one in value] if isinstance(value, list) else value

    def _digest(self, text: str) -> str:
        return hmac.new(self._salt, text.encode(), hashlib.sha256).hexdigest()[:_CHARS]


async def rename_entries(session: AsyncSession, tenant_id: int, names: Pseudonyms, after_id: int) -> int | None:
    """Replace the names in some entries of the audit log; returns where to go on, None at the end."""
    query = select(AuditRow).where(AuditRow.tenant_id == tenant_id, AuditRow.id > after_id)
    entries = list(await session.scalars(query.order_by(AuditRow.id).limit(BATCH)))
    for entry in entries:
        entry.target = names.target(entry.target)
        entry.before, entry.after = names.state(entry.before), names.state(entry.after)
    return entries[-1].id if entries else None


async def rename_guest(session: AsyncSession, names: Pseudonyms) -> None:
    """In the entries of other tenants, who shared adapters with it."""
    shared = [state["with"].as_string() == names.tenant for state in (AuditRow.before, AuditRow.after)]
    query = select(AuditRow).where(AuditRow.action.in_(_SHARES), or_(*shared))
    for entry in await session.scalars(query):
        entry.before, entry.after = (
            state and {**state, "with": names.tombstone} for state in (entry.before, entry.after)
        )


async def rename_requests(session: AsyncSession, tenant_id: int, names: Pseudonyms) -> None:
    """In the rows of requests that are in no roll-up yet, so that none gets a name again."""
    mine = (UsageRequestRow.tenant_id == tenant_id, ~UsageRequestRow.rolled_up)
    for adapter in list(await session.scalars(select(UsageRequestRow.adapter).where(*mine).distinct())):
        rows = update(UsageRequestRow).where(*mine, UsageRequestRow.adapter == adapter)
        await session.execute(rows.values(adapter=names.of(adapter)))


async def rename_sums(
    session: AsyncSession, table: Any, tenant_id: int, names: Pseudonyms, after: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Replace adapters' names in some rows of a roll-up; () begins. Returns where to go on, None at the end."""
    key = [column for column in table.__table__.primary_key if column.name != "tenant_id"]
    query = select(*key).where(table.tenant_id == tenant_id).order_by(*key).limit(BATCH)
    rows = (await session.execute(query.where(tuple_(*key) > after) if after else query)).all()
    named = [row for row in rows if row.adapter != names.of(row.adapter)]
    if named:
        this = [column == bindparam(f"old_{column.name}") for column in key]
        change = update(table.__table__).where(table.tenant_id == tenant_id, *this)
        old = [f"old_{column.name}" for column in key]
        values = [dict(zip(old, row, strict=True)) | {"adapter": names.of(row.adapter)} for row in named]
        await (await session.connection()).execute(change, values)
    return tuple(rows[-1]) if rows else None
