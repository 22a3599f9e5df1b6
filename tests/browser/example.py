"""An installation as it might be after a busy day, for looking at the console: made up, and always the same."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.engine_samples import Sampled, add_engine_samples
from stencilpress.gateway.catalog.refusals import Refusals, Refused, add_refusals
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import change_tenant, create_tenant, get_tenant
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_models import EngineSampleRow, UsageRequestRow
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.usage.engine_sums import EngineSum
from stencilpress.gateway.usage.histogram import bucket_of, pack
from stencilpress.gateway.usage.record import UsageRow
from tests.integration.console_harness import make_user
from tests.usage import usage_row

PLANS: Mapping[str, dict[str, object]] = {
    "acme": {"requests_per_minute": 600, "tokens_per_month": 50_000_000, "concurrent_streams": 32, "weight": 4.0},
    "bluebird-travel": {"requests_per_minute": 120, "tokens_per_day": 200_000, "time_zone": "Europe/Vienna"},
    "corner-clinic": {"tokens_per_minute": 20_000, "concurrent_streams": 4, "quota_shadow": True},
    "demo": {"requests_per_minute": 300, "tokens_per_day": 1_000_000, "tokens_per_month": 20_000_000},
}
ADAPTERS = {
    "acme": ("contracts", "support"),
    "bluebird-travel": ("itineraries", "reviews"),
    "corner-clinic": ("triage",),
    "demo": ("json", "pirate", "support", "terse"),
}
SHARES = {"acme": 5, "bluebird-travel": 3, "corner-clinic": 1, "demo": 4}
"""Of the traffic."""
REQUESTS = 12_000
HOURS = 26


async def people(db: Database) -> dict[str, str]:
    """Tenants with their plans, users and keys; a key of each tenant."""
    keys = {}
    for name in PLANS:
        if name != "demo":
            await create_tenant(db, name)
        await change_tenant(db, name, PLANS[name])
        for label in ("production", "staging", "notebook"):
            keys[name] = (await issue_key(db, name, label)).token
    await make_user(db, Role.OPERATOR, email="ada@example.com")
    for role, person in ((Role.ADMIN, "grace"), (Role.VIEWER, "edsger"), (Role.VIEWER, "barbara")):
        await make_user(db, role, email=f"{person}@demo.example")
    return keys


async def traffic(db: Database) -> None:
    """A day of requests with what engines did, and refusals."""
    chance, now = random.Random(11), datetime.now(UTC)
    ids = {name: (await get_tenant(db, name)).id for name in PLANS}
    rows = list(_requests(chance, now, ids))
    for start in range(0, len(rows), 500):
        await insert_usage(db, rows[start : start + 500])
    await add_refusals(db, dict(_refusals(chance, now, ids)))
    await add_engine_samples(db, dict(_samples(chance, now, await _server(db))))
    await _rolled_up(db)


def _requests(chance: random.Random, now: datetime, ids: Mapping[str, int]) -> Iterator[UsageRow]:
    for _ in range(REQUESTS):
        ago_s = 30 + HOURS * 3600 * chance.random() ** 2  # more of what a first look shows
        if chance.random() > _busy(ago_s):
            continue
        tenant = chance.choices(list(SHARES), list(SHARES.values()))[0]
        adapter = chance.choice((*ADAPTERS[tenant], ADAPTERS[tenant][0], ""))
        version = 2 if adapter == "terse" and ago_s < 9000 and chance.random() < 0.25 else 1
        yield _request(chance, now - timedelta(seconds=ago_s), ids[tenant], adapter, version)


def _request(chance: random.Random, at: datetime, tenant_id: int, adapter: str, version: int) -> UsageRow:
    cold_ms = chance.lognormvariate(3.2, 0.4) if adapter and chance.random() < 0.02 else 0.0
    queue_ms = chance.lognormvariate(0.8, 0.9)
    ttft_ms = chance.lognormvariate(3.7 + 0.25 * (version == 2), 0.45) + queue_ms + cold_ms
    answer, gap_ms = int(chance.lognormvariate(4.6, 0.7)) + 1, chance.lognormvariate(1.75, 0.12)
    failed = chance.random() < 0.004
    gaps: dict[int, int] = {}
    for _ in range(min(answer, 40)):
        bucket = bucket_of(chance.lognormvariate(1.75, 0.25))
        gaps[bucket] = gaps.get(bucket, 0) + 1
    return usage_row(
        at,
        request_id=f"req_{chance.getrandbits(64):016x}",
        tenant_id=tenant_id,
        key_id="demonstrates",
        adapter=adapter,
        version=version if adapter else 0,
        finished_at=at + timedelta(milliseconds=ttft_ms + answer * gap_ms),
        status="failed" if failed else "completed",
        error_code="server_is_overloaded" if failed else "",
        prompt_tokens=int(chance.lognormvariate(5.6, 0.8)) + 8,
        cached_tokens=int(chance.lognormvariate(3.5, 1.0)),
        completion_tokens=answer,
        undelivered_tokens=chance.choice((0, 0, 0, 1)),
        ttft_ms=ttft_ms,
        inter_token_ms=gap_ms,
        queue_ms=queue_ms,
        cold_start_ms=cold_ms,
        duration_ms=ttft_ms + answer * gap_ms,
        gaps=pack(gaps),
    )


def _refusals(chance: random.Random, now: datetime, ids: Mapping[str, int]) -> Iterator[tuple[Refused, Refusals]]:
    for minute in _minutes(now):
        if chance.random() < 0.12:
            yield Refused(ids["bluebird-travel"], "requests_per_minute", minute), Refusals(chance.randrange(1, 9), 0)
        if chance.random() < 0.05:
            yield Refused(ids["corner-clinic"], "tokens_per_minute", minute), Refusals(0, chance.randrange(1, 5))


def _samples(chance: random.Random, now: datetime, server: str) -> Iterator[tuple[Sampled, EngineSum]]:
    pages = 2400
    for minute in _minutes(now):
        busy = _busy(now.timestamp() - minute) * chance.uniform(0.8, 1.2)
        kv, adapters = int(pages * 0.42 * busy), int(pages * 0.2)
        cached = int((pages - kv - adapters) * 0.55)
        loads = chance.randrange(3)
        gauges = {
            "running": int(24 * busy),
            "waiting": int(chance.random() < 0.2) * 2,
            "pages_total": pages,
            "pages_free": pages - kv - adapters - cached,
            "pages_kv": kv,
            "pages_cached": cached,
            "pages_adapter": adapters,
            "adapters_hbm": 9 + int(2 * busy),
            "adapters_host": 12,
        }
        steps = int(2000 * busy)
        counters = {"steps": steps, "adapter_loads": loads, "adapter_evictions": max(loads - 1, 0)}
        sampled = EngineSum(samples=1, gauges=gauges, peaks=dict(gauges), counters=counters)
        for _ in range(40):
            distinct = min(11, max(1, round(chance.gauss(6 * busy, 2))))
            sampled.adapters_per_step[distinct] = sampled.adapters_per_step.get(distinct, 0) + steps // 40
            requests = max(distinct, round(chance.gauss(24 * busy, 6)))
            sampled.requests_per_step[requests] = sampled.requests_per_step.get(requests, 0) + steps // 40
        yield Sampled(server, 1, minute), sampled


def _busy(ago_s: float) -> float:
    """How much of the day's peak, two hours ago, that moment had, 0 to 1."""
    return 0.55 + 0.4 * math.cos((ago_s / 3600 - 2) / 24 * 2 * math.pi)


def _minutes(now: datetime) -> range:
    last = int(now.timestamp()) // 60 * 60
    return range(last - HOURS * 3600, last, 60)


async def _rolled_up(db: Database) -> None:
    """Wait for the server to have added everything up."""
    async with asyncio.timeout(300):
        while True:
            async with db.read() as session:
                if await session.scalar(select(UsageRequestRow.key).where(~UsageRequestRow.rolled_up).limit(1)) is None:
                    return
            await asyncio.sleep(1)


async def _server(db: Database) -> str:
    """What the running server calls itself, once it has sampled its engine."""
    async with asyncio.timeout(120):
        while True:
            async with db.read() as session:
                if (name := await session.scalar(select(EngineSampleRow.server).limit(1))) is not None:
                    return name
            await asyncio.sleep(1)
