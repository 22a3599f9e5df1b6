"""All operations of the admin API, and their routes. Only wiring."""

from __future__ import annotations

import msgspec
from aiohttp import web

from stencilpress.gateway.access import ADMIN_PREFIX
from stencilpress.gateway.api.admin import (
    adapters,
    alerts,
    aliases,
    all_adapters,
    audit,
    canary,
    catalog,
    engines,
    keys,
    live,
    series,
    tenants,
    uploads,
    usage,
    version_files,
)
from stencilpress.gateway.api.admin.dispatch import handler_of
from stencilpress.gateway.api.admin.openapi import openapi_document
from stencilpress.gateway.api.admin.operation import JSON

OPERATIONS = (
    *tenants.OPERATIONS,
    *keys.OPERATIONS,
    *adapters.OPERATIONS,
    *all_adapters.OPERATIONS,
    *aliases.OPERATIONS,
    *canary.OPERATIONS,
    *uploads.OPERATIONS,
    *version_files.OPERATIONS,
    *usage.OPERATIONS,
    *series.OPERATIONS,
    *engines.OPERATIONS,
    *live.OPERATIONS,
    *alerts.OPERATIONS,
    *audit.OPERATIONS,
    *catalog.OPERATIONS,
)


def add_admin_routes(router: web.UrlDispatcher) -> None:
    """Every operation, and the document that describes them, which needs no key."""
    document = msgspec.json.encode(openapi_document(OPERATIONS))

    async def openapi(_request: web.Request) -> web.Response:
        return web.Response(body=document, content_type=JSON)

    router.add_get(f"{ADMIN_PREFIX}/openapi.json", openapi)
    for one in OPERATIONS:
        router.add_route(one.method, ADMIN_PREFIX + one.path, handler_of(one))
