"""Adapters and their versions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.adapter_views import AdapterView, ShareView, VersionView
from stencilpress.gateway.api.admin.desk import desk_of, number_of
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.catalog import adapters, lifecycle
from stencilpress.gateway.catalog.digests import out_of_use
from stencilpress.gateway.catalog.kept import set_kept
from stencilpress.gateway.catalog.records import Keeping, find_version_of
from stencilpress.gateway.defaults import VersionDefaults
from stencilpress.gateway.errors import InternalError
from stencilpress.gateway.lifecycle.contents import Contents
from stencilpress.gateway.lifecycle.diff import Diff
from stencilpress.gateway.worker_process import WorkerError


class AdapterQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    deleted: Annotated[bool, Meta(description="Deleted adapters and versions too.")] = False


class DeletedQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    deleted: Annotated[bool, Meta(description="Also if it was deleted, and its deleted versions.")] = False


class DiffQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    other: Annotated[int, Meta(ge=1, le=2**31 - 1, description="The version on the right.")]


@operation("GET", "/tenants/{tenant}/adapters", Permission.READ)
async def list_adapters(call: Call, query: AdapterQuery) -> Page[AdapterView]:
    """A tenant's adapters by name, with versions and aliases."""
    found = await adapters.list_adapters(
        call.services.db,
        call.tenant.id,
        deleted=query.deleted,
        after=decode_cursor(query.after, str) or "",
        limit=query.limit + 1,
    )
    return paged(found, query.limit, lambda one: one.name, AdapterView.of)


@operation("GET", "/tenants/{tenant}/adapters/{adapter}", Permission.READ)
async def get_adapter(call: Call, query: DeletedQuery) -> AdapterView:
    """One adapter with its versions and aliases."""
    name = call.path("adapter")
    return AdapterView.of(await adapters.get_adapter(call.services.db, call.tenant.id, name, deleted=query.deleted))


@operation("DELETE", "/tenants/{tenant}/adapters/{adapter}", Permission.WRITE)
async def delete_adapter(call: Call) -> AdapterView:
    """Take an adapter out of use with all of it.

    Streams that run end on it. Until it is purged it can be restored, and its name stays taken.
    """
    db, name = call.services.db, call.path("adapter")
    await lifecycle.delete_adapter(db, call.tenant.id, name, actor=call.actor)
    adapter = await adapters.get_adapter(db, call.tenant.id, name, deleted=True)
    await call.services.engine.forget(await out_of_use(db, [version.digest for version in adapter.versions]))
    return AdapterView.of(adapter)


@operation("POST", "/tenants/{tenant}/adapters/{adapter}/restore", Permission.WRITE)
async def restore_adapter(call: Call) -> AdapterView:
    """Bring a deleted adapter back as it was."""
    db, name = call.services.db, call.path("adapter")
    await lifecycle.restore_adapter(db, call.tenant.id, name, actor=call.actor)
    return AdapterView.of(await adapters.get_adapter(db, call.tenant.id, name))


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/versions/{version}", Permission.READ)
async def get_version(call: Call) -> VersionView:
    """One version, with what it brings along for requests that leave it out."""
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, call.path("adapter"))
    return VersionView.of(find_version_of(adapter, number_of(call)), adapter)


@operation("PUT", "/tenants/{tenant}/adapters/{adapter}/versions/{version}/defaults", Permission.WRITE)
async def set_version_defaults(call: Call, body: VersionDefaults) -> VersionView:
    """Set what a version brings along: a system prompt and sampling for requests that leave them out.

    It replaces what was there; `{}` takes all away.
    """
    db, name = call.services.db, call.path("adapter")
    await adapters.set_defaults(db, call.tenant.id, name, number_of(call), body, actor=call.actor)
    return await get_version.handler(call)  # type: ignore[no-any-return]


@operation("DELETE", "/tenants/{tenant}/adapters/{adapter}/versions/{version}", Permission.WRITE)
async def delete_version(call: Call) -> VersionView:
    """Take a version out of use.

    Refused while an alias or a canary points at it. Streams that run end on it; until it is purged it can be restored.
    """
    db, name, number = call.services.db, call.path("adapter"), number_of(call)
    await lifecycle.delete_version(db, call.tenant.id, name, number, actor=call.actor)
    adapter = await adapters.get_adapter(db, call.tenant.id, name, deleted=True)
    version = find_version_of(adapter, number)
    await call.services.engine.forget(await out_of_use(db, [version.digest]))
    return VersionView.of(version, adapter)


@operation("POST", "/tenants/{tenant}/adapters/{adapter}/versions/{version}/restore", Permission.WRITE)
async def restore_version(call: Call) -> VersionView:
    """Bring a deleted version back."""
    db, name = call.services.db, call.path("adapter")
    await lifecycle.restore_version(db, call.tenant.id, name, number_of(call), actor=call.actor)
    return await get_version.handler(call)  # type: ignore[no-any-return]


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/versions/{version}/contents", Permission.READ)
async def get_version_contents(call: Call) -> Contents:
    """The config of a version, and the projections that it adapts with their ranks."""
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, call.path("adapter"))
    return await desk_of(call).contents(find_version_of(adapter, number_of(call)), call.tenant.id)


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/versions/{version}/diff", Permission.READ)
async def diff_versions(call: Call, query: DiffQuery) -> Diff:
    """What differs from the version to the `other`: config, modules, ranks by layer, and how far weights have moved."""
    desk = desk_of(call)
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, call.path("adapter"))
    left, right = (find_version_of(adapter, number) for number in (number_of(call), query.other))
    try:
        return await desk.diff(left, right, call.tenant.id)
    except WorkerError as error:
        raise InternalError(str(error)) from error


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/shares", Permission.OPERATE)
async def list_shares(call: Call) -> Page[ShareView]:
    """The tenants that may use an adapter beside its owner."""
    found = await lifecycle.list_shares(call.services.db, call.tenant.id, call.path("adapter"))
    return Page([ShareView.of(one) for one in found], None)


@operation("PUT", "/tenants/{tenant}/adapters/{adapter}/shares/{guest}", Permission.OPERATE)
async def share_adapter(call: Call) -> ShareView:
    """Let another tenant use an adapter under its name.

    It sees the name and the versions that it names; limits of enrolment are the owner's.
    """
    name, guest = call.path("adapter"), call.path("guest")
    return ShareView.of(await lifecycle.share_adapter(call.services.db, call.tenant.id, name, guest, actor=call.actor))


@operation("DELETE", "/tenants/{tenant}/adapters/{adapter}/shares/{guest}", Permission.OPERATE, status=204)
async def unshare_adapter(call: Call) -> web.Response:
    """Take a share back; requests that start from now on get a 404."""
    name, guest = call.path("adapter"), call.path("guest")
    await lifecycle.unshare_adapter(call.services.db, call.tenant.id, name, guest, actor=call.actor)
    return web.Response(status=204)


@operation("PUT", "/tenants/{tenant}/adapters/{adapter}/pin", Permission.OPERATE)
async def pin_adapter(call: Call) -> AdapterView:
    """Keep what an adapter's `prod` stands for in the engines' memory.

    It is brought in when nobody waits for another, in half of the memory for adapters at most, and gives way only to a
    request that could never run otherwise. It follows the alias, and lasts until it is taken back.
    """
    return await _keep(call, "pin")


@operation("DELETE", "/tenants/{tenant}/adapters/{adapter}/pin", Permission.OPERATE)
async def unpin_adapter(call: Call) -> AdapterView:
    """Pin an adapter no longer, nor preload it; what is in memory may be evicted from now on."""
    return await _keep(call, None)


@operation("POST", "/tenants/{tenant}/adapters/{adapter}/preload", Permission.OPERATE)
async def preload_adapter(call: Call) -> AdapterView:
    """Have what an adapter's `prod` stands for brought into the engines' memory now, and whenever they start.

    It may be evicted like any other; asked again, it is brought in again. An adapter that is pinned stays so.
    """
    return await _keep(call, "preload")


async def _keep(call: Call, kept: Keeping | None) -> AdapterView:
    db, name = call.services.db, call.path("adapter")
    await set_kept(db, call.tenant.id, name, kept, actor=call.actor)
    await call.services.keeper.say()
    return AdapterView.of(await adapters.get_adapter(db, call.tenant.id, name))


OPERATIONS = (
    list_adapters,
    get_adapter,
    delete_adapter,
    restore_adapter,
    get_version,
    set_version_defaults,
    delete_version,
    restore_version,
    get_version_contents,
    diff_versions,
    list_shares,
    share_adapter,
    unshare_adapter,
    pin_adapter,
    unpin_adapter,
    preload_adapter,
)
