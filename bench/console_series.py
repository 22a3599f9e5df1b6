"""What ``bench console`` puts into the roll-ups behind dashboards, and what it asks of them.

Ten thousand adapters of two tenants, each used every hour of the last day and every day of a month, in rows that lie
in the order of time; a thousand tenants; minutes of the last three days and hours of the last three months of what the
series are asked for; eight engines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import asyncpg
import msgspec

from stencilpress.engine.messages import AdapterSeen, PageOwner, Pages, pack_tokens
from stencilpress.gateway.usage.engine_sums import COUNTERS, GAUGES, EngineSum, encode
from stencilpress.gateway.usage.histogram import pack
from tests.fakes.engine import FakeEngine

_SAMPLE = encode(
    EngineSum(
        12,
        0,
        dict.fromkeys(GAUGES, 1200),
        dict.fromkeys(GAUGES, 150),
        dict.fromkeys(COUNTERS, 5000),
        dict.fromkeys(range(33), 100),
        dict.fromkeys(range(129), 20),
    )
)
_UNITS = "CASE period WHEN '6hours' THEN 6 WHEN '7days' THEN 7 ELSE 1 END"
"""Of how many hours or days a roll-up is."""
_SECONDS = "CASE period WHEN 'minute' THEN 60 WHEN 'day' THEN 86400 WHEN '7days' THEN 86400 ELSE 3600 END"


def _counts(units: int) -> str:
    return f"decode('{pack(dict.fromkeys(range(20, 60), 3 * units)).hex()}', 'hex')"


_COUNTS = f"CASE period WHEN '6hours' THEN {_counts(6)} WHEN '7days' THEN {_counts(7)} ELSE {_counts(1)} END"
PARTS = {
    "sums": "requests, failures, cold_starts, prompt_tokens, cached_tokens, completion_tokens, undelivered_tokens, "
    "duration_ms, ttft, inter_token, queue, cold_start, errors",
    "values": f"{', '.join(f'{one} * units' for one in (60, 1, 1, 30_000, 0, 12_000, 0, 240_000))}, "
    f"{_COUNTS}, {_COUNTS}, {_COUNTS}, {_COUNTS}, decode('{pack({}).hex()}', 'hex')",
    "time": "to_timestamp((floor(extract(epoch FROM now()) / seconds) - number) * seconds)",
    "size": f"CROSS JOIN LATERAL (SELECT {_UNITS} AS units, ({_UNITS}) * ({_SECONDS}) AS seconds) AS size",
    "sample": f"decode('{_SAMPLE.hex()}', 'hex')",
}
SEEDS: dict[str, str] = {
    "usage_rollups": """
        INSERT INTO usage_rollups (tenant_id, period, starts_at, adapter, $sums)
        SELECT tenant, period, $time AS starts_at, 'adapter-' || i, $values
        FROM (VALUES ('day', 32, 2, 1.0), ('7days', 6, 2, 1.0), ('hour', 26, 2, 1.0), ('6hours', 6, 2, 1.0),
                ('minute', 2880, 1, 0.02)) AS part (period, back, tenants, share)
            $size, generate_series(0, back - 1) AS number, generate_series(3, 2 + tenants) AS tenant,
            generate_series(1, ($$1 * share)::int) AS i
        ORDER BY starts_at""",
    "usage_version_rollups": """
        INSERT INTO usage_version_rollups (tenant_id, period, adapter, version, starts_at, $sums)
        SELECT 3, period, 'adapter-' || i, version, $time, $values
        FROM (VALUES ('hour', 2160), ('minute', 4320)) AS part (period, back) $size,
            generate_series(0, back - 1) AS number, generate_series(1, 2) AS version,
            generate_series(1, $$1::int) AS i""",
    "usage_tenant_rollups": """
        INSERT INTO usage_tenant_rollups (tenant_id, period, starts_at, $sums)
        SELECT tenant, period, $time, $values
        FROM (VALUES ('day', 90, $$1::int), ('hour', 170, $$1::int), ('minute', 4320, 4)) AS part (period, back, most)
            $size, generate_series(0, back - 1) AS number, generate_series(0, most) AS tenant""",
    "usage_ranks": """
        INSERT INTO usage_ranks (period, starts_at, tenant_id, adapter, requests, failures, cold_starts, tokens)
        SELECT period, starts_at, tenant_id, adapter, requests, failures, cold_starts, prompt_tokens + completion_tokens
        FROM usage_rollups WHERE period <> 'minute' AND $$1::int > 0 ORDER BY starts_at""",
    "quota_refusals": """
        INSERT INTO quota_refusals (tenant_id, period, starts_at, dimension, refused, watched)
        SELECT tenant, period, $time, 'dimension-' || i, 3, 1
        FROM (VALUES ('hour', 2160), ('minute', 4320)) AS part (period, back) $size,
            generate_series(0, back - 1) AS number, generate_series(0, 4) AS tenant,
            generate_series(1, $$1::int) AS i""",
    "engine_samples": """
        INSERT INTO engine_samples (server, engine, period, starts_at, sums)
        SELECT '$server', engine, period, $time, $sample
        FROM (VALUES ('hour', 2160), ('minute', 4320)) AS part (period, back) $size,
            generate_series(0, back - 1) AS number, generate_series(1, $$1::int) AS engine""",
}
"""How each table is filled, by a number that :data:`COUNTS` has."""
COUNTS = {
    "usage_rollups": 5000,
    "usage_version_rollups": 20,
    "usage_tenant_rollups": 1000,
    "usage_ranks": 1,
    "quota_refusals": 5,
    "engine_samples": 8,
}
POOL_PAGES = 40_000
SPANS = {
    "6 hours": timedelta(hours=6),
    "day": timedelta(days=1),
    "week": timedelta(days=7),
    "month": timedelta(days=30),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "/series": ("", "previous=true", "tenant=tenant-1"),
    "/tenants/{tenant}/series": ("", "previous=true", "adapter=adapter-2", "adapter=adapter-2&version=1"),
    "/top": ("", "by=ttft_p99&limit=50", "by=hit_rate", "tenants=true"),
    "/tenants/{tenant}/top": ("", "by=ttft_p99&limit=50", "by=cold_starts"),
    "/tenants/{tenant}/activity": (f"adapters={','.join(f'adapter-{i}' for i in range(1, 51))}",),
    "/tenants/{tenant}/adapters/{adapter}/comparison": ("version=1&other=2",),
    "/engines/{engine}/series": ("",),
}
"""What is asked of a path beside its span."""


def variants(path: str) -> Iterator[tuple[str, str]]:
    """Names and query strings of what is asked of a path that takes a span."""
    now = datetime.now(UTC)
    for query in VARIANTS.get(path, ()):
        for name, length in SPANS.items():
            start = (now - length).isoformat().replace("+00:00", "Z")
            shown = query if len(query) < 40 else f"{query[:20]}…"
            yield " ".join(filter(None, (shown, name))), f"{query}&start={start}".lstrip("&")


async def show_in_engine(engine: FakeEngine, connection: asyncpg.Connection) -> None:
    """Four thousand adapters seen, and a fragmented pool that they share with a hundred tenants."""
    rows = await connection.fetch("SELECT digest FROM versions ORDER BY digest LIMIT 4000")
    digests = [row["digest"] for row in rows]
    engine.adapters = [
        AdapterSeen(digest, 3, "hbm", 4, 1000, False, 0, 1, 30, 2, 1, 2, 0.1, 2, 0.01) for digest in digests
    ]
    chance = random.Random(7)
    owners = [PageOwner("free"), PageOwner("cached"), *(PageOwner("kv", str(3 + i)) for i in range(100))]
    owners += [PageOwner("adapter", digest) for digest in digests[:1000]]
    runs: list[int] = []
    while sum(runs[1::2]) < POOL_PAGES:
        runs += [chance.randrange(len(owners)), chance.randint(1, 4)]
    engine.pages = msgspec.structs.replace(
        Pages(0, 0, (), b""), total=sum(runs[1::2]), owners=tuple(owners), runs=pack_tokens(runs)
    )
