"""Liveness, readiness and metrics: for the supervisor, load balancers and Prometheus, without a key."""

from __future__ import annotations

import asyncio

from aiohttp import web

from stencilpress.gateway.adapter_metrics import most_used
from stencilpress.gateway.errors import EngineLostError, UnavailableError
from stencilpress.gateway.exposition import CONTENT_TYPE, Disk, render
from stencilpress.gateway.peers import ask_metrics
from stencilpress.gateway.services import SERVICES


async def healthz(_request: web.Request) -> web.Response:
    """The event loop turns."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Requests can be answered: an engine is connected and answers, the catalog answers, and no shutdown has begun."""
    services = request.app[SERVICES]
    if services.drain.draining:
        raise UnavailableError("The server is shutting down; try again shortly.")
    if not services.engine.ready:
        raise EngineLostError("The engine is not available; try again shortly.")
    if not services.engine.responsive:
        raise EngineLostError("The engine does not answer; try again shortly.")
    await services.db.ping()
    warnings = services.settings.warnings
    return web.json_response({"status": "ready", **({"warnings": warnings} if warnings else {})})


async def metrics(request: web.Request) -> web.Response:
    """The numbers of all gateways and engines, whichever gateway is asked."""
    services = request.app[SERVICES]
    settings = services.settings
    names = settings.peers.split(",")
    others, engines, adapters = await asyncio.gather(
        ask_metrics(names, settings.gateway),
        services.engine.stats(),
        most_used(services.view, settings.metrics_adapters),
    )
    snapshots = sorted([services.metrics.snapshot(), *others], key=lambda snapshot: snapshot.gateway)
    disk = await asyncio.to_thread(Disk.of, settings.data_folder)
    body = render(snapshots, len(names), engines, settings.max_loras, disk=disk, adapters=adapters)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
