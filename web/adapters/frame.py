"""What the pages of one adapter share: which one it is, its paths, the tabs."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from aiohttp import web

from stencilpress.gateway.api.admin.adapter_views import AdapterView, VersionView
from stencilpress.gateway.api.admin.adapters import get_adapter
from stencilpress.gateway.errors import ApiError, NotFoundError, PermissionDeniedError
from stencilpress.gateway.names import DEFAULT_ALIAS
from stencilpress.web.adapters import words
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX
from stencilpress.web.page import render, tenant_of

TENANT = f"{PREFIX}/t/{{tenant}}"
LIST = f"{TENANT}/adapters"
ADAPTER = f"{LIST}/{{adapter}}"
SECTION = "adapters"


def home_of(tenant: str) -> str:
    """Where a tenant's pages begin."""
    return f"{PREFIX}/t/{tenant}"


def adapter_path(request: web.Request) -> str:
    """The first page of the adapter in the request's path."""
    name = quote(request.match_info["adapter"], safe="")  # it stands in headers before anybody has checked it
    return f"{home_of(tenant_of(request).name)}/adapters/{name}"


async def find_adapter(request: web.Request) -> AdapterView:
    """The adapter of the path, with its deleted versions. Raises :class:`NotFoundError`."""
    name = request.match_info["adapter"]
    view: AdapterView = await ask(
        request, get_adapter, tenant=tenant_of(request).name, adapter=name, query={"deleted": True}
    )
    return view


def live(adapter: AdapterView) -> list[VersionView]:
    """The versions that can be used, the newest first."""
    return [one for one in reversed(adapter.versions) if one.deleted_at is None]


def prod_version(adapter: AdapterView) -> int | None:
    return next((alias.version for alias in adapter.aliases if alias.alias == DEFAULT_ALIAS), None)


def shown_beside_form(error: ApiError) -> ApiError:
    """An error that belongs beside the form that caused it; others are raised again, to be pages of their own."""
    if isinstance(error, NotFoundError | PermissionDeniedError) or error.status >= 500:
        raise error
    return error


def show(
    request: web.Request, template: str, adapter: AdapterView, tab: str, *, status: int = 200, **context: Any
) -> web.Response:
    """A page of an adapter. ``tab`` is ``versions``, ``aliases``, ``smoke`` or ``settings``."""
    tenant = tenant_of(request).name
    common = {
        "adapter": adapter,
        "tab": tab,
        "home": home_of(tenant),
        "at": adapter_path(request),
        "prod": prod_version(adapter),
        "canaries": {one.canary.version for one in adapter.aliases if one.canary is not None},
        "w": words,
    }
    title = context.pop("title", adapter.name)
    return render(
        request, template, title=title, section=SECTION, tenant=tenant, status=status, **{**common, **context}
    )
