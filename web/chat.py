"""The chat of a tenant: the page alone. Answers come over ``/console/chat/ws``; conversations stay in the browser."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.catalog.adapters import list_shared
from stencilpress.gateway.names import DEFAULT_ALIAS
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import PREFIX
from stencilpress.web.page import page, render, tenant_of
from stencilpress.web.sampling import CONTROLS
from stencilpress.web.visitor import may_of, visitor_of

SOCKET = f"{PREFIX}/chat/ws"


@page(Permission.READ)
async def chat(request: web.Request) -> web.StreamResponse:
    """Who may look and not call is told so in place of the composer."""
    tenant, visitor, services = tenant_of(request), visitor_of(request), request.app[SERVICES]
    refusal = _refusal(may_of(request).call, visitor.tenant == tenant.name)
    shared = () if refusal else await list_shared(services.db, tenant.id)
    return render(
        request,
        "chat.html",
        title="Chat",
        section="chat",
        tenant=tenant.name,
        refusal=refusal,
        controls=CONTROLS,
        page_data={
            "tenant": tenant.name,
            "user": visitor.user_id,
            "socket": SOCKET,
            "base": services.base_names[0],
            "shared": [adapter.name for adapter in shared if DEFAULT_ALIAS in adapter.aliases],
        },
    )


def _refusal(may_call: bool, own: bool) -> str:
    """Why the page has no composer: ``role``, ``tenant`` (requests count for one's own alone), or "" if it has one."""
    if not may_call:
        return "role"
    return "" if own else "tenant"


ROUTES = (web.get(f"{PREFIX}/t/{{tenant}}/chat", chat),)
