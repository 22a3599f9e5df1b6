"""What the operations on adapters share."""

from __future__ import annotations

import re

from stencilpress.gateway.api.admin.operation import Call
from stencilpress.gateway.catalog.records import Expected
from stencilpress.gateway.errors import InvalidRequestError, NotFoundError, UnavailableError
from stencilpress.gateway.lifecycle.desk import AdapterDesk

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_ETAG = re.compile(r'"([0-9]{1,18})"')


def desk_of(call: Call) -> AdapterDesk:
    """Raises :class:`UnavailableError` on a gateway that has no folder of adapters."""
    if call.services.desk is None:
        raise UnavailableError("This gateway has no folder of adapters (STENCILPRESS_ADAPTERS_DIR).")
    return call.services.desk


def number_of(call: Call) -> int:
    """The version of the path. Raises :class:`NotFoundError`: what is no number is a version that does not exist."""
    text = call.path("version")
    if not _NUMBER.fullmatch(text):
        raise NotFoundError(f"version: {text[:64]!r} does not exist", param="version")
    return int(text)


def expectation(call: Call, expected_version: int | None, expected_etag: str | None = None) -> Expected:
    """What a body and the headers ``If-Match`` and ``If-None-Match`` expect of an alias; the header goes first.

    Raises :class:`InvalidRequestError` for a header that is no etag of ours.
    """
    headers = call.request.headers
    if headers.get("If-None-Match") == "*":
        return Expected(version=0)
    text = headers.get("If-Match", expected_etag)
    if text is None:
        return Expected(version=expected_version)
    match = _ETAG.fullmatch(text)
    if match is None:
        raise InvalidRequestError("If-Match: expected the alias's etag, in its quotes", param="If-Match")
    return Expected(version=expected_version, move_id=int(match[1]))
