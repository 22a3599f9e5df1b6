"""The audit log."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from stencilpress.gateway.access import Permission, Role
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.api.admin.views import AuditView
from stencilpress.gateway.catalog import audit
from stencilpress.gateway.catalog.records import AuditEntry


class AuditQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Annotated[str, Meta(max_length=200, description="Only changes of this, such as `key:ab12cd34ef56`.")] = ""
    actor: Annotated[str, Meta(max_length=100, description="Only those of this actor, such as `user:a@b.example`.")] = (
        ""
    )
    action: Annotated[str, Meta(max_length=50, description="Only actions that begin so, such as `alias.`.")] = ""


@operation("GET", "/audit", Permission.OPERATE)
async def list_audit(call: Call, query: AuditQuery) -> Page[AuditView]:
    """Every change of the catalog, newest first."""
    return await _page(call, query, None)


@operation("GET", "/tenants/{tenant}/audit", Permission.READ)
async def list_tenant_audit(call: Call, query: AuditQuery) -> Page[AuditView]:
    """Every change of one tenant, its keys and its adapters, newest first."""
    return await _page(call, query, call.tenant.id)


async def _page(call: Call, query: AuditQuery, tenant_id: int | None) -> Page[AuditView]:
    operators = call.actor.role is Role.OPERATOR
    found = await audit.list_audit(
        call.services.db,
        tenant_id=tenant_id,
        target=query.target,
        actor=query.actor,
        action=query.action,
        before_id=decode_cursor(query.after, int),
        limit=query.limit + 1,
        operators=operators,
    )
    shown = found if operators else [_without_source(one) for one in found]
    return paged(shown, query.limit, lambda one: one.id, AuditView.of)


def _without_source(one: AuditEntry) -> AuditEntry:
    """Where operators are, and their servers' names, is not the tenants' business."""
    return replace(one, source="") if one.role == Role.OPERATOR.value else one


OPERATIONS = (list_audit, list_tenant_audit)
