"""Series, tables, comparisons and lists over HTTP: what each role sees, as JSON and as CSV."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.api.admin.tables import inert
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.usage.record import UsageRow
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import BASE_NAMES, Gateway, new_version, running_gateway
from tests.usage import usage_row

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOW = datetime.now(UTC)


def request_row(minutes_ago: float, **given: Any) -> UsageRow:
    """Of tenant ``demo`` and its ``pirate@1``, unless other things are given."""
    usual = {"cached_tokens": 2, "completion_tokens": 6, "duration_ms": 300.0}
    return usage_row(NOW - timedelta(minutes=minutes_ago), **(usual | given))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Ten requests of ``pirate@1``, five of its version 2 of which two failed, three of the base, one of another's."""
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        rows = [request_row(3 + number) for number in range(10)]
        rows += [request_row(20 + number, version=2, ttft_ms=400.0) for number in range(3)]
        failed: dict[str, Any] = {"status": "failed", "error_code": "engine_lost", "ttft_ms": None, "version": 2}
        rows += [request_row(30 + number, **failed) for number in range(2)]
        rows += [request_row(5, adapter="", version=0, cold_start_ms=0.0) for _ in range(3)]
        rows += [request_row(5, tenant_id=2, adapter="secret", cold_start_ms=50.0)]
        await insert_usage(running.services.db, rows)
        while await roll_up(running.services.db):
            pass
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def viewer(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "demo", Role.VIEWER)


@pytest_asyncio.fixture(loop_scope="module")
async def operator(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.OPERATOR)


def span(**more: object) -> str:
    """The last hour and a half."""
    start = (NOW - timedelta(minutes=90)).isoformat().replace("+00:00", "Z")
    return "&".join([f"start={start}", *(f"{name}={value}" for name, value in more.items())])


async def test_a_tenants_series_has_its_own_requests_alone(viewer: AdminClient, operator: AdminClient) -> None:
    mine = await viewer("GET", f"/tenants/demo/series?{span()}")
    assert (mine["step_s"], len(mine["times"])) == (60, len(mine["lines"]["requests"]))
    assert sum(mine["lines"]["requests"]) == mine["total"]["requests"] == 18
    assert mine["total"]["errors"] == {"engine_lost": 2}
    assert sum(mine["lines"]["errors"]["engine_lost"]) == 2
    assert mine["total"]["ttft_ms"]["p50"] == pytest.approx(100, rel=0.05)
    assert mine["total"]["tokens_per_s"] == pytest.approx(6 / 0.3)
    every = await operator("GET", f"/series?{span()}")
    assert every["total"]["requests"] == 19
    assert await operator("GET", f"/series?{span(tenant='demo')}") == mine
    at = mine["lines"]["requests"].index(1)
    assert mine["lines"]["prompt_tokens_per_s"][at] == pytest.approx(10 / 60, abs=1e-3)


async def test_a_series_of_an_adapter_or_a_version_and_the_span_before(viewer: AdminClient) -> None:
    adapter = await viewer("GET", f"/tenants/demo/series?{span(adapter='pirate', previous='true')}")
    assert (adapter["total"]["requests"], adapter["previous_total"]["requests"]) == (15, 0)
    assert len(adapter["previous"]["requests"]) == len(adapter["times"])
    version = await viewer("GET", f"/tenants/demo/series?{span(adapter='pirate', version=2)}")
    assert (version["total"]["requests"], version["total"]["failures"]) == (5, 2)
    base = await viewer("GET", f"/tenants/demo/series?{span(adapter='base', points=3)}")
    assert (base["total"]["requests"], len(base["times"]) <= 3) == (3, True)
    for query, field in (("version=1", "version"), ("points=500", "points"), ("tenant=demo", "tenant")):
        assert (await viewer("GET", f"/tenants/demo/series?{query}", status=400))["error"]["param"] == field


async def test_refusals_of_the_quota_are_in_the_series(gateway: Gateway, viewer: AdminClient) -> None:
    metrics = gateway.services.metrics
    metrics.refused(1, "tokens_per_day", watched=False)
    metrics.refused(1, "tokens_per_day", watched=True)
    metrics.refused(2, "concurrent_streams", watched=False)
    refusals: dict[str, Any] = {}
    async with asyncio.timeout(45):
        while not refusals:  # the gateway's own flush may have taken them, and be writing
            await metrics.refusals.flush(gateway.services.db)
            refusals = (await viewer("GET", f"/tenants/demo/series?{span()}"))["refusals"]
    assert list(refusals) == ["tokens_per_day"]
    assert (sum(refusals["tokens_per_day"]["refused"]), sum(refusals["tokens_per_day"]["watched"])) == (1, 1)


async def test_versions_are_compared_over_the_same_span(viewer: AdminClient) -> None:
    path = "/tenants/demo/adapters/pirate/comparison"
    found = await viewer("GET", f"{path}?{span(version=2, other=1)}")
    assert (found["total"]["requests"], found["other_total"]["requests"]) == (5, 10)
    assert (found["total"]["error_share"], found["other_total"]["error_share"]) == (0.4, 0)
    assert found["total"]["ttft_ms"]["p95"] == pytest.approx(400, rel=0.05)
    assert found["other_total"]["ttft_ms"]["p95"] == pytest.approx(100, rel=0.05)
    assert (await viewer.raw("GET", f"{path}?version=1&other=9"))[0] == 404


async def test_tops_are_of_a_tenant_or_of_all(viewer: AdminClient, operator: AdminClient) -> None:
    mine = (await viewer("GET", f"/tenants/demo/top?{span()}"))["data"]
    assert [(one["tenant"], one["adapter"], one["total"]["requests"]) for one in mine] == [
        ("demo", "pirate", 15),
        ("demo", "", 3),
    ]
    cold = (await operator("GET", f"/top?{span(by='hit_rate', limit=1)}"))["data"]
    assert [(one["tenant"], one["adapter"], one["total"]["hit_rate"]) for one in cold] == [("other", "secret", 0.0)]
    tenants = (await operator("GET", f"/top?{span(tenants='true', by='requests')}"))["data"]
    assert [(one["tenant"], one["adapter"], one["total"]["requests"]) for one in tenants] == [
        ("demo", None, 18),
        ("other", None, 1),
    ]
    assert (await viewer("GET", "/tenants/demo/top?by=name", status=400))["error"]["param"] == "by"


async def test_activity_is_of_the_adapters_asked_for(viewer: AdminClient) -> None:
    found = await viewer("GET", f"/tenants/demo/activity?{span(adapters='pirate,nobody,secret')}")
    assert [(one["adapter"], one["total"]["requests"]) for one in found["data"]] == [
        ("pirate", 15),
        ("nobody", 0),
        ("secret", 0),
    ]
    assert all(sum(one["requests"]) == one["total"]["requests"] for one in found["data"])


async def test_tables_come_as_csv(gateway: Gateway, viewer: AdminClient) -> None:
    async def table(path: str, accept: str = "*/*") -> list[dict[str, str]]:
        headers = {"Authorization": f"Bearer {viewer.key}", "Accept": accept}
        async with gateway.http.get(f"{gateway.url}{ADMIN_PREFIX}{path}", headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, "text/csv")
            return list(csv.DictReader(io.StringIO(await answer.text())))

    tops = await table(f"/tenants/demo/top?{span(format='csv')}")
    assert [(row["adapter"], row["requests"]) for row in tops] == [("pirate", "15"), ("", "3")]
    series = await table(f"/tenants/demo/series?{span()}", accept="text/csv")
    assert sum(int(row["requests"]) for row in series) == 18
    assert datetime.fromisoformat(series[0]["time"]) <= NOW - timedelta(minutes=90)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
async def test_a_text_is_no_formula(text: str) -> None:
    assert inert(text) == f"'{text}"
    assert inert(-1.5) == -1.5
    assert inert("a=1") == "a=1"


async def test_operators_see_the_adapters_of_all_tenants(
    gateway: Gateway, operator: AdminClient, viewer: AdminClient
) -> None:
    db, base = gateway.services.db, BaseNames.of(BASE_NAMES)
    acme = await create_tenant(db, "acme")
    for name in ("alpha", "beta", "pirate"):
        await add_version(db, acme.id, name, new_version("c"), base)

    async def listed(query: str) -> list[tuple[str, str]]:
        return [(one["tenant"], one["name"]) for one in (await operator("GET", f"/adapters?{query}"))["data"]]

    everything = [("acme", "alpha"), ("acme", "beta"), ("acme", "pirate"), ("demo", "pirate")]
    assert await listed("") == everything
    assert await listed("name=pi") == everything[2:]
    assert await listed("tenant=ac&name=b") == [("acme", "beta")]
    assert await listed("sort=newest") == [everything[2], everything[1], everything[0], everything[3]]
    for sort in ("tenant", "name", "newest"):
        whole, after = await listed(f"sort={sort}"), ""
        walked: list[tuple[str, str]] = []
        while True:
            page = await operator("GET", f"/adapters?sort={sort}&limit=1&after={after}")
            walked += [(one["tenant"], one["name"]) for one in page["data"]]
            after = page["next"]
            if not after:
                break
        assert walked == whole
    [pirate] = (await operator("GET", "/adapters?tenant=demo"))["data"]
    assert (pirate["versions"], pirate["newest"], pirate["ranks"], pirate["aliases"]) == (2, 2, [8], {"prod": 1})
    assert (await viewer.raw("GET", "/adapters"))[0] == 403
