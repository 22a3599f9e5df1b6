"""The page that uploads adapters. Its script sends the files in parts over the admin API."""

from __future__ import annotations

import shlex

from aiohttp import web

from stencilpress.gateway.access import ADMIN_PREFIX, Permission
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.names import is_name
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters import words
from stencilpress.web.adapters.frame import SECTION, TENANT, home_of
from stencilpress.web.formats import size
from stencilpress.web.page import page, render, tenant_of


@page(Permission.WRITE)
async def show_upload(request: web.Request) -> web.StreamResponse:
    """``?adapter=`` is the one that gets a new version."""
    tenant, asked = tenant_of(request), request.query.get("adapter", "")
    adapter = asked if is_name(asked) else ""
    limits, settings = tenant.limits, request.app[SERVICES].settings
    accepted = [
        ("Size", f"up to {size(limits.max_adapter_bytes)}"),
        ("Rank", f"up to {min(limits.max_rank, settings.max_lora_rank)}"),
        ("Modules", "all" if limits.target_modules is None else words.modules(limits.target_modules) or "none"),
        ("Adapters", f"up to {limits.max_adapters:,}"),
        ("Weights", "safetensors"),
    ]
    return render(
        request,
        "adapters/upload.html",
        title="Upload a version" if adapter else "Upload an adapter",
        section=SECTION,
        tenant=tenant.name,
        home=home_of(tenant.name),
        adapter=adapter,
        max_bytes=limits.max_adapter_bytes,
        max_config_bytes=MAX_CONFIG_BYTES,
        limits=accepted,
        command=upload_command(request, tenant.name, adapter or "NAME"),
    )


def upload_command(request: web.Request, tenant: str, adapter: str) -> str:
    """The upload as one call of the admin API, for a terminal."""
    url = f"{request.scheme}://{request.host}{ADMIN_PREFIX}/tenants/{tenant}/adapters/{adapter}/versions"
    return (
        f'curl -H "Authorization: Bearer $KEY" \\\n  -F f=@{CONFIG_NAME} \\\n  -F f=@{WEIGHTS_NAME} \\\n'
        f"  {shlex.quote(url)}"
    )


ROUTES = (web.get(f"{TENANT}/upload", show_upload),)
