"""Two gateways on one port before two engines, all real processes under the real supervisor, with a tiny model."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from bench.server import Server, serving
from tests.integration.test_supervisor import command
from tests.tiny import BASE_ID

pytestmark = pytest.mark.timeout(300)  # two engines compile their kernels first


@pytest.fixture(scope="module")
def settings(base_folder: Path) -> dict[str, str]:
    own = {"model": str(base_folder), "base_id": BASE_ID, "device": "cpu", "threads": "1", "hang_limit_s": "10"}
    return {**own, "gateways": "2", "engines": "2"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster") / "data"


@pytest.fixture(scope="module")
def cluster(data: Path, adapters: Path, settings: dict[str, str]) -> Iterator[Server]:
    with serving(data, **settings) as server:
        for name in ("helper", "poet"):
            add = [sys.executable, "-m", "stencilpress.cli", "adapter", "add", str(adapters / name)]
            options = ["--data", str(data), "--tenant", "demo", "--name", name]
            subprocess.run([*add, *options], check=True, stdout=subprocess.DEVNULL)
        yield server


def children(server: Server, kind: str) -> list[psutil.Process]:
    found = server.supervisor.children(recursive=True)
    return [process for process in found if f"stencilpress.{kind}" in command(process)]


async def complete(server: Server, model: str, max_tokens: int = 4) -> str:
    """One request on a connection of its own, sent again if a gateway did not know yet that its engine is gone."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=3, timeout=30) as api:
        answer = await api.completions.create(
            model=model, prompt="abc", max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text


def scrape(server: Server) -> dict[str, list[tuple[dict[str, str], float]]]:
    """All series by name, as Prometheus' own parser reads them."""
    text = subprocess.run(["curl", "-s", f"{server.url}/metrics"], capture_output=True, text=True, check=True).stdout
    series: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return series


def total(server: Server, name: str, **labels: str) -> float:
    return sum(value for own, value in scrape(server).get(name, []) if labels.items() <= own.items())


async def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.05)


async def test_every_scrape_counts_all_gateways(cluster: Server) -> None:
    before = total(cluster, "stencilpress_requests_total", route="/v1/completions")
    await asyncio.gather(*(complete(cluster, "base") for _ in range(20)))
    for _ in range(5):  # whichever gateway answers
        assert total(cluster, "stencilpress_requests_total", route="/v1/completions") == before + 20
    series = scrape(cluster)
    assert {labels["gateway"]: up for labels, up in series["stencilpress_gateway_up"]} == {"1": 1, "2": 1}
    assert {labels["engine"]: up for labels, up in series["stencilpress_engine_up"]} == {"1": 1, "2": 1}
    [(labels, _)] = series["vllm:lora_requests_info"]
    assert labels["max_lora"] == "32"


async def test_a_gateway_that_does_not_answer_is_shown_and_the_other_serves(cluster: Server) -> None:
    stopped, _ = children(cluster, "gateway")
    stopped.suspend()
    try:
        assert await complete(cluster, "helper")
        assert total(cluster, "stencilpress_gateway_up") == 1
    finally:
        stopped.resume()
    await eventually(lambda: total(cluster, "stencilpress_gateway_up") == 2)


async def test_an_adapter_is_loaded_by_one_engine_alone(cluster: Server) -> None:
    for _ in range(6):
        await asyncio.gather(complete(cluster, "helper"), complete(cluster, "poet"), complete(cluster, "base"))
    assert total(cluster, "stencilpress_engine_adapter_loads_total") == 2


async def test_a_killed_engine_costs_no_readiness_and_its_adapters_move(cluster: Server) -> None:
    expected = {model: await complete(cluster, model, 30) for model in ("helper", "poet", "base")}
    for victim in children(cluster, "engine"):
        await eventually(lambda: total(cluster, "stencilpress_engine_up") == 2)
        victim.kill()
        await eventually(lambda: total(cluster, "stencilpress_engine_up") == 1)
        assert {model: await complete(cluster, model, 30) for model in expected} == expected
    await eventually(lambda: total(cluster, "stencilpress_engine_up") == 2)


async def test_a_hung_engine_is_killed_and_served_around(cluster: Server) -> None:
    victim = children(cluster, "engine")[0]
    victim.suspend()
    await eventually(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    assert await complete(cluster, "helper")
    await eventually(lambda: total(cluster, "stencilpress_engine_up") == 2)
    assert "the engine 1 hangs" in cluster.log.read_text()


async def test_a_hung_gateway_is_killed_and_another_takes_its_place(cluster: Server) -> None:
    victim = children(cluster, "gateway")[0]
    victim.suspend()
    await eventually(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    await eventually(lambda: total(cluster, "stencilpress_gateway_up") == 2)
    assert re.search(r"the gateway \d hangs", cluster.log.read_text())


async def test_streams_finish_while_both_gateways_drain_and_the_exit_is_clean(data: Path, cluster: Server) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.key, max_retries=0) as api:
        streams = [
            await api.completions.create(
                model=model, prompt="abc", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            for model in ("helper", "poet", "base", "base")
        ]
        processes = [cluster.supervisor, *cluster.supervisor.children(recursive=True)]
        cluster.supervisor.send_signal(signal.SIGTERM)
        for stream in streams:
            reasons = [chunk.choices[0].finish_reason async for chunk in stream]
            assert reasons[-1] == "length"
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert (data / "v1" / "run" / "lock").read_text() == ""
    assert cluster.log.read_text().count("the gateway") == 2  # only the one that hung, and was started again
