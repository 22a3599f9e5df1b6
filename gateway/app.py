"""The application: which path goes to which handler. Only wiring."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.api import chat, completions, health, models, ws
from stencilpress.gateway.api.admin.router import add_admin_routes
from stencilpress.gateway.middleware import name_response, observe
from stencilpress.gateway.services import SERVICES, Services

WHOLE_REQUEST_LIMIT_S = 75.0
"""How long a connection may stay without a whole request head: an idle one, or one that sends a byte now and then."""


def create_app(services: Services) -> web.Application:
    app = web.Application(middlewares=[observe])
    app[SERVICES] = services
    app.on_response_prepare.append(name_response)
    app.router.add_post("/v1/chat/completions", chat.create_chat_completion)
    app.router.add_get("/v1/chat/ws", ws.chat)
    app.router.add_post("/v1/completions", completions.create_completion)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{model:.+}", models.retrieve_model)
    add_admin_routes(app.router)
    app.router.add_get("/healthz", health.healthz)
    app.router.add_get("/readyz", health.readyz)
    app.router.add_get("/metrics", health.metrics)
    return app


def create_runner(services: Services, shutdown_timeout_s: float) -> web.AppRunner:
    """Runs the application the way it is meant to be run."""
    return web.AppRunner(
        create_app(services),
        handler_cancellation=True,  # a client that leaves ends its handler, which aborts its request
        auto_decompress=False,  # compressed bodies are refused, so nothing may inflate them
        access_log=None,  # middleware.py writes its own
        keepalive_timeout=WHOLE_REQUEST_LIMIT_S,
        shutdown_timeout=shutdown_timeout_s,
    )
