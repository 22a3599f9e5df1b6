"""What happens right now, as server-sent events: of all gateways and engines for operators, and of one tenant."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.errors import AuthenticationError
from stencilpress.gateway.live_picture import EVERYBODY
from stencilpress.gateway.services import SERVICES
from stencilpress.gateway.slow_clients import SlowClientError, write_in_time
from stencilpress.web.console import PREFIX
from stencilpress.web.page import page, tenant_of
from stencilpress.web.visitor import caller_again

ALL = f"{PREFIX}/live"
TENANT = f"{PREFIX}/t/{{tenant}}/live"


@page(Permission.OPERATE)
async def follow_all(request: web.Request) -> web.StreamResponse:
    return await _follow(request, EVERYBODY)


@page(Permission.READ)
async def follow_tenant(request: web.Request) -> web.StreamResponse:
    return await _follow(request, tenant_of(request).id)


async def _follow(request: web.Request, tenant_id: int) -> web.StreamResponse:
    """Pictures until the page is left, the session ends, or the gateway does. Raises :class:`UnavailableError`."""
    services = request.app[SERVICES]
    with services.live.listen(tenant_id) as listener:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        async for picture in listener:
            try:
                await caller_again(request)
                writing = response.write(b"event: now\ndata: " + picture + b"\n\n")
                await write_in_time(request, writing, services.settings.write_limit_s, services.metrics)
            except AuthenticationError:
                await response.write(b"event: signed-out\ndata: \n\n")
                break
            except SlowClientError:
                break
    return response


ROUTES = (web.get(ALL, follow_all, allow_head=False), web.get(TENANT, follow_tenant, allow_head=False))
"""Without HEAD, whose answer would have to end and to have no body."""
