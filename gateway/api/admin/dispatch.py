"""Runs an operation: who asks, for which tenant, may they, with what; then the handler; then the answer as JSON."""

from __future__ import annotations

from contextlib import suppress
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

NOT_FOUND = "There is nothing here by this name, or it is not yours."


def handler_of(operation: Operation) -> Handler:
    """The aiohttp handler that runs an operation."""

    async def handle(request: web.Request) -> web.StreamResponse:
        principal = await authenticate(request)
        try:
            return await _run(operation, request, principal)
        except NotFoundError:
            if principal.role is Role.OPERATOR:
                raise
            raise NotFoundError(NOT_FOUND) from None  # the same for what is another's and what does not exist

    return handle


async def _run(operation: Operation, request: web.Request, principal: Principal) -> web.StreamResponse:
    services = request.app[SERVICES]
    tenant = await _tenant_of_path(operation, request, services, principal)
    check_permission(principal.role, operation.needs)
    given: dict[str, Any] = {}
    if operation.query is not None:
        given["query"] = read_query(request, operation.query)
    elif request.query:
        raise _unknown_parameter(next(iter(request.query)))
    if operation.body is not None:
        given["body"] = decode_body(await read_body(request, services.settings), operation.body)
    call = Call(request, services, actor_of(request, principal), principal.tenant, tenant)
    answer = await operation.handler(call, **given)
    if operation.method != "GET":
        with suppress(UnavailableError):  # the change is made; without an answer nothing is taken from memory anyway
            await services.changes.poll()
    if isinstance(answer, web.StreamResponse):
        return answer
    if operation.table is not None and wants_csv(request, given.get("query")):
        return csv_response(operation.table(answer))
    headers = {"Cache-Control": "no-store"}
    return web.Response(status=operation.status, body=msgspec.json.encode(answer), content_type=JSON, headers=headers)


async def _tenant_of_path(
    operation: Operation, request: web.Request, services: Services, principal: Principal
) -> Tenant | None:
    """Before anything else is looked at: of a foreign tenant a key learns nothing, not even that it lacks a right.

    Raises :class:`NotFoundError`.
    """
    if "{tenant}" not in operation.path:
        return None
    name, is_operator = request.match_info["tenant"], principal.role is Role.OPERATOR
    if not is_operator and name != principal.tenant:
        raise NotFoundError(NOT_FOUND)
    return await get_tenant(services.db, name, deleted=is_operator and operation.needs is Permission.OPERATE)


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


def _unknown_parameter(name: str) -> InvalidRequestError:
    shown = name[:64]
    return InvalidRequestError(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
