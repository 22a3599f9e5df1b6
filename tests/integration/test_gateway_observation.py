"""What an operator sees of requests: log lines and metrics."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stencilpress.engine.logs import JsonFormatter
from stencilpress.engine.messages import Stats
from stencilpress.gateway import tenant_metrics
from stencilpress.gateway.exposition import render
from stencilpress.gateway.metrics import AdapterActivity
from stencilpress.gateway.observation import access_logger, log_context
from stencilpress.gateway.tenant_metrics import TenantCounts
from stencilpress.gateway.usage.histogram import bucket_of
from tests.fakes.engine import Options
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), missing=frozenset({"b" * 64}))
    async with running_gateway(tmp_path, options, max_loras=4, metrics_tenants=1) as running:
        yield running


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What processes with ``STENCILPRESS_LOG_FORMAT=json`` write."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(log_context))
    root = logging.getLogger()
    before = access_logger.level
    root.addHandler(handler)
    access_logger.setLevel(logging.INFO)
    yield stream
    access_logger.setLevel(before)
    root.removeHandler(handler)


def parsed(lines: io.StringIO, logger: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in found if line["logger"] == logger]


async def scrape(gateway: Gateway) -> dict[str, list[tuple[dict[str, str], float]]]:
    async with gateway.http.get(f"{gateway.url}/metrics") as answer:
        text = await answer.text()
    series: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return series


async def test_a_request_is_one_line_with_what_it_cost(gateway: Gateway, lines: io.StringIO) -> None:
    body = {"model": "pirate", "prompt": "secret words", "max_tokens": 5, "stream": True}
    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as response:
        await response.read()
    [line] = parsed(lines, "stencilpress.access")
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", "2xx")
    assert (line["tenant"], line["model"], line["completion_tokens"]) == ("demo", "pirate@1", 5)
    assert line["prompt_tokens"] == len(gateway.engine.submits[0].prompt) // 4
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    assert line["key"] == gateway.key.split("_")[1]
    assert "secret" not in lines.getvalue()
    assert gateway.key not in lines.getvalue()


async def test_what_a_stop_string_cuts_off_is_not_the_tenants(gateway: Gateway, lines: io.StringIO) -> None:
    asked = {"model": "base", "prompt": "abXY", "stop": ["X"], "max_tokens": 50, "ignore_eos": True}
    _, answer = await gateway.post("/v1/completions", asked)
    [line] = parsed(lines, "stencilpress.access")
    [(_, counted)] = (await scrape(gateway))["stencilpress_tenant_completion_tokens_total"]
    assert line["completion_tokens"] == counted == answer["usage"]["completion_tokens"] < 50


async def test_a_failure_is_logged_under_the_requests_id(
    gateway: Gateway, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("the reason")

    monkeypatch.setattr(gateway.services.router, "resolve", fail)
    assert (await gateway.post("/v1/completions", {"model": "base", "prompt": "a"}))[0] == 500
    [error] = parsed(lines, "stencilpress.gateway.middleware")
    [access] = parsed(lines, "stencilpress.access")
    assert error["request_id"] == access["request_id"]
    assert error["tenant"] == "demo"
    assert error["error"].endswith("RuntimeError: the reason")


async def test_each_response_on_a_websocket_is_a_line(gateway: Gateway, lines: io.StringIO) -> None:
    async with gateway.http.ws_connect(
        f"{gateway.url}/v1/chat/ws", headers={"Authorization": f"Bearer {gateway.key}"}
    ) as socket:
        for model in ("pirate", "nobody"):
            asked = {"model": model, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
            await socket.send_json({"type": "response.create", "response": asked})
        seen = 0
        while seen < 2:
            seen += (await socket.receive_json())["type"] in ("response.done", "error")
    found = {line["status"]: line for line in parsed(lines, "stencilpress.access") if line["method"] == "WS"}
    assert found.keys() == {"incomplete", "failed"}
    assert (found["incomplete"]["model"], found["incomplete"]["completion_tokens"]) == ("pirate@1", 3)
    assert "model" not in found["failed"]


async def test_routers_see_which_adapters_run_and_which_wait(gateway: Gateway) -> None:
    gateway.engine.pause()
    waits = asyncio.create_task(gateway.post("/v1/completions", {"model": "pirate", "prompt": "a", "max_tokens": 10}))
    while not gateway.engine.submits:  # noqa: ASYNC110 - the event is in another thread
        await asyncio.sleep(0.005)
    [(labels, _)] = (await scrape(gateway))["vllm:lora_requests_info"]
    assert labels == {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": "pirate"}
    gateway.engine.resume()
    await waits
    [(labels, _)] = (await scrape(gateway))["vllm:lora_requests_info"]
    assert labels == {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}


async def test_only_the_tenant_with_the_most_tokens_is_shown(gateway: Gateway) -> None:
    other = {"Authorization": f"Bearer {gateway.other_key}"}
    await gateway.post("/v1/completions", {"model": "base", "prompt": "a", "max_tokens": 3}, headers=other)
    await gateway.post("/v1/completions", {"model": "base", "prompt": "a", "max_tokens": 7})
    series = await scrape(gateway)
    shown = [({"gateway": "1", "tenant": "demo"}, 7.0)]
    assert series["stencilpress_tenant_completion_tokens_total"] == shown
    assert series["stencilpress_completion_tokens_total"] == [({"gateway": "1"}, 10.0)]
    await gateway.post("/v1/completions", {"model": "base", "prompt": "a", "max_tokens": 20}, headers=other)
    [(labels, value)] = (await scrape(gateway))["stencilpress_tenant_completion_tokens_total"]
    assert (labels["tenant"], value) == ("other", 23.0)  # counted from its first request, not from being shown


def test_tenants_beyond_the_bound_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_metrics, "MAX_TENANTS", 2)
    counts = TenantCounts(shown=10)
    for tenant in ("a", "b", "a", "c"):
        counts.add(tenant, 1, 1)
    requests = next(counts.families())
    assert {labels["tenant"]: value for _, labels, value in requests.samples} == {"a": 2, "c": 1}


async def test_latencies_are_shown_by_tenant_and_as_prometheus_has_them(gateway: Gateway) -> None:
    await gateway.post("/v1/completions", {"model": "base", "prompt": "a", "max_tokens": 5})
    series = await scrape(gateway)
    for name in ("time_to_first_token", "inter_token"):  # of one tenant alone: the same as of all
        of_tenant, of_all = f"stencilpress_tenant_{name}_seconds", f"stencilpress_{name}_seconds"
        for part in ("bucket", "count", "sum"):
            values = [value for _, value in series[f"{of_tenant}_{part}"]]
            assert values == pytest.approx([value for _, value in series[f"{of_all}_{part}"]])
            assert all(labels["tenant"] == "demo" for labels, _ in series[f"{of_tenant}_{part}"])
    assert series["stencilpress_tenant_time_to_first_token_seconds_count"][0][1] == 1.0
    assert series["stencilpress_queue_seconds_count"] == [({"gateway": "1"}, 1.0)]
    assert series["stencilpress_cold_start_seconds_count"] == [({"gateway": "1"}, 0.0)]


def test_gaps_are_counted_by_the_middle_of_their_bucket() -> None:
    counts = TenantCounts(shown=10)
    counts.add("a", 1, 1, gaps={bucket_of(4.0): 3, bucket_of(80.0): 1, bucket_of(9000.0): 1}, gaps_ms=9092.0)
    samples = {
        labels.get("le", name): value
        for family in counts.families()
        if family.name == "stencilpress_tenant_inter_token_seconds"
        for name, labels, value in family.samples
    }
    assert [samples[le] for le in ("0.0025", "0.005", "0.05", "0.1", "2.5", "+Inf")] == [0, 3, 3, 4, 4, 5]
    assert samples["stencilpress_tenant_inter_token_seconds_sum"] == pytest.approx(9.092)


def test_steps_are_histograms_of_exact_counts() -> None:
    stats = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, adapters_per_step={0: 5, 3: 2, 600: 1})
    text = render([], 1, [stats, None], 16).decode()
    name = "stencilpress_engine_adapters_per_step"
    for le, count in (("0", 5.0), ("2", 5.0), ("4", 7.0), ("512", 7.0), ("+Inf", 8.0)):
        assert f'{name}_bucket{{engine="1",le="{le}"}} {count}\n' in text
    assert f'{name}_sum{{engine="1"}} 606.0\n' in text
    assert f'{name}_count{{engine="1"}} 8.0\n' in text
    assert 'engine="2",le=' not in text


def test_an_adapter_runs_from_its_first_token_and_leaves_nothing() -> None:
    activity = AdapterActivity()
    with activity.request("a") as one, activity.request("a"), activity.request(""):
        one.begin()
        assert (activity.running, activity.waiting) == ({"a": 1}, {"a": 1})
    assert (activity.running, activity.waiting) == ({}, {})
