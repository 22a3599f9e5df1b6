"""Runs an operation: who asks, for which tenant, may they, with what; then the handler; then the answer as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from stencilpress.gateway.access import Actor, Permission, Role, check_permission
from stencilpress.gateway.api.admin.operation import JSON, Call, Operation
from stencilpress.gateway.api.admin.tables import csv_response, wants_csv
from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.schemas import validation_error
from stencilpress.gateway.catalog.records import Tenant
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.errors import InvalidRequestError, NotFoundError, UnavailableError
from stencilpress.gateway.keys import Principal
from stencilpress.gateway.middleware import REQUEST_ID, authenticate
from stencilpress.gateway.services import SERVICES, Services

FIRST_YEAR, LAST_YEAR = 1970, 9000
"""Of instants and days that somebody may name."""
NOT_FOUND = "There is nothing here by this name, or it is not yours."


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks for an operation, and whom the audit log names for it."""

    principal: Principal
    actor: Actor
    again: Callable[[], Awaitable[object]]
    """Looks anew whether there still is somebody who asks, for answers that go on. Raises
    :class:`AuthenticationError`, :class:`PermissionDeniedError`, :class:`UnavailableError`."""


async def ask_by_key(request: web.Request) -> Asker:
    """Whoever shows a key. Raises as :func:`authenticate` does."""
    principal = await authenticate(request)
    return Asker(principal, actor_of(request, principal), partial(authenticate, request))


def handler_of(operation: Operation, who: Callable[[web.Request], Awaitable[Asker]] = ask_by_key) -> Handler:
    """The aiohttp handler that runs an operation for ``who`` asks."""

    async def handle(request: web.Request) -> web.StreamResponse:
        asker = await who(request)
        if operation.method != "GET" and not operation.accepts:  # files have limits of their own
            services = request.app[SERVICES]
            services.change_limit.admit(asker.principal.tenant_id, asker.principal.role)
        answer = await perform(operation, request, asker, request.match_info, lambda: _read_given(operation, request))
        if isinstance(answer, web.StreamResponse):
            return answer
        if operation.table is not None and wants_csv(request):
            return csv_response(operation.table(answer))
        headers = {"Cache-Control": "no-store"}
        body = msgspec.json.encode(answer)
        return web.Response(status=operation.status, body=body, content_type=JSON, headers=headers)

    return handle


async def perform(
    operation: Operation,
    request: web.Request,
    asker: Asker,
    parts: Mapping[str, str],
    read: Callable[[], Awaitable[dict[str, Any]]],
) -> Any:
    """Run an operation. ``parts`` are those of its path; ``read`` gives its query and body once it is clear that the
    asker may ask.

    Raises :class:`NotFoundError`, the same for what is another's and what does not exist,
    :class:`PermissionDeniedError`, and whatever the operation does.
    """
    services, principal = request.app[SERVICES], asker.principal
    try:
        tenant = None
        if "{tenant}" in operation.path:
            tenant = await find_tenant(services, principal, parts["tenant"], operation.needs)
        check_permission(principal.role, operation.needs)
        check_adapter(asker.actor, parts.get("adapter"))
        given = await read()
        for struct in given.values():
            _check_values(struct)
        call = Call(request, services, asker.actor, principal.tenant, tenant, parts, asker.again)
        answer = await operation.handler(call, **given)
    except NotFoundError:
        if principal.role is Role.OPERATOR:
            raise
        raise NotFoundError(NOT_FOUND) from None
    if operation.method != "GET":
        with suppress(UnavailableError):  # the change is made; without an answer nothing is taken from memory anyway
            await services.changes.poll()
    return answer


async def find_tenant(services: Services, principal: Principal, name: str, needs: Permission) -> Tenant:
    """Before anything else is looked at: of a foreign tenant nobody learns anything, not even that a right is lacking.

    Raises :class:`NotFoundError`.
    """
    is_operator = principal.role is Role.OPERATOR
    if not is_operator and name != principal.tenant:
        raise NotFoundError(NOT_FOUND)
    return await get_tenant(services.db, name, deleted=is_operator and needs is Permission.OPERATE)


def check_adapter(actor: Actor, adapter: str | None) -> None:
    """Whether the asker's scopes allow an adapter; None is none. One that they do not does not exist for it.

    Raises :class:`NotFoundError`.
    """
    if adapter is not None and not actor.scopes.allows_model(adapter):
        raise NotFoundError(NOT_FOUND)


async def _read_given(operation: Operation, request: web.Request) -> dict[str, Any]:
    """What a request gives an operation. Raises :class:`InvalidRequestError`, :class:`RequestTooLargeError`."""
    given: dict[str, Any] = {}
    if operation.query is not None:
        given["query"] = read_query(request, operation.query)
    elif request.query:
        raise _unknown_parameter(next(iter(request.query)))
    if operation.body is not None:
        given["body"] = decode_body(await read_body(request, request.app[SERVICES].settings), operation.body)
    return given


def actor_of(request: web.Request, principal: Principal) -> Actor:
    """Whom the audit log names for a request."""
    return Actor(
        name=f"key:{principal.key_id}",
        role=principal.role,
        tenant_id=principal.tenant_id,
        scopes=principal.scopes,
        source=request.remote or "",
        request_id=request[REQUEST_ID],
    )


def decode_body(body: bytes, kind: type[Any]) -> Any:
    """The struct in a JSON body. Raises :class:`InvalidRequestError` naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequestError("The body is not valid JSON.", code="invalid_json") from None


def read_query(request: web.Request, kind: type[Any]) -> Any:
    """The struct in a request's query string. Raises :class:`InvalidRequestError` naming the parameter."""
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given:
            raise InvalidRequestError(f"{name[:64]}: is given twice", param=name[:64])
        given[name] = value
    unknown = given.keys() - set(kind.__struct_fields__)
    if unknown:
        raise _unknown_parameter(min(unknown))
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None


def _check_values(given: Any) -> None:
    """Whether a struct's times can be reckoned with (a month more or less must not leave the calendar), and its texts
    be stored by every database.

    Raises :class:`InvalidRequestError`.
    """
    for name in given.__struct_fields__ if isinstance(given, msgspec.Struct) else ():
        value = getattr(given, name)
        if isinstance(value, date) and not FIRST_YEAR <= value.year <= LAST_YEAR:  # a datetime is one, too
            raise InvalidRequestError(f"{name}: is not between the years {FIRST_YEAR} and {LAST_YEAR}", param=name)
        if isinstance(value, str) and "\0" in value:
            raise InvalidRequestError(f"{name}: must not hold the character NUL", param=name)


def _unknown_parameter(name: str) -> InvalidRequestError:
    shown = name[:64]
    return InvalidRequestError(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
