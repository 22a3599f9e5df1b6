"""API keys of a tenant."""

from __future__ import annotations

from datetime import datetime, timedelta

from stencilpress.gateway import keys
from stencilpress.gateway.access import Permission, Scopes
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.api.admin.views import IssuedKeyView, KeyChanges, KeyView, NewKey, Rotation, given
from stencilpress.gateway.catalog import credentials


@operation("GET", "/tenants/{tenant}/keys", Permission.READ)
async def list_keys(call: Call, query: PageQuery) -> Page[KeyView]:
    """A tenant's keys, newest first, revoked ones included."""
    found = await credentials.list_keys(
        call.services.db,
        call.tenant.name,
        actor=call.actor,
        after=decode_cursor(query.after, tuple[datetime, str]),
        limit=query.limit + 1,
    )
    return paged(found, query.limit, lambda one: (one.created_at, one.public_id), KeyView.of)


@operation("POST", "/tenants/{tenant}/keys", Permission.WRITE, status=201)
async def create_key(call: Call, body: NewKey) -> IssuedKeyView:
    """Make a key; its token is shown this once.

    A key cannot grant more than it may do itself.
    """
    scopes = Scopes(*(None if names is None else tuple(names) for names in (body.models, body.routes)))
    issued = await keys.issue_key(
        call.services.db,
        call.tenant.name,
        body.label,
        body.expires_at,
        role=body.role,
        scopes=scopes,
        actor=call.actor,
    )
    return IssuedKeyView.of_issued(issued)


@operation("GET", "/tenants/{tenant}/keys/{key}", Permission.READ)
async def get_key(call: Call) -> KeyView:
    """One key, without its secret."""
    return KeyView.of(await credentials.get_key(call.services.db, call.path("key"), call.tenant.name, actor=call.actor))


@operation("PATCH", "/tenants/{tenant}/keys/{key}", Permission.WRITE)
async def change_key(call: Call, body: KeyChanges) -> KeyView:
    """Change a key's label, expiry or scopes."""
    changed = await keys.change_key(call.services.db, call.path("key"), given(body), call.tenant.name, actor=call.actor)
    return KeyView.of(changed)


@operation("POST", "/tenants/{tenant}/keys/{key}/rotate", Permission.WRITE)
async def rotate_key(call: Call, body: Rotation) -> IssuedKeyView:
    """Give a key a new secret, shown this once.

    The old secret is taken as well for `overlap_s`; of several rotations only the last one's.
    """
    issued = await keys.rotate_key(
        call.services.db, call.path("key"), timedelta(seconds=body.overlap_s), call.tenant.name, actor=call.actor
    )
    return IssuedKeyView.of_issued(issued)


@operation("DELETE", "/tenants/{tenant}/keys/{key}", Permission.WRITE)
async def revoke_key(call: Call) -> KeyView:
    """Refuse a key from now on, on every gateway within a second."""
    return KeyView.of(
        await credentials.revoke_key(call.services.db, call.path("key"), call.tenant.name, actor=call.actor)
    )


OPERATIONS = (list_keys, create_key, get_key, change_key, rotate_key, revoke_key)
