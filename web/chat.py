"""The chat of a tenant: the page alone. Answers come over ``/console/chat/ws``; conversations stay in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.schemas import ChatRequest
from stencilpress.gateway.catalog.adapters import list_shared
from stencilpress.gateway.names import DEFAULT_ALIAS
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import PREFIX
from stencilpress.web.page import page, render, tenant_of
from stencilpress.web.visitor import may_of, visitor_of

SOCKET = f"{PREFIX}/chat/ws"


@dataclass(frozen=True, slots=True)
class Control:
    """A field of the request that the page has an input for. ``default`` is the server's, shown where none is set."""

    name: str
    label: str
    default: str = ""
    hint: str = ""
    step: float | None = None
    """Of a slider; None has none."""

    @property
    def range(self) -> Mapping[str, float | int | str]:
        """What the API takes: its ``kind`` (``int``, ``float``), and ``least``, ``most`` or ``above`` as far as set."""
        return _ranges().get(self.name, {})


CONTROLS = (
    Control("temperature", "Temperature", "1", "0 takes the most likely token", 0.05),
    Control("top_p", "Top p", "1", "", 0.01),
    Control("top_k", "Top k", "0", "0 is off"),
    Control("min_p", "Min p", "0", "", 0.01),
    Control("max_tokens", "Max tokens", "", "Empty is what the plan and the context leave"),
    Control("seed", "Seed", "random", "The same seed gives the same text again"),
    Control("presence_penalty", "Presence penalty", "0", "", 0.1),
    Control("frequency_penalty", "Frequency penalty", "0", "", 0.1),
    Control("repetition_penalty", "Repetition penalty", "1"),
)


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


@cache
def _ranges() -> dict[str, dict[str, float | int | str]]:
    kind = cast(msgspec.inspect.StructType, msgspec.inspect.type_info(ChatRequest))
    return {field.name: _range(field.type) for field in kind.fields}


def _range(kind: Any) -> dict[str, float | int | str]:
    inspect = msgspec.inspect
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for part in parts:
        if isinstance(part, inspect.IntType | inspect.FloatType):
            bounds = {"least": part.ge, "most": part.le, "above": part.gt}
            named = {name: bound for name, bound in bounds.items() if bound is not None}
            return {"kind": "int" if isinstance(part, inspect.IntType) else "float", **named}
    return {}


ROUTES = (web.get(f"{PREFIX}/t/{{tenant}}/chat", chat),)
