"""Liveness, readiness and metrics: for the supervisor, load balancers and Prometheus, without a key."""

from __future__ import annotations

import asyncio

from aiohttp import web

from stencilpress.engine.client import EngineError
from stencilpress.engine.messages import Stats
from stencilpress.gateway.errors import EngineLostError, UnavailableError
from stencilpress.gateway.metrics import CONTENT_TYPE
from stencilpress.gateway.services import SERVICES, Services

STATS_LIMIT_S = 1.0


async def healthz(_request: web.Request) -> web.Response:
    """The event loop turns."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Requests can be answered: the engine is connected, the catalog answers, and no shutdown has begun."""
    services = request.app[SERVICES]
    if services.drain.draining:
        raise UnavailableError("The server is shutting down; try again shortly.")
    if not services.engine.ready:
        raise EngineLostError("The engine is not available; try again shortly.")
    await services.db.ping()
    return web.json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    body = services.metrics.render(await _engine_stats(services))
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def _engine_stats(services: Services) -> Stats | None:
    try:
        async with asyncio.timeout(STATS_LIMIT_S):
            return await services.engine.stats()
    except (EngineError, TimeoutError):
        return None
