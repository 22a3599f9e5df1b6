"""The application: which path goes to which handler. Only wiring."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import web

from stencilpress.gateway.api import chat, completions, health, lora, models, tokenize, ws
from stencilpress.gateway.api.admin.router import add_admin_routes
from stencilpress.gateway.middleware import name_response, observe
from stencilpress.gateway.server import Cors, Runner
from stencilpress.gateway.services import SERVICES, Services

WHOLE_REQUEST_LIMIT_S = 75.0
"""How long a connection may stay without a whole request head: an idle one, or one that sends a byte now and then."""


Mount = Callable[[web.Application], None]
"""Adds routes, middlewares and signal handlers of another part, such as the console, to the application."""


def create_app(services: Services, mounts: Iterable[Mount] = ()) -> web.Application:
    cors = Cors(services.settings.cors_origins)
    app = web.Application(middlewares=[observe, cors.preflight])
    app[SERVICES] = services
    app.on_response_prepare.append(name_response)
    app.on_response_prepare.append(cors.allow)
    app.router.add_post("/v1/chat/completions", chat.create_chat_completion)
    app.router.add_get("/v1/chat/ws", ws.chat, allow_head=False)
    app.router.add_post("/v1/completions", completions.create_completion)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{model:.+}", models.retrieve_model)
    app.router.add_post("/v1/load_lora_adapter", lora.load_lora_adapter)
    app.router.add_post("/v1/unload_lora_adapter", lora.unload_lora_adapter)
    app.router.add_post("/tokenize", tokenize.tokenize)
    app.router.add_post("/detokenize", tokenize.detokenize)
    add_admin_routes(app.router)
    app.router.add_get("/healthz", health.healthz)
    app.router.add_get("/readyz", health.readyz)
    app.router.add_get("/metrics", health.metrics)
    for mount in mounts:
        mount(app)
    return app


def create_runner(services: Services, shutdown_timeout_s: float, mounts: Iterable[Mount] = ()) -> Runner:
    """Runs the application the way it is meant to be run."""
    return Runner(
        create_app(services, mounts),
        handler_cancellation=True,  # a client that leaves ends its handler, which aborts its request
        auto_decompress=False,  # compressed bodies are refused, so nothing may inflate them
        access_log=None,  # middleware.py writes its own
        keepalive_timeout=WHOLE_REQUEST_LIMIT_S,
        shutdown_timeout=shutdown_timeout_s,
    )
