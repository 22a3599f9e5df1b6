"""Smoke prompts of an adapter: editing them, and asking them of a version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from multidict import MultiDictProxy

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import aliases as operations
from stencilpress.gateway.api.admin.adapter_views import SmokeRunView, SmokeSuiteView
from stencilpress.gateway.catalog.lifecycle import last_runs
from stencilpress.gateway.errors import ApiError
from stencilpress.gateway.lifecycle.smoke import MAX_PROMPTS
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters.frame import ADAPTER, adapter_path, find_adapter, live, show, shown_beside_form
from stencilpress.web.ask import ask
from stencilpress.web.forms import errors_of, read_form
from stencilpress.web.page import page, redirect, tenant_of

ROLES = ("user", "system", "assistant")
_FIELD = re.compile(r"p([0-9]{1,3})\.(max_tokens|must_match|(?:m([0-9]{1,3})\.(role|content)))")


@page(Permission.READ)
async def show_smoke(request: web.Request) -> web.StreamResponse:
    return await _page(request)


@page(Permission.WRITE)
async def set_prompts(request: web.Request) -> web.StreamResponse:
    form, tenant, adapter = await read_form(request), tenant_of(request).name, request.match_info["adapter"]
    prompts = prompts_of(form)
    try:
        body = {"prompts": [_without_empty(one) for one in prompts]}
        await ask(request, operations.set_smoke_prompts, tenant=tenant, adapter=adapter, body=body)
    except ApiError as error:
        problem = shown_beside_form(error)
        return await _page(request, prompts=prompts, errors=errors_of(problem), status=problem.status)
    text = "Smoke prompts are saved. Earlier runs no longer count." if prompts else "No prompts stand before prod now."
    return redirect(request, f"{adapter_path(request)}/smoke", text)


@page(Permission.WRITE)
async def run_smoke(request: web.Request) -> web.StreamResponse:
    """Ask a version the prompts, and show the outcome on its page, or here with the field ``back``."""
    form, parts = await read_form(request), request.match_info
    here = f"{adapter_path(request)}/smoke"
    back = here if form.get("back") else f"{adapter_path(request)}/versions/{parts['version']}#smoke"
    try:
        run: SmokeRunView = await ask(
            request,
            operations.run_smoke_prompts,
            tenant=tenant_of(request).name,
            adapter=parts["adapter"],
            version=parts["version"],
        )
    except ApiError as error:
        return redirect(request, back, _asked_in_vain(error), "bad")
    name = f"{parts['adapter']}@{run.version}"
    if run.passed:
        return redirect(request, back, f"{name} has passed the smoke prompts.")
    return redirect(request, back, f"{name} has not passed the smoke prompts.", "bad")


def prompts_of(form: MultiDictProxy[str]) -> list[dict[str, Any]]:
    """The prompts in a form's fields ``p0.max_tokens``, ``p0.must_match``, ``p0.m1.role``, ``p0.m1.content``; what
    has no text at all is left out."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in form.items():
        match = _FIELD.fullmatch(name)
        if match is None:
            continue
        prompt = found.setdefault(int(match[1]), {"messages": {}})
        if match[3] is None:
            prompt[match[2]] = value.strip()
        else:
            prompt["messages"].setdefault(int(match[3]), {})[match[4]] = value.replace("\r\n", "\n")
    prompts = []
    for _, prompt in sorted(found.items()):
        messages = [one for _, one in sorted(prompt["messages"].items()) if one.get("content", "").strip()]
        if messages or prompt.get("must_match"):
            prompts.append({**prompt, "messages": messages})
    return prompts


def _without_empty(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A field that was left empty is as if it were not there."""
    return {name: value for name, value in prompt.items() if value != ""}


def _asked_in_vain(error: ApiError) -> str:
    return error.message if error.status == 503 else shown_beside_form(error).message


async def _page(
    request: web.Request,
    *,
    prompts: list[dict[str, Any]] | None = None,
    errors: Mapping[str, str] | None = None,
    status: int = 200,
) -> web.StreamResponse:
    adapter = await find_adapter(request)
    db, tenant = request.app[SERVICES].db, tenant_of(request)
    suite = SmokeSuiteView(revision=None, prompts=[], updated_at=None)
    if adapter.deleted_at is None:
        suite = await ask(request, operations.get_smoke_prompts, tenant=tenant.name, adapter=adapter.name)
    runs = await last_runs(db, tenant.id, adapter.name)
    return show(
        request,
        "adapters/smoke.html",
        adapter,
        "smoke",
        status=status,
        suite=suite,
        prompts=suite.prompts if prompts is None else prompts,
        errors=errors or {},
        max_prompts=MAX_PROMPTS,
        roles=ROLES,
        versions=live(adapter)[:10],
        runs=runs,
    )


ROUTES = (
    web.get(f"{ADAPTER}/smoke", show_smoke),
    web.post(f"{ADAPTER}/smoke", set_prompts),
    web.post(f"{ADAPTER}/versions/{{version}}/smoke", run_smoke),
)
