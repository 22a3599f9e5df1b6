"""What one operation of the admin API is: a handler with all that its route and its documentation need.

An operation is a function of a :class:`Call` and, as it needs them, ``body`` and ``query``, structs whose annotations
are the schema::

    @operation("POST", "/tenants/{tenant}/keys", Permission.WRITE, status=201)
    async def create_key(call: Call, body: NewKey) -> IssuedKeyView:
        \"\"\"Make a key; its token is shown this once.\"\"\"

A path that has ``{tenant}`` is answered only for tenants that the key may know of. What a handler returns is sent as
JSON; a response of its own is sent as it is.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import msgspec
from aiohttp import web
from msgspec import Meta

from stencilpress.gateway.access import Actor, Permission
from stencilpress.gateway.api.admin.tables import Table
from stencilpress.gateway.catalog.records import Tenant
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.services import Services

JSON = "application/json"
DEFAULT_PAGE = 50
MAX_PAGE = 200

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the admin API that has passed authentication and the permission check."""

    request: web.Request
    services: Services
    actor: Actor
    own_tenant: str
    """The name of the key's tenant."""
    path_tenant: Tenant | None
    """The tenant of the path, if it has one."""
    parts: Mapping[str, str]
    """The other parts of the path, decoded, by their names in the pattern."""
    again: Callable[[], Awaitable[object]]
    """Looks anew whether whoever asked still may, as :class:`~stencilpress.gateway.api.admin.dispatch.Asker` has it."""

    @property
    def tenant(self) -> Tenant:
        """The tenant of the path. Raises :class:`RuntimeError` in an operation whose path has none."""
        if self.path_tenant is None:
            raise RuntimeError("the operation's path has no tenant")
        return self.path_tenant

    def path(self, name: str) -> str:
        """A part of the path, decoded."""
        return self.parts[name]


@dataclass(frozen=True, slots=True)
class Operation:
    """One verb of the admin API."""

    method: str
    path: str
    """Below ``/admin/api/v1``."""
    needs: Permission
    status: int
    handler: Handler
    body: type[Any] | None
    query: type[Any] | None
    answer: Any
    accepts: tuple[str, ...]
    """Media types of a body that the handler reads by itself."""
    produces: str
    table: Callable[[Any], Table] | None
    """Makes CSV of the answer for those who ask for it."""

    @property
    def id(self) -> str:
        return self.handler.__name__

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.handler) or "").partition("\n")[0]

    @property
    def description(self) -> str:
        return (inspect.getdoc(self.handler) or "").partition("\n")[2].strip()


def operation(
    method: str,
    path: str,
    needs: Permission,
    *,
    status: int = 200,
    accepts: Sequence[str] = (),
    produces: str = JSON,
    table: Callable[[Any], Table] | None = None,
) -> Callable[[Handler], Operation]:
    """Make an operation of a handler; its ``body``, ``query`` and answer are read off its annotations."""

    def make(handler: Handler) -> Operation:
        hints = get_type_hints(handler, include_extras=True)
        return Operation(
            method,
            path,
            needs,
            status,
            handler,
            hints.get("body"),
            hints.get("query"),
            hints["return"],
            tuple(accepts),
            produces,
            table,
        )

    return make


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of a list. ``next`` goes into ``after`` to get the following one; null at the end."""

    data: list[T]
    next: str | None


class PageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every list takes."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Items of the page.")] = DEFAULT_PAGE
    after: Annotated[str, Meta(max_length=400, description="`next` of the page before.")] = ""


def paged(items: Sequence[Any], limit: int, position: Callable[[Any], Any], view: Callable[[Any], T]) -> Page[T]:
    """The page of ``limit`` items out of up to ``limit + 1`` that were asked for; ``position`` is where one stands."""
    shown = items[:limit]
    more = len(items) > limit
    return Page([view(item) for item in shown], encode_cursor(position(shown[-1])) if more else None)


def encode_cursor(position: Any) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_cursor(cursor: str, kind: type[T]) -> T | None:
    """The position that a page ended at, None for the first page. Raises :class:`InvalidRequestError`."""
    if not cursor:
        return None
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=kind)
    except (ValueError, msgspec.MsgspecError):
        raise InvalidRequestError("after: is no cursor of this list", param="after") from None
