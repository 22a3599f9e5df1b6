"""The adapters of all tenants, for operators."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.catalog.adapter_lists import Listed, Sort, list_all_adapters


class AllAdaptersQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: Annotated[str, Meta(max_length=64, description="Only tenants whose names begin so.")] = ""
    name: Annotated[str, Meta(max_length=64, description="Only adapters whose names begin so.")] = ""
    sort: Annotated[Sort, Meta(description="By tenant and name, by name, or the newest first.")] = "tenant"
    deleted: Annotated[bool, Meta(description="Deleted adapters too.")] = False


class ListedAdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter in short. `newest` is its newest version, to which `digest` and what follows belong."""

    tenant: str
    name: str
    created_at: datetime
    deleted_at: datetime | None
    versions: int
    newest: int | None
    digest: str | None
    ranks: list[int]
    target_modules: list[str]
    size_bytes: int
    aliases: dict[str, int]

    @classmethod
    def of(cls, one: Listed) -> ListedAdapterView:
        return msgspec.convert(one, cls, from_attributes=True)


@operation("GET", "/adapters", Permission.OPERATE)
async def list_every_adapter(call: Call, query: AllAdaptersQuery) -> Page[ListedAdapterView]:
    """The adapters of all tenants, in short."""
    found = await list_all_adapters(
        call.services.db,
        tenant=query.tenant,
        name=query.name,
        sort=query.sort,
        deleted=query.deleted,
        after=decode_cursor(query.after, tuple[str, str, int]),
        limit=query.limit + 1,
    )
    return paged(found, query.limit, lambda one: one.position, ListedAdapterView.of)


OPERATIONS = (list_every_adapter,)
