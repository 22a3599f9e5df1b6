"""Quotas and usage over HTTP: what a client is told, what is billed, and that no end of a request leaks anything."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from sqlalchemy import select

from stencilpress.gateway.accounting import accounting
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.catalog.usage import tokens_used
from stencilpress.gateway.catalog.usage_models import UsageRequestRow
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.errors import InsufficientQuotaError
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.quota.engine import Reservation
from stencilpress.gateway.quota.local import LocalStore
from stencilpress.gateway.quota.plan import Quota
from stencilpress.gateway.usage.histogram import quantiles
from tests.fakes.engine import Options
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway
from tests.integration.test_gateway_failures import eventually, next_event, open_stream
from tests.unit.usage_rows import usage_between

PACED = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, step_delay_s=0.002, tokens_per_step=3)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, PACED) as running:
        yield running


def limit(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Give every tenant this quota."""
    quotas = gateway.services.accounting.quotas
    reserve = quotas.reserve

    async def limited(tenant_id: int, _quota: Quota, tokens: int) -> Reservation:
        return await reserve(tenant_id, Quota(**limits), tokens)

    monkeypatch.setattr(quotas, "reserve", limited)


async def usage_rows(gateway: Gateway, count: int) -> list[Any]:
    """All rows, oldest first, once there are so many and nothing is in progress."""
    async with asyncio.timeout(45):
        while True:
            await gateway.services.accounting.flush()
            async with gateway.services.db.read() as session:
                rows = (await session.execute(select(UsageRequestRow.__table__).order_by(UsageRequestRow.key))).all()
            if len(rows) >= count:
                assert len(rows) == count
                return list(rows)
            await asyncio.sleep(0.01)


def held(gateway: Gateway) -> int:
    """Leases in the embedded store."""
    store = gateway.services.accounting.quotas._store
    assert isinstance(store, LocalStore)
    return sum(len(ledger.leases) for ledger in store._ledgers.values())


async def test_a_limited_tenant_is_told_where_it_stands(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(gateway, monkeypatch, requests_per_minute=2, tokens_per_minute=1000)
    api = await gateway.openai()
    message: Any = {"role": "user", "content": "abc"}
    first = await api.chat.completions.with_raw_response.create(model="pirate", messages=[message], max_tokens=5)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 1000 - 3 - 5
    async with await open_stream(gateway, max_tokens=5) as streamed:
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        await streamed.read()
    with pytest.raises(openai.RateLimitError) as refused:
        await api.chat.completions.create(model="pirate", messages=[message], max_tokens=5)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.body["dimension"] == "requests_per_minute"  # type: ignore[index]
    headers = refused.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 61
    assert 0 < int(headers["retry-after-ms"]) <= 61_000
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"].endswith("s")


async def test_the_sdk_does_not_try_again_when_a_budget_is_spent(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gateway, monkeypatch, tokens_per_day=10)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=5) as api:
        with pytest.raises(openai.RateLimitError) as spent:
            await api.completions.create(model="base", prompt="abc", max_tokens=50)
    assert (spent.value.type, spent.value.code) == ("insufficient_quota", "insufficient_quota")
    requests = gateway.services.metrics.registry.get_sample_value
    labels = {"route": "/v1/completions", "status": "4xx"}
    await eventually(lambda: requests("stencilpress_requests_total", labels) == 1)


async def test_over_a_websocket_the_refusal_names_the_dimension(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gateway, monkeypatch, concurrent_streams=1)
    headers = {"Authorization": f"Bearer {gateway.key}"}
    body = {"model": "pirate", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5000}
    async with gateway.http.ws_connect(f"{gateway.url}/v1/chat/ws", headers=headers) as ws:
        await ws.receive_json()
        for _ in range(2):
            await ws.send_json({"type": "response.create", "response": body})
        created = await _next(ws, "response.created")
        refused = await _next(ws, "error")
        assert refused["error"]["dimension"] == "concurrent_streams"
        assert refused["error"]["retry_after_ms"] == 1000
        await ws.send_json({"type": "response.cancel", "response_id": created["response"]["id"]})
        done = await _next(ws, "response.done")
    (row,) = await usage_rows(gateway, 1)
    assert (row.status, row.request_id) == ("cancelled", created["response"]["id"])
    assert row.completion_tokens == done["response"]["usage"]["completion_tokens"]
    assert held(gateway) == 0


async def _next(ws: aiohttp.ClientWebSocketResponse, kind: str) -> Any:
    async with asyncio.timeout(45):
        while (event := await ws.receive_json())["type"] != kind:
            pass
        return event


async def test_a_thousand_at_once_over_http_do_not_pass_a_limit(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gateway, monkeypatch, requests_per_minute=100)
    body = json.dumps({"model": "base", "prompt": "abc", "max_tokens": 2})
    headers = {"Authorization": f"Bearer {gateway.key}", "Content-Type": "application/json"}

    async def ask(session: aiohttp.ClientSession) -> int:
        async with session.post(f"{gateway.url}/v1/completions", data=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status in (200, 429), text
            return answer.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=200)) as session:
        statuses = await asyncio.gather(*(ask(session) for _ in range(1000)))
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == 100
    rows = await usage_rows(gateway, 100)
    assert sum(row.prompt_tokens + row.completion_tokens for row in rows) == 100 * 5


USUAL: list[dict[str, Any]] = [
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": False},
    {"stream": True, "stream_options": {"include_usage": True}, "n": 3},
    {"stream": False, "n": 2, "stop": ["q"]},
    {"stream": True, "stream_options": {"include_usage": True}, "stop": ["qh"]},
    {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 1, "stop": ["lo z"]},
    {"stream": False, "prompt": ["abc", "qq zz"], "n": 2},
]


@pytest.mark.parametrize("fields", USUAL)
async def test_a_row_says_what_usage_said(gateway: Gateway, fields: dict[str, Any]) -> None:
    body = {"model": "pirate", "prompt": "hello zz q", "max_tokens": 20, **fields}
    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as answer:
        text, request_id = await answer.text(), answer.headers["x-request-id"]
    chunks = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    usage = json.loads(chunks[-1] if fields["stream"] else text)["usage"]
    (row,) = await usage_rows(gateway, 1)
    assert (row.prompt_tokens, row.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (row.request_id, row.adapter, row.version, row.status) == (request_id, "pirate", 1, "completed")
    made = sum(submit.max_tokens for submit in gateway.engine.submits)
    if "stop" in fields:
        assert row.completion_tokens < made
        assert row.completion_tokens + row.undelivered_tokens <= made
    else:
        assert (row.completion_tokens, row.undelivered_tokens) == (made, 0)
    assert row.ttft_ms > 0
    assert row.duration_ms >= row.ttft_ms


async def test_tokens_after_a_stop_string_are_recorded_and_not_billed(gateway: Gateway) -> None:
    body = {"model": "base", "prompt": "abcdef", "max_tokens": 600, "stop": ["b"]}
    _, answer = await gateway.post("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 2
    (row,) = await usage_rows(gateway, 1)
    assert row.completion_tokens == 2
    assert row.undelivered_tokens == gateway.engine._tokens - 2 > 0


async def test_a_failure_before_the_first_token_costs_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, Options(vocab_size=VOCAB_SIZE, missing=frozenset({"a" * 64}))) as gateway:
        status, _ = await gateway.post("/v1/completions", {"model": "pirate", "prompt": "abc", "max_tokens": 5})
        assert status == 503
        (row,) = await usage_rows(gateway, 1)
        assert (row.status, row.error_code) == ("failed", "adapter_unavailable")
        assert (row.prompt_tokens, row.completion_tokens) == (0, 0)


async def test_however_requests_end_nothing_is_held_and_rows_say_what_arrived(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gateway, monkeypatch, concurrent_streams=64, tokens_per_minute=10**9, tokens_per_day=10**9)
    chance = random.Random(5)
    arrived: dict[str, int] = {}

    async def one(number: int) -> None:
        response = await open_stream(gateway, max_tokens=5000 if number % 3 else 7)
        assert response.status == 200
        request_id, texts = response.headers["x-request-id"], ""
        for _ in range(chance.randrange(1, 6)):
            event = await next_event(response)
            if event == "[DONE]":
                break
            texts += json.loads(event)["choices"][0]["text"]
        arrived[request_id] = len(texts)  # "abc" again and again: a token is a character
        response.close()

    for start in range(0, 300, 30):
        await asyncio.gather(*(one(number) for number in range(start, start + 30)))
        await eventually(lambda: held(gateway) <= 0)
    rows = await usage_rows(gateway, 300)
    assert {row.request_id for row in rows} == set(arrived)
    for row in rows:
        assert row.completion_tokens >= arrived[row.request_id]
        assert row.prompt_tokens == 3
    assert sum(row.completion_tokens + row.undelivered_tokens for row in rows) == gateway.engine._tokens
    store: Any = gateway.services.accounting.quotas._store
    (ledger,) = store._ledgers.values()
    assert ledger.day.reserved == 0
    assert ledger.day.used == sum(row.prompt_tokens + row.completion_tokens for row in rows)


async def test_budgets_survive_a_restart_and_roll_ups_count_a_row_once(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "base", "prompt": "abc", "max_tokens": 7}
    limit(gateway, monkeypatch, tokens_per_day=25)
    assert [(await gateway.post("/v1/completions", body))[0] for _ in range(3)] == [200, 200, 429]
    row, second = await usage_rows(gateway, 2)
    db, quota = gateway.services.db, Quota(tokens_per_day=25)
    await roll_up(db)
    assert await roll_up(db) == 0
    assert await tokens_used(db, row.tenant_id, 0, 2**32) == 20
    settings = msgspec.structs.replace(gateway.services.settings, usage_dir=str(tmp_path / "again"))
    async with accounting(settings, Metrics()) as restarted:
        with pytest.raises(InsufficientQuotaError, match="5 are left"):
            await restarted.quotas.reserve(row.tenant_id, quota, 6)
        (await restarted.quotas.reserve(row.tenant_id, quota, 5)).undo()
    now = datetime.now(UTC)
    sums = await usage_between(db, "day", now - timedelta(days=2), now, row.tenant_id)
    usage = sums[row.tenant_id, ""]
    assert (usage.requests, usage.prompt_tokens, usage.completion_tokens) == (2, 6, 14)
    (p50,) = quantiles(usage.ttft, [0.5])
    assert p50 is not None
    assert p50 == pytest.approx(min(row.ttft_ms, second.ttft_ms), rel=0.06)


async def test_a_client_that_leaves_before_it_is_admitted_leaves_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gateway, monkeypatch, concurrent_streams=1)
    gateway.engine.pause()
    task = asyncio.create_task(open_stream(gateway, max_tokens=10))
    await eventually(lambda: held(gateway) == 1)
    task.cancel()
    await eventually(lambda: held(gateway) == 0)
    gateway.engine.resume()
    (row,) = await usage_rows(gateway, 1)
    assert (row.status, row.completion_tokens, row.ttft_ms) == ("disconnected", 0, None)


async def test_a_request_that_never_reached_an_engine_costs_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client left while the adapter came out of the cold tier, say: quota and row must say the same."""
    limit(gateway, monkeypatch, tokens_per_day=100)
    services = gateway.services
    caller = await services.keys.authenticate(gateway.key)
    route = await services.router.resolve(caller.tenant_id, "base")
    charge = await services.accounting.admit(caller, route, "req_1", 3, 10, time.perf_counter())
    charge.note(asyncio.CancelledError())
    charge.close([])
    (row,) = await usage_rows(gateway, 1)
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("disconnected", 0, 0)
    assert (await services.accounting.quotas.levels(caller.tenant_id, caller.limits.quota)).tokens_per_day == 0


async def test_the_quota_is_that_of_the_tenant_s_plan(gateway: Gateway) -> None:
    db = gateway.services.db
    await create_tenant(db, "small", TenantLimits(quota=Quota(tokens_per_minute=4)))
    token = (await issue_key(db, "small")).token
    status, answer = await gateway.post(
        "/v1/completions",
        {"model": "base", "prompt": "abc", "max_tokens": 2},
        headers={"Authorization": f"Bearer {token}"},
    )
    assert (status, answer["error"]["dimension"]) == (429, "tokens_per_minute")
