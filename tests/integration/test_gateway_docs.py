"""docs/api.md and the gateway say the same: routes, fields, error codes, events, metrics."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from stencilpress.engine.messages import AdapterSeen
from stencilpress.gateway import errors
from stencilpress.gateway.access import ADMIN_PREFIX, PERMISSIONS
from stencilpress.gateway.api import schemas, ws
from stencilpress.gateway.api.admin.router import OPERATIONS
from tests.integration.gateway_harness import running_gateway

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text()
ROUTE = re.compile(r"^\| `([A-Z]+) (/\S*)` \|", re.MULTILINE)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


async def test_routes_and_metrics_are_those_that_are_documented(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.adapters = [AdapterSeen("a" * 64, 1, "hbm", 3, 5, False, 0, 1, 2, 1, 0, 1, 0.5, 1, 0.25)]
        routes = {
            (route.method, re.sub(r":[^}]*", "", route.resource.canonical))
            for route in gateway.routes
            if route.method != "HEAD" and route.resource is not None
        }
        assert routes == set(ROUTE.findall(TEXT)) - {("GET", "/admin/api/v1/…")}
        async with gateway.http.get(f"{gateway.url}/metrics") as answer:
            exposed = set(re.findall(r"^# TYPE (\S+)", await answer.text(), re.MULTILINE))
    named = set(re.findall(r"`((?:stencilpress_|vllm:)\w+)`", section("Metrics")))
    assert {name for name in exposed if not name.endswith("_created")} == named


@pytest.mark.parametrize("kind", [schemas.ChatRequest, schemas.CompletionRequest])
def test_every_field_is_documented(kind: type[msgspec.Struct]) -> None:
    for field in kind.__struct_fields__:
        assert f"`{field}`" in section("Request fields"), field


@pytest.mark.parametrize("refused", [schemas.REFUSED_IN_CHAT, schemas.REFUSED_IN_COMPLETIONS])
def test_every_refused_field_is_documented(refused: dict[str, object]) -> None:
    for field in refused:
        assert f"`{field}`" in section("Request fields"), field


def test_the_roles_of_each_operation_are_those_that_are_documented() -> None:
    rows = dict(re.findall(r"^\| `([A-Z]+ /admin/\S+)` \| ([a-z, ]*) \|", section("Admin API"), re.MULTILINE))
    for one in OPERATIONS:
        roles = [role.value for role, allowed in PERMISSIONS.items() if one.needs in allowed]
        assert rows[f"{one.method} {ADMIN_PREFIX}{one.path}"] == ", ".join(roles), one.id


def test_every_error_code_is_documented() -> None:
    text = inspect.getsource(errors) + "".join(file.read_text() for file in (ROOT / "gateway" / "api").glob("*.py"))
    used = set(re.findall(r"\bcode(?:: str \| None)? ?= ?\"(\w+)\"", text))
    elsewhere = {"invalid_adapter"}  # of the catalog's commands
    documented = set(re.findall(r"`(\w+)`", section("Errors")))
    assert used - elsewhere <= documented


def test_every_event_is_documented() -> None:
    events = set(re.findall(r"\"((?:session|response)\.[a-z_.]+)\"", inspect.getsource(ws)))
    assert len(events) >= 8
    for event in events:
        assert f"`{event}`" in section("Chat over a WebSocket"), event


def test_limits_in_the_text_are_those_in_the_code() -> None:
    fields = section("Request fields")
    for limit in (schemas.MAX_CHOICES, schemas.MAX_ANSWERS, schemas.MAX_MESSAGES, schemas.MAX_STOPS):
        assert str(limit) in fields
    for limit in (schemas.MAX_STOP_CHARS, schemas.MAX_STOP_IDS, schemas.MAX_BIASES, schemas.MAX_ELEMENTS):
        assert str(limit) in fields
    assert f"Up to {ws.MAX_RESPONSES} responses" in section("Chat over a WebSocket")
