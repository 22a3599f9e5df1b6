"""Tenants and their limits."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stencilpress.gateway.access import PERMISSIONS, Permission, Role
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.api.admin.views import (
    LimitChanges,
    Me,
    NewTenant,
    Purge,
    Purged,
    QuotaView,
    TenantView,
    given,
)
from stencilpress.gateway.catalog import erasure, tenants
from stencilpress.gateway.catalog.adapters import stored
from stencilpress.gateway.catalog.digests import out_of_use
from stencilpress.gateway.catalog.limits import changed
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.errors import ConflictError, InvalidRequestError


class TenantQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefix: Annotated[str, Meta(max_length=64, description="Only names that begin so.")] = ""
    deleted: Annotated[bool, Meta(description="Deleted ones too.")] = False


@operation("GET", "/me", Permission.READ)
async def get_me(call: Call) -> Me:
    """The key that asks: its tenant and what it may do."""
    actor = call.actor
    models, routes = actor.scopes.models, actor.scopes.routes
    return Me(
        key=actor.name.removeprefix("key:"),
        tenant=call.own_tenant,
        role=actor.role,
        permissions=sorted(permission.value for permission in PERMISSIONS[actor.role]),
        models=None if models is None else list(models),
        routes=None if routes is None else list(routes),
    )


@operation("GET", "/tenants", Permission.READ)
async def list_tenants(call: Call, query: TenantQuery) -> Page[TenantView]:
    """The tenants that the key may know of, by name.

    An operator's key sees all, any other its own.
    """
    after = decode_cursor(query.after, str) or ""
    if call.actor.role is Role.OPERATOR:
        found = await tenants.list_tenants(
            call.services.db, after=after, prefix=query.prefix, limit=query.limit + 1, deleted=query.deleted
        )
    else:
        own = await tenants.get_tenant(call.services.db, call.own_tenant)
        found = (own,) if own.name > after and own.name.startswith(query.prefix) else ()
    return paged(found, query.limit, lambda one: one.name, TenantView.of)


@operation("POST", "/tenants", Permission.OPERATE, status=201)
async def create_tenant(call: Call, body: NewTenant) -> TenantView:
    """Add a tenant."""
    limits = given(body)
    name = limits.pop("name")
    made = await tenants.create_tenant(call.services.db, name, changed(TenantLimits(), limits), actor=call.actor)
    return TenantView.of(made)


@operation("GET", "/tenants/{tenant}", Permission.READ)
async def get_tenant(call: Call) -> TenantView:
    """One tenant with its limits."""
    return TenantView.of(call.tenant)


@operation("PATCH", "/tenants/{tenant}", Permission.OPERATE)
async def change_tenant(call: Call, body: LimitChanges) -> TenantView:
    """Change some limits.

    They hold for requests and uploads that start from now on; gateways follow within a second.
    """
    changed_ = await tenants.change_tenant(call.services.db, call.tenant.name, given(body), actor=call.actor)
    return TenantView.of(changed_)


@operation("GET", "/tenants/{tenant}/quota", Permission.READ)
async def get_quota(call: Call) -> QuotaView:
    """What the tenant uses now, beside its limits.

    Several gateways without a shared quota store count each for itself; then this is what the one that answers has
    counted.
    """
    limits, services = call.tenant.limits, call.services
    levels = await services.accounting.quotas.levels(call.tenant.id, limits.quota)
    return QuotaView.of(limits, levels, *await stored(services.db, call.tenant.id))


@operation("POST", "/tenants/{tenant}/disable", Permission.OPERATE)
async def disable_tenant(call: Call) -> TenantView:
    """Refuse a tenant's keys and uploads from now on; streams that run end normally."""
    _check_not_own(call)
    return TenantView.of(await tenants.disable_tenant(call.services.db, call.tenant.name, actor=call.actor))


@operation("POST", "/tenants/{tenant}/enable", Permission.OPERATE)
async def enable_tenant(call: Call) -> TenantView:
    """Take a disabled tenant's keys and uploads again."""
    return TenantView.of(await tenants.enable_tenant(call.services.db, call.tenant.name, actor=call.actor))


@operation("DELETE", "/tenants/{tenant}", Permission.OPERATE)
async def delete_tenant(call: Call) -> TenantView:
    """Delete a tenant with its keys and adapters.

    Nothing is erased and the name stays taken, so that it can be restored.
    """
    _check_not_own(call)
    return TenantView.of(await tenants.delete_tenant(call.services.db, call.tenant.name, actor=call.actor))


@operation("POST", "/tenants/{tenant}/restore", Permission.OPERATE)
async def restore_tenant(call: Call) -> TenantView:
    """Bring a deleted tenant back as it was."""
    return TenantView.of(await tenants.restore_tenant(call.services.db, call.tenant.name, actor=call.actor))


@operation("POST", "/tenants/{tenant}/purge", Permission.OPERATE)
async def purge_tenant(call: Call, body: Purge) -> Purged:
    """Erase a deleted tenant for good: adapters, keys, people, alerts, single requests.

    Its name is free again. The audit log stays and so do the sums of its usage, with pseudonyms for names and people.
    """
    _check_not_own(call)
    if body.confirm != call.tenant.name:
        raise InvalidRequestError("confirm: is not the tenant's name", param="confirm")
    erased = await erasure.purge_tenant(call.services.db, call.tenant.name, actor=call.actor)
    await call.services.engine.forget(await out_of_use(call.services.db, erased.digests))
    return msgspec.convert(erased, Purged, from_attributes=True)


def _check_not_own(call: Call) -> None:
    """An operator does not lock itself out by a slip; the command on the server can. Raises :class:`ConflictError`."""
    if call.tenant.id == call.actor.tenant_id:
        raise ConflictError("tenant: is the one of the key that asks", param="tenant")


OPERATIONS = (
    get_me,
    list_tenants,
    create_tenant,
    get_tenant,
    change_tenant,
    get_quota,
    disable_tenant,
    enable_tenant,
    delete_tenant,
    restore_tenant,
    purge_tenant,
)
