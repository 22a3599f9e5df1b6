"""Aliases of an adapter: where they point and have pointed, moving them, and one click back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import aliases as operations
from stencilpress.gateway.api.admin.adapter_views import AliasMoveView, AliasView, SmokeSuiteView
from stencilpress.gateway.catalog.aliases import rollback_target
from stencilpress.gateway.catalog.records import AliasTarget
from stencilpress.gateway.errors import ApiError, SmokeFailedError
from stencilpress.gateway.names import DEFAULT_ALIAS
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters import words
from stencilpress.web.adapters.frame import ADAPTER, adapter_path, find_adapter, live, show, shown_beside_form
from stencilpress.web.ask import ask
from stencilpress.web.forms import errors_of, read_form
from stencilpress.web.page import page, redirect, tenant_of

ALIAS = f"{ADAPTER}/aliases/{{alias}}"
HISTORY_SHOWN = 30


@dataclass(frozen=True, slots=True)
class AliasState:
    """One alias with its past. ``back`` is where a rollback would go, None if there is no way back."""

    view: AliasView
    moves: list[AliasMoveView]
    back: AliasTarget | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A move that a form asks for, and what came of it. Opens its dialog again unless ``alias`` is None."""

    alias: str | None = None
    version: str = ""
    reason: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)
    moved: bool = False
    """Somebody else was faster."""
    failed: SmokeFailedError | None = None


@page(Permission.READ)
async def show_aliases(request: web.Request) -> web.StreamResponse:
    """``?version=`` opens the dialog that points an alias at it, ``?alias=`` which."""
    version = request.query.get("version", "")
    return await _page(request, Attempt(request.query.get("alias", DEFAULT_ALIAS) if version else None, version))


@page(Permission.WRITE)
async def move_alias(request: web.Request) -> web.StreamResponse:
    """Point an alias, which may be a new one, at a version alone."""
    form = await read_form(request)
    name, version, reason = (form.get(one, "").strip() for one in ("alias", "version", "reason"))
    expected = {"expected_etag": form["etag"]} if form.get("etag") else {"expected_version": 0}
    try:
        await _ask(request, operations.move_alias, name or "?", {"version": version, "reason": reason, **expected})
    except ApiError as error:
        problem = shown_beside_form(error)
        failed = problem if isinstance(problem, SmokeFailedError) else None
        moved = problem.code == "alias_moved"
        attempt = Attempt(name, version, reason, {} if moved or failed else errors_of(problem), moved, failed)
        return await _page(request, attempt, status=problem.status)
    adapter = request.match_info["adapter"]
    return redirect(request, f"{adapter_path(request)}/aliases", f"{adapter}@{name} is version {version} now.")


@page(Permission.WRITE)
async def roll_back(request: web.Request) -> web.StreamResponse:
    form, alias = await read_form(request), request.match_info["alias"]
    back = f"{adapter_path(request)}/aliases"
    try:
        body = {"expected_etag": form.get("etag", ""), "reason": form.get("reason", "").strip()}
        view: AliasView = await _ask(request, operations.roll_back_alias, alias, body)
    except ApiError as error:
        problem = shown_beside_form(error)
        text = problem.message
        if problem.code == "alias_moved":
            text = f"Nothing was rolled back: somebody has moved {alias} since you opened the page. Look at it again."
        return redirect(request, back, text, "bad")
    return redirect(request, back, f"{alias} points at {words.target(view.version, view.canary)} again.")


@page(Permission.WRITE)
async def remove_alias(request: web.Request) -> web.StreamResponse:
    alias, back = request.match_info["alias"], f"{adapter_path(request)}/aliases"
    try:
        await _ask(request, operations.remove_alias, alias)
    except ApiError as error:
        return redirect(request, back, shown_beside_form(error).message, "bad")
    return redirect(request, back, f"{alias} is removed: requests that name it get a 404.")


async def _ask(request: web.Request, operation: Any, alias: str, body: Mapping[str, Any] | None = None) -> Any:
    adapter = request.match_info["adapter"]
    return await ask(request, operation, tenant=tenant_of(request).name, body=body, adapter=adapter, alias=alias)


async def alias_state(request: web.Request, view: AliasView) -> AliasState:
    """An alias with its newest moves."""
    tenant, adapter = tenant_of(request), request.match_info["adapter"]
    query = {"limit": HISTORY_SHOWN}
    moves = await ask(
        request, operations.list_alias_moves, tenant=tenant.name, adapter=adapter, alias=view.alias, query=query
    )
    back = await rollback_target(request.app[SERVICES].db, tenant.id, adapter, view.alias)
    return AliasState(view, moves.data, back)


async def _page(request: web.Request, attempt: Attempt, status: int = 200) -> web.StreamResponse:
    adapter = await find_adapter(request)
    suite: SmokeSuiteView | None = None
    states: list[AliasState] = []
    if adapter.deleted_at is None:
        suite = await ask(request, operations.get_smoke_prompts, tenant=tenant_of(request).name, adapter=adapter.name)
        ordered = sorted(adapter.aliases, key=lambda one: (one.alias != DEFAULT_ALIAS, one.alias))
        states = [await alias_state(request, one) for one in ordered]
    return show(
        request,
        "adapters/aliases.html",
        adapter,
        "aliases",
        status=status,
        states=states,
        attempt=attempt,
        suite=suite,
        numbers=[one.number for one in live(adapter)],
    )


ROUTES = (
    web.get(f"{ADAPTER}/aliases", show_aliases),
    web.post(f"{ADAPTER}/aliases", move_alias),
    web.post(f"{ALIAS}/rollback", roll_back),
    web.post(f"{ALIAS}/remove", remove_alias),
)
