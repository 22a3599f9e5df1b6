"""Prometheus itself over our files, and over a running gateway. Skipped where it is not installed."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from tests.integration.gateway_harness import Gateway, running_gateway
from tests.integration.test_metrics_stack import DEPLOY, expressions

FILES = DEPLOY / "prometheus"
RULES = FILES / "stencilpress.rules.yml"
SCRAPES = 4
"""Before anything is asked: the range functions need two."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus on this machine")


def promtool(*arguments: str | Path, given: str = "") -> str:
    command = ["promtool", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_accepts_config_and_rules() -> None:
    assert "1 rule files found" in promtool("check", "config", FILES / "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


FIRED = {
    "StencilpressEngineDown": (
        {'stencilpress_engine_up{engine="1"}': "1x100", 'stencilpress_engine_up{engine="2"}': "1 0x99"},
        {"engine": "2", "severity": "critical"},
        "Engine is down: engine 2",
    ),
    "StencilpressGatewayDown": (
        {'stencilpress_gateway_up{gateway="1"}': "1x100", 'stencilpress_gateway_up{gateway="2"}': "0x100"},
        {"gateway": "2", "severity": "warning"},
        "Gateway is down: 2",
    ),
    "StencilpressHitRateLow": (
        {"stencilpress_engine_adapter_hits_total": "0+1x100", "stencilpress_engine_adapter_misses_total": "0+3x100"},
        {"severity": "warning"},
        "Hit rate is low: 25%",
    ),
    "StencilpressErrorsHigh": (
        {
            'stencilpress_requests_total{route="/v1/completions", status="2xx"}': "0+9x100",
            'stencilpress_requests_total{route="/v1/completions", status="5xx"}': "0+1x100",
            'stencilpress_requests_total{route="/readyz", status="5xx"}': "0+50x100",
        },
        {"severity": "critical"},
        "Too many requests fail: 10%",
    ),
    "StencilpressFirstTokenSlow": (
        {
            'stencilpress_time_to_first_token_seconds_bucket{le="7.5"}': "0x100",
            'stencilpress_time_to_first_token_seconds_bucket{le="10"}': "0+9x100",
            'stencilpress_time_to_first_token_seconds_bucket{le="+Inf"}': "0+9x100",
            "stencilpress_time_to_first_token_seconds_count": "0+9x100",
        },
        {"severity": "warning"},
        "First tokens are over their objective: 9.975s",
    ),
    "StencilpressDiskBytesLow": (
        {"stencilpress_disk_free_bytes": "8589934592 1073741824x99"},
        {"severity": "critical"},
        "Disk is almost full: 1GiB free",
    ),
    "StencilpressQuotaSpent": (
        {'stencilpress_quota_refusals_total{dimension="tokens_per_day"}': "0x10 1x90"},
        {"dimension": "tokens_per_day", "severity": "warning"},
        "Quota is spent: 1 requests refused by tokens_per_day",
    ),
}
"""What is scraped every 15 s, and the alert that this must fire within ten minutes: its labels, its summary."""


@needs_promtool
@pytest.mark.parametrize("alert", FIRED)
def test_an_alert_fires_when_it_should(alert: str, tmp_path: Path) -> None:
    series, labels, summary = FIRED[alert]
    (rule,) = [one for one in yaml.safe_load(RULES.read_text())["groups"][0]["rules"] if one["alert"] == alert]
    annotations = {**rule["annotations"], "summary": summary}
    expected = {"exp_labels": labels, "exp_annotations": annotations}
    looks = [
        {"eval_time": at, "alertname": alert, "exp_alerts": found} for at, found in (("0s", []), ("10m", [expected]))
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "15s", "input_series": inputs, "alert_rule_test": looks}
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [case]}))
    promtool("test", "rules", file)


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path / "gateway") as running:
        yield running


@pytest.fixture
def config(gateway: Gateway, tmp_path: Path) -> Path:
    """The compose file's own, for this gateway and in a hurry."""
    loaded = yaml.safe_load((FILES / "prometheus.yml").read_text())
    loaded["global"] = dict.fromkeys(loaded["global"], "200ms")
    (job,) = loaded["scrape_configs"]
    job["static_configs"] = [{"targets": [gateway.url.removeprefix("http://")]}]
    shutil.copy(RULES, tmp_path)
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(loaded))
    return path


@asynccontextmanager
async def running_prometheus(config: Path, http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """Its address, once it has scraped enough for rates."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'tsdb'}"]
    log = (config.parent / "prometheus.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        "prometheus", *arguments, f"--web.listen-address={address}", "--log.level=warn", stdout=log, stderr=log
    )
    try:
        while not await scraped(http, f"http://{address}"):
            assert process.returncode is None, (config.parent / "prometheus.log").read_text()
            await asyncio.sleep(0.1)
        yield f"http://{address}"
    finally:
        log.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def scraped(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        found = await query(http, url, "sum_over_time(up[1m])")
    except aiohttp.ClientConnectionError:
        return False
    return bool(found and float(found[0]["value"][1]) >= SCRAPES)


async def query(http: aiohttp.ClientSession, url: str, text: str) -> list[Any]:
    """An instant vector."""
    async with http.get(f"{url}/api/v1/query", params={"query": text}) as answer:
        if answer.status == 503:  # still starting: with words at first, then as JSON
            return []
        body = await answer.json()
    assert body["status"] == "success", (text, body)
    assert not body.get("warnings"), (text, body)
    found: list[Any] = body["data"]["result"]
    return found


@needs_promtool
async def test_promtool_finds_nothing_to_say_about_our_metrics(gateway: Gateway) -> None:
    await gateway.post("/v1/completions", {"model": "pirate", "prompt": "abc", "max_tokens": 3})
    async with gateway.http.get(f"{gateway.url}/metrics") as answer:
        lines = (await answer.text()).splitlines(keepends=True)
    ours = "".join(line for line in lines if "vllm:" not in line)  # those names are what routers look for
    await asyncio.to_thread(promtool, "check", "metrics", given=ours)


@needs_prometheus
async def test_prometheus_scrapes_a_gateway_and_answers_all_that_the_dashboard_asks(
    gateway: Gateway, config: Path
) -> None:
    status, _ = await gateway.post("/v1/completions", {"model": "pirate", "prompt": "abc", "max_tokens": 3})
    assert status == 200
    async with running_prometheus(config, gateway.http) as url:
        for title, text in expressions():
            found = await query(gateway.http, url, text)
            assert found or title.startswith("Stencilpress"), title  # alerts are none unless they fire
        async with gateway.http.get(f"{url}/api/v1/rules") as answer:
            (group,) = (await answer.json())["data"]["groups"]
        assert {rule["lastError"] for rule in group["rules"] if "lastError" in rule} <= {""}
        assert len(group["rules"]) == len(yaml.safe_load(RULES.read_text())["groups"][0]["rules"])
