"""Role by route by foreign id: what is another tenant's does not exist, on every route there is."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio

from stencilpress.gateway.access import ADMIN_PREFIX, PERMISSIONS, SCOPE_ROUTES, Permission, Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.alerts.incidents import Incident, Moves, State, Subject
from stencilpress.gateway.alerts.rules import Kind, Severity
from stencilpress.gateway.api.admin.dispatch import NOT_FOUND
from stencilpress.gateway.api.admin.operation import Operation
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.gateway.catalog.alert_outbox import record
from stencilpress.gateway.catalog.alerts import list_alerts
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.errors import NotFoundError
from stencilpress.gateway.keys import issue_key
from tests.integration.admin_client import admin_client
from tests.integration.gateway_harness import Gateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAME_BODY = NotFoundError(NOT_FOUND).body().decode()
TENANTS_OWN = [role for role in Role if role is not Role.OPERATOR]
OF_TENANTS = [one for one in OPERATIONS if "{tenant}" in one.path]
FREE = {"add_version", "set_tenant_alert_rule", "reset_tenant_alert_rule"}
DEEPER = [one for one in OF_TENANTS if one.path.count("{") > 1 and one.id not in FREE]
"""Not what creates an adapter: under a tenant of one's own every name is free. Kinds of rules are nobody's."""
MODEL_REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "/v1/chat/completions": ("POST", {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": ("POST", {"prompt": "hi"}),
    "/v1/models/{model}": ("GET", None),
}
"""Routes that name a model, with the rest of their body."""
NAME_NOTHING = {"/v1/models", "/v1/chat/ws"}
"""The first lists the tenant's own; the second's bodies are those of chat completions."""
OPERATORS_OWN = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""For operators alone, on their own tenant."""
UPLOADS: dict[str, str] = {}
"""Of tenant ``demo``, one by gateway: a tenant may have only so many."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


async def foreign_ids(gateway: Gateway) -> dict[str, str]:
    """What exists of tenant ``demo``, by the placeholders of paths."""
    db, desk = gateway.services.db, gateway.services.desk
    assert desk is not None
    key = (await issue_key(db, "demo", role=Role.VIEWER)).key.public_id
    if gateway.url not in UPLOADS:
        UPLOADS[gateway.url] = (await desk.uploads.create((await get_tenant(db, "demo")).id, "pirate", 1000)).id
    ids = {"key": key, "adapter": "pirate", "version": "1", "alias": "prod", "guest": "other", "engine": "1"}
    ids |= {"alert": await open_alert(gateway), "kind": "errors_high"}
    return {**ids, "upload": UPLOADS[gateway.url], "file": CONFIG_NAME}


async def open_alert(gateway: Gateway) -> str:
    """The number of a firing alert of tenant ``demo``."""
    db = gateway.services.db
    tenant_id = (await get_tenant(db, "demo")).id
    subject = Subject(Kind.ERRORS_HIGH, tenant_id, "pirate")
    now = datetime.now(UTC)
    firing = Incident(subject, State.FIRING, now, 0.5, 0.05, Severity.CRITICAL, fired_at=now)
    await record(db, Moves({subject: firing}, fired=(firing,)), operator=False)
    return str((await list_alerts(db, tenant_id=tenant_id))[0].id)


def path_of(operation: Operation, ids: dict[str, str], tenant: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: tenant if found[1] == "tenant" else ids[found[1]], operation.path)


def body_of(operation: Operation) -> Any:
    return {} if operation.body is not None or operation.accepts else None


@pytest.mark.parametrize("role", TENANTS_OWN)
@pytest.mark.parametrize("operation", OF_TENANTS, ids=lambda one: one.id)
async def test_a_foreign_tenant_does_not_exist(gateway: Gateway, operation: Operation, role: Role) -> None:
    client = await admin_client(gateway, "other", role)
    ids = await foreign_ids(gateway)
    for tenant in ("demo", "nobody", "Demo%20", "..%2Fdemo"):
        answer = await client.raw(operation.method, path_of(operation, ids, tenant), body_of(operation))
        assert answer == (404, SAME_BODY), tenant


@pytest.mark.parametrize("role", TENANTS_OWN)
@pytest.mark.parametrize("operation", DEEPER, ids=lambda one: one.id)
async def test_a_foreign_thing_under_ones_own_tenant_does_not_exist(
    gateway: Gateway, operation: Operation, role: Role
) -> None:
    client = await admin_client(gateway, "other", role)
    ids = await foreign_ids(gateway)
    unknown = {name: value[::-1] for name, value in ids.items()}
    foreign, absent = [
        await client.raw(operation.method, path_of(operation, some, "other"), body_of(operation))
        for some in (ids, unknown)
    ]
    assert foreign == absent
    may = operation.needs in PERMISSIONS[role]
    assert foreign[0] in ((404, 400) if may else (403,))
    assert foreign[0] != 404 or foreign[1] == SAME_BODY


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.id)
async def test_a_role_that_may_not_is_refused(gateway: Gateway, operation: Operation, role: Role) -> None:
    if operation.needs in PERMISSIONS[role]:
        return
    client = await admin_client(gateway, "demo", role)
    status, text = await client.raw(operation.method, path_of(operation, await foreign_ids(gateway), "demo"), {})
    assert (status, json.loads(text)["error"]["code"]) == (403, "permission_denied")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.id)
async def test_nothing_is_answered_without_a_key(gateway: Gateway, operation: Operation) -> None:
    url = gateway.url + ADMIN_PREFIX + path_of(operation, await foreign_ids(gateway), "demo")
    for header in ("", "Bearer ' OR '1'='1", "Basic eDp5"):
        async with gateway.http.request(operation.method, url, headers={"Authorization": header}) as answer:
            assert answer.status == 401


async def test_every_route_is_covered_here(shared: Gateway) -> None:
    inference = {
        re.sub(r":[^}]*", "", route.resource.canonical)
        for route in shared.routes
        if route.resource is not None and route.resource.canonical.startswith("/v1/")
    }
    assert inference == set(MODEL_REQUESTS) | NAME_NOTHING | OPERATORS_OWN
    known = {ADMIN_PREFIX + one.path for one in OPERATIONS} | {f"{ADMIN_PREFIX}/openapi.json"}
    administration = {
        route.resource.canonical
        for route in shared.routes
        if route.resource is not None and route.resource.canonical.startswith("/admin")
    }
    assert administration == known
    for route in inference:
        assert any(route == scope or route.startswith(f"{scope}/") for scope in SCOPE_ROUTES), route


@pytest.mark.parametrize("route", MODEL_REQUESTS)
@pytest.mark.parametrize("role", list(Role))
async def test_a_foreign_model_does_not_exist(gateway: Gateway, route: str, role: Role) -> None:
    """Not even for an operator: its inference is its own tenant's."""
    token = (await issue_key(gateway.services.db, "other", role=role)).token
    method, rest = MODEL_REQUESTS[route]

    async def ask(model: str) -> tuple[int, str]:
        body = None if rest is None else json.dumps({**rest, "model": model}).encode()
        async with gateway.http.request(
            method,
            gateway.url + route.replace("{model}", model),
            data=body,
            headers={"Authorization": f"Bearer {token}"},
        ) as answer:
            return answer.status, await answer.text()

    may = Permission.CALL in PERMISSIONS[role]
    for foreign, absent in (("pirate", "nobody"), ("pirate@2", "nobody@2"), ("base:pirate", "base:nobody")):
        one, other = await ask(foreign), await ask(absent)
        assert one[0] == other[0] == (404 if may else 403)
        assert one[1].replace("pirate", "nobody") == other[1]
