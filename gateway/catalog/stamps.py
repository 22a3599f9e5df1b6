"""Stamps of change: how gateways learn which tenants' part of the catalog is no longer what they remember.

A transaction that changes something of a tenant gives the tenant the next number of one counter. The counter's row is
locked from then until the commit, so numbers become visible in their order: whoever asks for all above the highest that
he has seen misses none.
"""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import StampRow

COUNTER = 0
"""Stands for no tenant: ids begin at 1."""
RETIRED = -1
"""Stands for no tenant either: its stamp is that of the last change that took versions out of use, whoever's."""
_TOUCHED = "touched_tenants"


def touch(session: AsyncSession, tenant_id: int) -> None:
    """Gateways forget what they know of this tenant once the transaction is committed."""
    session.info.setdefault(_TOUCHED, set()).add(tenant_id)


def touch_retired(session: AsyncSession) -> None:
    """Gateways look, once the transaction is committed, whether engines hold what nobody has in use any more."""
    touch(session, RETIRED)


async def stamp_touched(session: AsyncSession) -> None:
    """At the very end of a transaction: whoever holds the counter waits for no other lock."""
    touched = session.info.pop(_TOUCHED, None)
    if not touched:
        return
    await session.flush()
    counted = update(StampRow).where(StampRow.tenant_id == COUNTER).values(stamp=StampRow.stamp + 1)
    stamp = await session.scalar(counted.returning(StampRow.stamp))
    for tenant_id in touched:
        await session.merge(StampRow(tenant_id=tenant_id, stamp=stamp))


async def read_stamps(session: AsyncSession, above: int) -> dict[int, int]:
    """Tenants that changed after stamp ``above``, with the stamp of their last change, and the counter itself; so with
    :data:`RETIRED`."""
    query = select(StampRow.tenant_id, StampRow.stamp).where(StampRow.stamp > above)
    return {row.tenant_id: row.stamp for row in await session.execute(query)}
