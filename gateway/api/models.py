"""``GET /v1/models`` and ``GET /v1/models/{id}``: what the caller may put into ``model``."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from stencilpress.gateway.catalog.adapter_lists import Served, list_served
from stencilpress.gateway.keys import Principal, check_model
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.services import SERVICES, Services

SHARED = "shared"
"""Stands for the owner of an adapter that an operator has shared with the caller."""


async def list_models(request: web.Request) -> web.Response:
    """The base under each of its names, and the adapters that the caller may use by the name that serves ``prod``."""
    services = request.app[SERVICES]
    caller = await authenticate(request)
    bases = [_base_card(services, name) for name in services.base_names if caller.scopes.allows_model("")]
    served = await list_served(services.db, caller.tenant_id, services.router.base.id)
    cards = [_adapter_card(services, caller, one) for one in served if caller.scopes.allows_model(one.name)]
    return _json({"object": "list", "data": [*bases, *cards]})


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


def _base_card(services: Services, name: str) -> dict[str, Any]:
    return _card(name, services.started_at, "stencilpress", root=services.router.base.id, parent=None)


def _adapter_card(services: Services, caller: Principal, one: Served) -> dict[str, Any]:
    owner = SHARED if one.shared else caller.tenant
    root, created = f"{one.name}@{one.version}", int(one.created_at.timestamp())
    return _card(one.name, created, owner, root=root, parent=services.router.base.id)


def _card(name: str, created: int, owner: str, *, root: str, parent: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "root": root, "parent": parent}


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
