"""One version: what it is, how it does, its defaults, its smoke results, and how it differs from another one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import adapters as operations
from stencilpress.gateway.api.admin.adapter_views import AdapterView, SmokeRunView, SmokeSuiteView, VersionView
from stencilpress.gateway.api.admin.aliases import get_smoke_prompts, list_smoke_runs
from stencilpress.gateway.api.admin.version_files import get_version_file
from stencilpress.gateway.catalog.audit import actors_of
from stencilpress.gateway.defaults import NO_DEFAULTS, VersionDefaults
from stencilpress.gateway.errors import ApiError, NotFoundError
from stencilpress.gateway.lifecycle.contents import Contents
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters.diffs import SHOWN, DiffShown, shown_diff
from stencilpress.web.adapters.figures import places_of, series_of, version_charts
from stencilpress.web.adapters.frame import ADAPTER, adapter_path, find_adapter, live, show, shown_beside_form
from stencilpress.web.ask import ask
from stencilpress.web.forms import errors_of, read_form, to_struct
from stencilpress.web.page import page, redirect, tenant_of
from stencilpress.web.sampling import CONTROLS

VERSION = f"{ADAPTER}/versions/{{version}}"
SAMPLING = tuple(one for one in CONTROLS if one.name in VersionDefaults.__struct_fields__)
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@page(Permission.READ)
async def show_version(request: web.Request) -> web.StreamResponse:
    """``?other=`` compares it with another version."""
    return await _page(request)


@page(Permission.WRITE)
async def set_defaults(request: web.Request) -> web.StreamResponse:
    form = await read_form(request)
    try:
        body = to_struct(form, VersionDefaults)
        await _ask(request, operations.set_version_defaults, body=body)
    except ApiError as error:
        problem = shown_beside_form(error)
        return await _page(request, typed=dict(form), errors=errors_of(problem), status=problem.status)
    text = "Requests that leave these fields out get them from now on." if body != NO_DEFAULTS else "No defaults now."
    return redirect(request, f"{_here(request)}#defaults", text)


@page(Permission.WRITE)
async def delete_version(request: web.Request) -> web.StreamResponse:
    name = f"{request.match_info['adapter']}@{request.match_info['version']}"
    try:
        await _ask(request, operations.delete_version)
    except ApiError as error:
        return redirect(request, _here(request), shown_beside_form(error).message, "bad")
    text = f"{name} is out of use. It can be restored until it is purged."
    return redirect(request, f"{adapter_path(request)}?deleted=1", text)


@page(Permission.WRITE)
async def restore_version(request: web.Request) -> web.StreamResponse:
    try:
        await _ask(request, operations.restore_version)
    except ApiError as error:
        return redirect(request, adapter_path(request), shown_beside_form(error).message, "bad")
    return redirect(request, _here(request), f"@{request.match_info['version']} is back in use.")


@page(Permission.WRITE)
async def get_file(request: web.Request) -> web.StreamResponse:
    try:
        sent: web.StreamResponse = await _ask(request, get_version_file, file=request.match_info["file"])
    except NotFoundError:
        raise
    except ApiError as error:
        return redirect(request, _here(request), shown_beside_form(error).message, "bad")
    return sent


def _here(request: web.Request) -> str:
    """Only after an operation has accepted the number in the path."""
    return f"{adapter_path(request)}/versions/{request.match_info['version']}"


async def _ask(request: web.Request, operation: Any, **given: Any) -> Any:
    parts = request.match_info
    if not _NUMBER.fullmatch(parts["version"]):
        raise NotFoundError("version: does not exist", param="version")
    tenant = tenant_of(request).name
    return await ask(request, operation, tenant=tenant, adapter=parts["adapter"], version=parts["version"], **given)


async def _page(
    request: web.Request,
    *,
    typed: Mapping[str, str] | None = None,
    errors: Mapping[str, str] | None = None,
    status: int = 200,
) -> web.StreamResponse:
    adapter = await find_adapter(request)
    version = _version_of(adapter, request.match_info["version"])
    usable = adapter.deleted_at is None and version.deleted_at is None
    targets = [f"version:{version.version}"]
    added_by = await actors_of(request.app[SERVICES].db, tenant_of(request).id, "version.add", targets)
    return show(
        request,
        "adapters/version.html",
        adapter,
        "versions",
        title=version.version,
        status=status,
        version=version,
        usable=usable,
        seen=await places_of(request, [version.digest]),
        added_by=added_by.get(targets[0], "system"),
        defaults=msgspec.to_builtins(version.defaults) if typed is None else typed,
        sampling=SAMPLING,
        errors=errors or {},
        others=[one.number for one in live(adapter) if one.number != version.number],
        bars_shown=SHOWN,
        **(await _in_use(request, version) if usable else _OUT_OF_USE),
    )


_OUT_OF_USE: Mapping[str, Any] = {
    "contents": None,
    "config": None,
    "totals": None,
    "charts": [],
    "runs": [],
    "suite": None,
    "other": "",
    "diff": None,
    "diff_problem": "",
}


async def _in_use(request: web.Request, version: VersionView) -> dict[str, Any]:
    """What the page shows of a version that can be used alone."""
    tenant, name, other = tenant_of(request).name, request.match_info["adapter"], request.query.get("other", "")
    contents = await _contents(request)
    config = None if contents is None or contents.config is None else msgspec.json.encode(contents.config)
    series = await series_of(request, name, version.number)
    suite: SmokeSuiteView = await ask(request, get_smoke_prompts, tenant=tenant, adapter=name)
    runs: list[SmokeRunView] = (await _ask(request, list_smoke_runs)).data
    diff, problem = await _diff(request, other) if other else (None, "")
    return {
        "contents": contents,
        "config": None if config is None else msgspec.json.format(config).decode(),
        "totals": series.total,
        "charts": version_charts(series) if series.total.requests else [],
        "runs": runs,
        "suite": suite,
        "other": other,
        "diff": diff,
        "diff_problem": problem,
    }


def _version_of(adapter: AdapterView, text: str) -> VersionView:
    """Deleted ones too. Raises :class:`NotFoundError`."""
    for one in adapter.versions:
        if str(one.number) == text:
            return one
    raise NotFoundError("version: does not exist", param="version")


async def _contents(request: web.Request) -> Contents | None:
    """None where the files are out of reach: the rest of the page is worth showing."""
    try:
        found: Contents = await _ask(request, operations.get_version_contents)
    except ApiError as error:
        if error.status != 503:
            raise
        return None
    return found


async def _diff(request: web.Request, other: str) -> tuple[DiffShown | None, str]:
    """How another version differs, or why that cannot be said."""
    try:
        return shown_diff(await _ask(request, operations.diff_versions, query={"other": other})), ""
    except NotFoundError:
        raise
    except ApiError as error:
        return None, error.message


ROUTES = (
    web.get(VERSION, show_version),
    web.get(f"{VERSION}/files/{{file}}", get_file, allow_head=False),  # as the admin API: it is a stream
    web.post(f"{VERSION}/defaults", set_defaults),
    web.post(f"{VERSION}/delete", delete_version),
    web.post(f"{VERSION}/restore", restore_version),
)
