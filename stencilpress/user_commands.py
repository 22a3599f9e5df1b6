"""``stencilpress user``: people who sign in to the console. A user is named by the e-mail address."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click

from stencilpress.commands import F, Place, json_option, operator_here, place_options, setting, show, tell, with_catalog

if TYPE_CHECKING:
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.catalog.users import User

ROLES = ("operator", "admin", "viewer")
DEFAULT_URL = "http://127.0.0.1:8000"
_COLUMNS = ("email", "tenant", "role", "created_at", "disabled_at", "has_password", "id")
_email = click.argument("email", metavar="EMAIL")
_role = click.Choice(ROLES)


@click.group()
def user() -> None:
    """People who sign in to the console."""


def _console_url(command: F) -> F:
    text = "Where browsers find the server, for the link."
    return setting("--console-url", default=DEFAULT_URL, show_default=True, help=text)(command)


@user.command("add")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@_email
@click.option("--role", type=_role, default="viewer", show_default=True, help="What the person may do.")
@_console_url
@json_option
def user_add(place: Place, tenant_name: str, email: str, role: str, console_url: str, as_json: bool) -> None:
    """Add a user and print the link that sets the password, once, within a week."""
    from stencilpress.gateway.access import Role
    from stencilpress.gateway.accounts.links import invite

    made, path = with_catalog(place, lambda db: invite(db, tenant_name, email, Role(role), actor=operator_here()))
    _tell_link(made, console_url + path, as_json)


@user.command("list")
@place_options
@click.option("--tenant", "tenant_name", metavar="NAME", help="Only this tenant's.")
@json_option
def user_list(place: Place, tenant_name: str | None, as_json: bool) -> None:
    """List users by e-mail address."""
    from stencilpress.gateway.catalog.users import list_users

    found = with_catalog(place, lambda db: list_users(db, tenant_name, actor=operator_here()))
    show([_fields(one) for one in found], as_json, _COLUMNS)


@user.command("disable")
@place_options
@_email
@json_option
def user_disable(place: Place, email: str, as_json: bool) -> None:
    """Refuse a user from now on; sessions end within a second."""
    from stencilpress.gateway.catalog.users import disable_user

    one = _with_user(place, email, lambda db, found: disable_user(db, found.public_id, actor=operator_here()))
    tell(f"disabled {one.email}", _fields(one), as_json)


@user.command("enable")
@place_options
@_email
@json_option
def user_enable(place: Place, email: str, as_json: bool) -> None:
    """Let a disabled user sign in again."""
    from stencilpress.gateway.catalog.users import enable_user

    one = _with_user(place, email, lambda db, found: enable_user(db, found.public_id, actor=operator_here()))
    tell(f"enabled {one.email}", _fields(one), as_json)


@user.command("reset")
@place_options
@_email
@_console_url
@json_option
def user_reset(place: Place, email: str, console_url: str, as_json: bool) -> None:
    """Print a link that sets a new password, once, within a day. The old one works until then."""
    from stencilpress.gateway.accounts.links import reset_link

    one, path = _with_user(place, email, lambda db, found: reset_link(db, found.public_id, actor=operator_here()))
    _tell_link(one, console_url + path, as_json)


@user.command("role")
@place_options
@_email
@click.argument("role", type=_role)
@json_option
def user_role(place: Place, email: str, role: str, as_json: bool) -> None:
    """Give a user another role; sessions end within a second."""
    from stencilpress.gateway.access import Role
    from stencilpress.gateway.catalog.users import change_role

    one = _with_user(
        place, email, lambda db, found: change_role(db, found.public_id, Role(role), actor=operator_here())
    )
    tell(f"{one.email} now has the role {one.role}", _fields(one), as_json)


def _with_user(place: Place, email: str, work: Callable[[Database, User], Coroutine[Any, Any, Any]]) -> Any:
    """Run one piece of work on the user with this address."""
    from stencilpress.gateway.catalog.users import find_account
    from stencilpress.gateway.errors import NotFoundError

    async def run(db: Database) -> Any:
        account = await find_account(db, email=email)
        if account is None:
            raise NotFoundError(f"user: {email!r} does not exist", param="user")
        return await work(db, account.user)

    return with_catalog(place, run)


def _tell_link(one: User, link: str, as_json: bool) -> None:
    tell(link, {**_fields(one), "link": link}, as_json)


def _fields(one: User) -> dict[str, Any]:
    return {
        "id": one.public_id,
        "email": one.email,
        "tenant": one.tenant,
        "role": one.role.value,
        "created_at": one.created_at,
        "disabled_at": one.disabled_at,
        "has_password": one.has_password,
    }
