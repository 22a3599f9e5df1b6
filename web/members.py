"""The people of a tenant: invite, change the role, disable, and links for a new password, each shown once."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from stencilpress.gateway.access import Permission, Role
from stencilpress.gateway.accounts.links import invite, reset_link
from stencilpress.gateway.catalog.account_models import MAX_EMAIL_CHARS
from stencilpress.gateway.catalog.users import User, change_role, disable_user, enable_user, list_users
from stencilpress.gateway.change_limit import INVITATION_COST
from stencilpress.gateway.errors import ApiError, ConflictError
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import PREFIX, of_tenant
from stencilpress.web.forms import Shown, errors_of, read_form, shown_again, to_struct
from stencilpress.web.page import page, redirect, render, tenant_of
from stencilpress.web.place import public_url
from stencilpress.web.visitor import actor_of, may_of, visitor_of

LIST = f"{PREFIX}/t/{{tenant}}/members"
MAX_SHOWN = 500


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """The form that invites somebody."""

    email: Annotated[str, Meta(max_length=MAX_EMAIL_CHARS)]
    role: Role = Role.VIEWER


class RoleChange(msgspec.Struct, frozen=True, kw_only=True):
    """The form that changes a role."""

    role: Role


@page(Permission.READ)
async def list_members(request: web.Request) -> web.StreamResponse:
    return await _list(request)


@page(Permission.WRITE)
async def invite_member(request: web.Request) -> web.StreamResponse:
    form, services = await read_form(request), request.app[SERVICES]
    try:
        body = to_struct(form, Invitation)
        visitor = visitor_of(request)
        services.change_limit.admit(visitor.tenant_id, visitor.role, INVITATION_COST)
        user, path = await invite(services.db, tenant_of(request).name, body.email, body.role, actor=actor_of(request))
    except ApiError as error:
        return await _list(request, error=error, form=shown_again(form))
    return await _list(request, issued=(user.email, public_url(request) + path), invited=True)


@page(Permission.WRITE)
async def make_reset_link(request: web.Request) -> web.StreamResponse:
    services, user_id = request.app[SERVICES], request.match_info["user"]
    user, path = await reset_link(services.db, user_id, tenant_of(request).name, actor=actor_of(request))
    return await _list(request, issued=(user.email, public_url(request) + path))


@page(Permission.WRITE)
async def set_role(request: web.Request) -> web.StreamResponse:
    user_id, services = _another(request), request.app[SERVICES]
    role = to_struct(await read_form(request), RoleChange).role
    user = await change_role(services.db, user_id, role, tenant_of(request).name, actor=actor_of(request))
    then = "" if user.has_password or user.oidc_subject else " Send a link for a new password."
    return await _done(request, f"{user.email} now has the role {user.role}.{then}")


@page(Permission.WRITE)
async def disable_member(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    user = await disable_user(services.db, _another(request), tenant_of(request).name, actor=actor_of(request))
    return await _done(request, f"{user.email} can no longer sign in.")


@page(Permission.WRITE)
async def enable_member(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    user = await enable_user(services.db, _another(request), tenant_of(request).name, actor=actor_of(request))
    return await _done(request, f"{user.email} can sign in again.")


def _another(request: web.Request) -> str:
    """The user of the path. Nobody locks themselves out by a slip. Raises :class:`ConflictError`."""
    user_id = request.match_info["user"]
    if user_id == visitor_of(request).user_id:
        raise ConflictError("This is your own account: ask somebody else to change it.", param="user")
    return user_id


async def _done(request: web.Request, text: str) -> web.Response:
    await request.app[SERVICES].changes.poll()
    return redirect(request, of_tenant(LIST, tenant_of(request).name), text)


async def _list(
    request: web.Request,
    *,
    issued: tuple[str, str] | None = None,
    invited: bool = False,
    error: ApiError | None = None,
    form: Shown | None = None,
) -> web.Response:
    """The page. ``issued`` is a link to show this once, with whom it is for."""
    tenant = tenant_of(request)
    users = await list_users(request.app[SERVICES].db, tenant.name, actor=actor_of(request), limit=MAX_SHOWN + 1)
    context: dict[str, Any] = {
        "users": users[:MAX_SHOWN],
        "more": len(users) > MAX_SHOWN,
        "states": {user.public_id: _state(user) for user in users},
        "roles": [role.value for role in may_of(request).grant if role is not Role.CALLER],
        "issued": issued,
        "invited": invited,
        "errors": errors_of(error),
        "form": form or Shown(),
    }
    return render(
        request,
        "accounts/members.html",
        title="Members",
        section="members",
        tenant=tenant.name,
        status=200 if error is None else error.status,
        **context,
    )


def _state(user: User) -> tuple[str, str]:
    """What the list says of a user, and the kind of chip."""
    if user.disabled_at is not None:
        return "disabled", "bad"
    if user.has_password or user.oidc_subject is not None:
        return "active", "ok"
    return "invited", "info"


ROUTES = (
    web.get(LIST, list_members),
    web.post(LIST, invite_member),
    web.post(f"{LIST}/{{user}}/role", set_role),
    web.post(f"{LIST}/{{user}}/disable", disable_member),
    web.post(f"{LIST}/{{user}}/enable", enable_member),
    web.post(f"{LIST}/{{user}}/reset", make_reset_link),
)
