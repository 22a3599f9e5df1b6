"""Whose versions a digest is: an engine knows nothing else of an adapter."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import select

from stencilpress.gateway.catalog.models import AdapterRow, ShareRow, TenantRow, VersionRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_sums import parts

DIGESTS_A_STATEMENT = 1000


class Owner(NamedTuple):
    """A version with a digest. ``guests`` are the tenants that its adapter is shared with."""

    tenant_id: int
    tenant: str
    adapter: str
    version: int
    guests: frozenset[int]


async def owners_of(db: Database, digests: Collection[str]) -> dict[str, tuple[Owner, ...]]:
    """The versions of each digest, of whoever, deleted ones included: they may still be in memory."""
    versions = (
        select(
            VersionRow.digest,
            VersionRow.number,
            AdapterRow.id.label("adapter_id"),
            AdapterRow.name.label("adapter"),
            AdapterRow.tenant_id,
            TenantRow.name.label("tenant"),
        )
        .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .order_by(TenantRow.id, AdapterRow.name, VersionRow.number)
    )
    found: dict[str, list[Owner]] = {digest: [] for digest in digests}
    async with db.read() as session:
        for some in parts(sorted(digests), DIGESTS_A_STATEMENT):
            rows = (await session.execute(versions.where(VersionRow.digest.in_(some)))).all()
            guests: dict[int, set[int]] = {}
            for part in parts(sorted({row.adapter_id for row in rows}), DIGESTS_A_STATEMENT):
                shares = select(ShareRow.adapter_id, ShareRow.tenant_id).where(ShareRow.adapter_id.in_(part))
                for adapter_id, guest in await session.execute(shares):
                    guests.setdefault(adapter_id, set()).add(guest)
            for row in rows:
                shared_with = frozenset(guests.get(row.adapter_id, ()))
                found[row.digest].append(Owner(row.tenant_id, row.tenant, row.adapter, row.number, shared_with))
    return {digest: tuple(owners) for digest, owners in found.items()}


async def out_of_use(db: Database, digests: Collection[str]) -> frozenset[str]:
    """Those of the digests that no version in use has, of whoever: versions with the same content share memory."""
    used = (
        select(VersionRow.digest)
        .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .where(VersionRow.deleted_at.is_(None), AdapterRow.deleted_at.is_(None), TenantRow.deleted_at.is_(None))
    )
    left = set(digests)
    async with db.read() as session:
        for some in parts(sorted(digests), DIGESTS_A_STATEMENT):
            left.difference_update(await session.scalars(used.where(VersionRow.digest.in_(some))))
    return frozenset(left)


async def tenant_names(db: Database, ids: Collection[int]) -> dict[int, str]:
    """Names of tenants by their ids."""
    names: dict[int, str] = {}
    async with db.read() as session:
        for some in parts(sorted(ids)):
            found = await session.execute(select(TenantRow.id, TenantRow.name).where(TenantRow.id.in_(some)))
            names.update((one.id, one.name) for one in found)
    return names
