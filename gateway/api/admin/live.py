"""What happens right now, as server-sent events: a picture every two seconds."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.operation import Call, operation
from stencilpress.gateway.errors import AuthenticationError, PermissionDeniedError, UnavailableError
from stencilpress.gateway.live_picture import EVERYBODY

EVENTS = "text/event-stream"
FOLLOW_S = 60.0
"""Then the stream ends and the client comes back. It ends with the next picture when the key is refused."""
RETRY_MS = 500


@operation("GET", "/live", Permission.OPERATE, produces=EVENTS)
async def follow_live(call: Call) -> web.StreamResponse:
    """Traffic, latencies, refusals, busiest tenants and engines right now, over all gateways, as server-sent events.

    Each `data` is one picture in JSON, every two seconds. The stream ends after a minute; clients come back by
    themselves. One that reads too slowly misses pictures.
    """
    return await _follow(call, EVERYBODY)


@operation("GET", "/tenants/{tenant}/live", Permission.READ, produces=EVENTS)
async def follow_tenant_live(call: Call) -> web.StreamResponse:
    """Traffic, latencies and refusals of a tenant right now, over all gateways, as server-sent events.

    Each `data` is one picture in JSON, every two seconds. The stream ends after a minute; clients come back by
    themselves. One that reads too slowly misses pictures.
    """
    return await _follow(call, call.tenant.id)


async def _follow(call: Call, tenant_id: int) -> web.StreamResponse:
    with call.services.live.listen(tenant_id) as listener:
        response = web.StreamResponse(
            headers={"Content-Type": EVENTS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(call.request)
        await response.write(b"retry: %d\n\n" % RETRY_MS)
        with suppress(TimeoutError, AuthenticationError, PermissionDeniedError, UnavailableError):
            async with asyncio.timeout(FOLLOW_S):  # also for a client that does not read
                async for picture in listener:
                    await call.again()
                    await response.write(b"data: %b\n\n" % picture)
    return response


OPERATIONS = (follow_live, follow_tenant_live)
