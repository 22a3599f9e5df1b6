"""Aliases: compare-and-set, canary, history and the way back; and the smoke prompts that stand before ``prod``."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.adapter_views import (
    AliasChange,
    AliasMoveView,
    AliasView,
    Rollback,
    SmokePrompts,
    SmokeRunView,
    SmokeSuiteView,
    alias_view,
)
from stencilpress.gateway.api.admin.desk import expectation, number_of
from stencilpress.gateway.api.admin.operation import Call, Page, operation
from stencilpress.gateway.catalog import adapters, aliases, lifecycle
from stencilpress.gateway.catalog.records import Expected, SmokeRun, find_version_of
from stencilpress.gateway.errors import InvalidRequestError, NotFoundError
from stencilpress.gateway.lifecycle.gatekeeper import move_past_gate, run_for
from stencilpress.gateway.lifecycle.smoke import check_prompts


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=aliases.MAX_HISTORY)] = 50


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}", Permission.READ)
async def get_alias(call: Call) -> AliasView:
    """Where an alias points."""
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, call.path("adapter"))
    alias = call.path("alias")
    if alias not in adapter.aliases:
        raise NotFoundError(f"alias: {adapter.name}@{alias[:64]} does not exist", param="alias")
    return alias_view(adapter, alias)


@operation("PUT", "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}", Permission.WRITE)
async def move_alias(call: Call, body: AliasChange) -> AliasView:
    """Point an alias at a version, with a canary or without, if it is where you expect it.

    A version that `prod` has not served must pass the adapter's smoke prompts; they are run if they have not been.
    """
    expected = _expected(call, body)
    if expected == Expected():
        text = "expected_version: say where the alias points now, or send its etag"
        raise InvalidRequestError(text, param="expected_version", code="missing_required_parameter")
    moved = await move_past_gate(
        call.services.db,
        call.tenant.id,
        call.path("adapter"),
        call.path("alias"),
        body.target,
        partial(_run, call),
        expected=expected,
        reason=body.reason,
        actor=call.actor,
    )
    return AliasView.of(moved)


@operation("POST", "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}/rollback", Permission.WRITE)
async def roll_back_alias(call: Call, body: Rollback) -> AliasView:
    """Take back the last move of an alias; repeated, the one before it. Smoke prompts are not asked for."""
    expected = _expected(call, body)
    moved = await aliases.roll_back(
        call.services.db,
        call.tenant.id,
        call.path("adapter"),
        call.path("alias"),
        expected=expected,
        reason=body.reason,
        actor=call.actor,
    )
    return AliasView.of(moved)


@operation("DELETE", "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}", Permission.WRITE, status=204)
async def remove_alias(call: Call) -> web.Response:
    """Take an alias away; requests that name it get a 404. With `If-Match` only if it is where you saw it."""
    await aliases.remove_alias(
        call.services.db,
        call.tenant.id,
        call.path("adapter"),
        call.path("alias"),
        expected=expectation(call, None),
        actor=call.actor,
    )
    return web.Response(status=204)


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}/history", Permission.READ)
async def list_alias_moves(call: Call, query: HistoryQuery) -> Page[AliasMoveView]:
    """The moves of an alias, newest first."""
    found = await aliases.list_moves(
        call.services.db, call.tenant.id, call.path("adapter"), call.path("alias"), limit=query.limit
    )
    return Page([AliasMoveView.of(one) for one in found], None)


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/smoke-prompts", Permission.READ)
async def get_smoke_prompts(call: Call) -> SmokeSuiteView:
    """The prompts that a version must answer before `prod` points at it."""
    return SmokeSuiteView.of(await lifecycle.get_suite(call.services.db, call.tenant.id, call.path("adapter")))


@operation("PUT", "/tenants/{tenant}/adapters/{adapter}/smoke-prompts", Permission.WRITE)
async def set_smoke_prompts(call: Call, body: SmokePrompts) -> SmokeSuiteView:
    """Replace an adapter's smoke prompts; earlier runs then no longer count."""
    await check_prompts(body.prompts)
    prompts: list[dict[str, Any]] = msgspec.to_builtins(body.prompts)
    return SmokeSuiteView.of(
        await lifecycle.set_suite(call.services.db, call.tenant.id, call.path("adapter"), prompts, actor=call.actor)
    )


@operation("POST", "/tenants/{tenant}/adapters/{adapter}/versions/{version}/smoke", Permission.WRITE)
async def run_smoke_prompts(call: Call) -> SmokeRunView:
    """Ask a version its adapter's smoke prompts, greedily, and the base the same."""
    return SmokeRunView.of(await _run(call, number_of(call)))


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/versions/{version}/smoke", Permission.READ)
async def list_smoke_runs(call: Call) -> Page[SmokeRunView]:
    """The last runs for a version, newest first."""
    found = await lifecycle.list_runs(call.services.db, call.tenant.id, call.path("adapter"), number_of(call))
    return Page([SmokeRunView.of(one) for one in found], None)


def _expected(call: Call, body: AliasChange | Rollback) -> Expected:
    """Of the body and the headers. Raises :class:`InvalidRequestError`."""
    version = None if body.expected_version is UNSET else body.expected_version
    return expectation(call, version, None if body.expected_etag is UNSET else body.expected_etag)


async def _run(call: Call, number: int) -> SmokeRun:
    """Run the suite for a version and keep the outcome. Raises :class:`ConflictError` without one."""
    services, tenant, name = call.services, call.tenant, call.path("adapter")
    version = find_version_of(await adapters.get_adapter(services.db, tenant.id, name), number)
    turn = services.smoke_turns.setdefault(tenant.id, asyncio.Lock())
    async with turn, services.using(version.digest, tenant.id):
        base = services.router.base.id
        return await run_for(
            services.db, services.engine, services.tokenizer, tenant, name, number, base, actor=call.actor
        )


OPERATIONS = (
    get_alias,
    move_alias,
    roll_back_alias,
    remove_alias,
    list_alias_moves,
    get_smoke_prompts,
    set_smoke_prompts,
    run_smoke_prompts,
    list_smoke_runs,
)
