"""Prometheus and Grafana as docker-compose starts them: their files are whole and ask for metrics that are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from stencilpress.engine.messages import Stats
from stencilpress.gateway.exposition import Disk, render
from stencilpress.gateway.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "stencilpress.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SUBJECTS = {
    "Requests", "Tokens per second by tenant", "First token p50 by tenant", "First token p95 by tenant",
    "First token p99 by tenant", "Between tokens p50 by tenant", "Between tokens p95 by tenant",
    "Between tokens p99 by tenant", "Cold starts", "Hit rate", "Distinct adapters per batch", "Queue time",
    "Refusals by dimension", "Batch occupancy", "Pool pages by kind", "Engine up",
}  # fmt: skip
"""What the console's dashboards show."""


def exposed() -> dict[str, set[str]]:
    """The labels of each series that a gateway exposes once it has served a request."""
    metrics = Metrics(1, 20)
    metrics.requests.labels("/v1/completions", "2xx").inc()
    metrics.tenants.add("acme", 1, 2, ttft_ms=3.0, gaps={1: 1}, gaps_ms=1.0)
    stats = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return series_of(render([metrics.snapshot()], 1, [stats], 16, disk=Disk(1, 2)).decode())


def series_of(text: str) -> dict[str, set[str]]:
    """The labels of each series of an exposition."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$tenant", ".*")
    rules = yaml.safe_load((DEPLOY / "prometheus" / "stencilpress.rules.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


def selectors(node: Any) -> Iterator[Any]:
    """The series that an expression reads."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr):
        yield from selectors(node.expr)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from (*selectors(node.lhs), *selectors(node.rhs))
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument)


def names_read() -> set[str]:
    """All series that the dashboard and the rules read."""
    return {one.name for _, text in expressions() for one in selectors(promql_parser.parse(text))}


def test_every_expression_reads_series_that_a_gateway_has() -> None:
    series = exposed()
    count = 0
    for title, text in expressions():
        found = list(selectors(promql_parser.parse(text)))
        assert found, title
        for one in found:
            assert one.name in series, (title, one.name)
            assert {matcher.name for matcher in one.matchers.matchers} <= series[one.name], title
            count += 1
        for label in re.findall(r"by \(([^)]*)\)", text):
            for name in re.split(r",\s*", label):
                assert any(name in series[one.name] for one in found), (title, name)
    assert count > 60


def test_the_dashboard_has_the_panels_of_the_console() -> None:
    assert {panel["title"] for panel in PANELS} >= SUBJECTS


def test_the_dashboard_is_whole() -> None:
    """What Grafana would otherwise mend or leave out in silence: ids, places, data sources."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken, panel["title"]
        taken |= cells
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    used = {panel["datasource"]["uid"] for panel in PANELS}
    used |= {variable["datasource"]["uid"] for variable in DASHBOARD["templating"]["list"]}
    assert used == {source["uid"]}


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded["services"]  # type: ignore[no-any-return]


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Files of the repository by where a container sees them."""
    pairs = [volume.split(":")[:2] for volume in service["volumes"] if volume.startswith("./")]
    return {inside: ROOT / outside for outside, inside in pairs}


def test_prometheus_finds_its_files_and_the_gateway(composed: dict[str, Any]) -> None:
    files = mounts(composed["prometheus"])
    config = next(part.partition("=")[2] for part in composed["prometheus"]["command"] if "config.file" in part)
    loaded = yaml.safe_load(files[config].read_text())
    assert all(str(Path(config).parent / path) in files for path in loaded["rule_files"])
    ((target,),) = [one["targets"] for job in loaded["scrape_configs"] for one in job["static_configs"]]
    host, _, port = target.partition(":")
    assert composed[host]["environment"]["STENCILPRESS_PORT"] == port
    assert "metrics_path" not in loaded["scrape_configs"][0]  # /metrics, which is ours


def test_grafana_finds_prometheus_and_the_dashboard(composed: dict[str, Any]) -> None:
    files = mounts(composed["grafana"])
    provisioned = {kind: files[f"/etc/grafana/provisioning/{kind}"] for kind in ("datasources", "dashboards")}
    (source,) = yaml.safe_load((provisioned["datasources"] / "prometheus.yml").read_text())["datasources"]
    host = source["url"].removeprefix("http://").partition(":")[0]
    assert host in composed
    (provider,) = yaml.safe_load((provisioned["dashboards"] / "stencilpress.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    home = composed["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(folder)
    assert (files[folder] / Path(home).name).is_file()


def test_they_start_on_request_and_are_seen_from_this_machine_alone(composed: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        assert composed[name]["profiles"] == ["metrics"]
        assert all(port.startswith("127.0.0.1:") for port in composed[name]["ports"])
