"""Usage rows by chance, what they sum up to by brute force, and what the catalog has of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import datetime, timedelta

import numpy as np
from sqlalchemy import select

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRollupRow
from stencilpress.gateway.catalog.usage_sums import Period, UsageSum, stored_sum
from stencilpress.gateway.usage.histogram import bucket_of, pack
from stencilpress.gateway.usage.record import UsageRow
from tests.usage import usage_row


def random_rows(chance: random.Random, start: datetime, span_s: int, count: int) -> list[UsageRow]:
    """Of three tenants with two adapters of two versions each and the base."""
    return [_row(chance, start + timedelta(seconds=chance.randrange(span_s))) for _ in range(count)]


def _row(chance: random.Random, admitted_at: datetime) -> UsageRow:
    adapter = chance.choice(("pirate", "poet", ""))
    status = chance.choice(("completed", "completed", "completed", "failed", "lost"))
    gaps = [chance.uniform(1, 80) for _ in range(chance.randrange(5))]
    counts: dict[int, int] = {}
    for gap in gaps:
        counts[bucket_of(gap)] = counts.get(bucket_of(gap), 0) + 1
    return usage_row(
        admitted_at,
        tenant_id=chance.choice((1, 2, 3)),
        key_id="abcdefghijkl",
        adapter=adapter,
        version=chance.choice((1, 2)) if adapter else 0,
        finished_at=admitted_at + timedelta(seconds=1),
        status=status,
        error_code=chance.choice(("engine_lost", "internal_error")) if status == "failed" else "",
        prompt_tokens=chance.randrange(1000),
        cached_tokens=chance.randrange(50),
        completion_tokens=chance.randrange(500),
        undelivered_tokens=chance.randrange(3),
        ttft_ms=chance.uniform(1, 900) if status == "completed" else None,
        inter_token_ms=None,
        queue_ms=chance.uniform(0.1, 90),
        cold_start_ms=chance.choice((0.0, 0.0, chance.uniform(1, 400))),
        duration_ms=chance.uniform(10, 5000),
        gaps=pack(counts) if counts else None,
    )


def exact_quantiles(values: Iterable[float | None], shares: list[float]) -> list[float]:
    """Of those that are there, by numpy."""
    known = [value for value in values if value is not None]
    return [float(one) for one in np.quantile(known, shares, method="inverted_cdf")]


async def usage_between(
    db: Database, period: Period, start: datetime, end: datetime, tenant_id: int | None = None
) -> dict[tuple[int, str], UsageSum]:
    """Sums by (tenant, adapter) of the roll-ups that begin in ``[start, end)``; no row of a request is read."""
    query = select(UsageRollupRow.__table__).where(
        UsageRollupRow.period == period, UsageRollupRow.starts_at >= start, UsageRollupRow.starts_at < end
    )
    if tenant_id is not None:
        query = query.where(UsageRollupRow.tenant_id == tenant_id)
    sums: dict[tuple[int, str], UsageSum] = {}
    async with db.read() as session:
        for row in (await session.execute(query)).all():
            sums.setdefault((row.tenant_id, row.adapter), UsageSum()).merge(stored_sum(row))
    return sums
