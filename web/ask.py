"""Running an operation of the admin API for the visitor: pages have no logic of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from stencilpress.gateway.api.admin.dispatch import Asker, perform
from stencilpress.gateway.api.admin.operation import Operation
from stencilpress.gateway.api.schemas import validation_error
from stencilpress.web.visitor import actor_of, caller_again, principal_of

Given = msgspec.Struct | Mapping[str, Any] | None


async def ask(
    request: web.Request,
    operation: Operation,
    *,
    tenant: str | None = None,
    body: Given = None,
    query: Given = None,
    **path: str,
) -> Any:
    """The answer of an operation to whoever is signed in; ``path`` has the other parts of its path.

    ``body`` and ``query`` are the operation's structs or what makes them; ``query`` may be left out. Raises the
    operation's :class:`ApiError`, :class:`PermissionDeniedError`, :class:`NotFoundError`.
    """

    async def read() -> dict[str, Any]:
        given: dict[str, Any] = {}
        if operation.query is not None:
            given["query"] = _struct(query, operation.query)
        if operation.body is not None:
            given["body"] = _struct(body, operation.body)
        return given

    parts = {**path, **({} if tenant is None else {"tenant": tenant})}
    return await perform(operation, request, await ask_by_session(request), parts, read)


async def ask_by_session(request: web.Request) -> Asker:
    """Whoever is signed in. Raises :class:`SignedOutError`."""
    return Asker(principal_of(request), actor_of(request), partial(caller_again, request))


def _struct(given: Given, kind: type[Any]) -> Any:
    if isinstance(given, msgspec.Struct):
        return given
    try:
        return msgspec.convert(given or {}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
