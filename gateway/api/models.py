"""``GET /v1/models`` and ``GET /v1/models/{id}``: what the caller may put into ``model``."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from stencilpress.gateway.catalog.adapters import list_adapters, list_shared
from stencilpress.gateway.catalog.records import Adapter
from stencilpress.gateway.keys import Principal, check_model
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.names import DEFAULT_ALIAS
from stencilpress.gateway.services import SERVICES, Services

SHARED = "shared"
"""Stands for the owner of an adapter that an operator has shared with the caller."""


async def list_models(request: web.Request) -> web.Response:
    """The base under each of its names, and the adapters that the caller may use by the name that serves ``prod``."""
    services = request.app[SERVICES]
    caller = await authenticate(request)
    bases = [_base_card(services, name) for name in services.base_names if caller.scopes.allows_model("")]
    adapters = await list_adapters(services.db, caller.tenant_id)
    shared = await list_shared(services.db, caller.tenant_id)
    owned = [*((adapter, caller.tenant) for adapter in adapters), *((adapter, SHARED) for adapter in shared)]
    served = [_adapter_card(services, one, owner) for one, owner in owned if _is_listed(services, caller, one)]
    return _json({"object": "list", "data": [*bases, *served]})


async def retrieve_model(request: web.Request) -> web.Response:
    """Any name that ``model`` may have, resolved: ``root`` is what it stands for now."""
    services = request.app[SERVICES]
    caller = await authenticate(request)
    name = request.match_info["model"]
    route = await services.router.resolve(caller.tenant_id, name, caller.key_id)
    check_model(caller, name, route.adapter)
    if not route.adapter:
        return _json(_base_card(services, name))
    card = _card(name, services.started_at, caller.tenant, root=route.echo, parent=services.router.base.id)
    return _json(card)


def _is_listed(services: Services, caller: Principal, adapter: Adapter) -> bool:
    """Whether its bare name would be answered."""
    if not caller.scopes.allows_model(adapter.name):
        return False
    number = adapter.aliases.get(DEFAULT_ALIAS)
    base = services.router.base.id
    return any(version.number == number and version.base_id == base for version in adapter.versions)


def _base_card(services: Services, name: str) -> dict[str, Any]:
    return _card(name, services.started_at, "stencilpress", root=services.router.base.id, parent=None)


def _adapter_card(services: Services, adapter: Adapter, tenant: str) -> dict[str, Any]:
    root = f"{adapter.name}@{adapter.aliases[DEFAULT_ALIAS]}"
    created = int(adapter.created_at.timestamp())
    return _card(adapter.name, created, tenant, root=root, parent=services.router.base.id)


def _card(name: str, created: int, owner: str, *, root: str, parent: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "root": root, "parent": parent}


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
