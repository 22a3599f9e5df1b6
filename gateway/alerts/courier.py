"""Carries one notification to its receiver, within a time, following nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from stencilpress import __version__
from stencilpress.gateway.alerts.addresses import ForbiddenAddressError, PublicResolver, check_url
from stencilpress.gateway.alerts.notification import signed
from stencilpress.gateway.errors import InvalidRequestError

LIMIT_S = 10.0
"""For all of it: name, connection, answer."""


class Courier:
    """Connections to webhooks. Those of tenants go to public addresses, unless the operator allows others."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._inside = self._session(None)
        self._outside = self._session(None if private else PublicResolver())

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, trusted: bool = False) -> str:
        """Send; the answer's body is not read. Returns "" if it was taken (2xx), else why not, in few words.

        ``trusted`` is the operator's own webhook, which may be anywhere.
        """
        anywhere = trusted or self._private
        try:
            checked = check_url(url, private=anywhere)
            return await self._post(self._inside if anywhere else self._outside, checked, body, headers)
        except InvalidRequestError as error:
            return error.message
        except TimeoutError:
            return f"no answer within {LIMIT_S:g} s"
        except aiohttp.ClientConnectorCertificateError:
            return "its certificate is not valid"
        except (aiohttp.ClientError, OSError) as error:
            return _reason(error)

    async def close(self) -> None:
        await self._inside.close()
        await self._outside.close()

    async def __aenter__(self) -> Courier:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @staticmethod
    async def _post(session: aiohttp.ClientSession, url: URL, body: bytes, headers: Mapping[str, str]) -> str:
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
            answer.close()
            return "" if 200 <= answer.status < 300 else f"HTTP status {answer.status}"

    @staticmethod
    def _session(resolver: PublicResolver | None) -> aiohttp.ClientSession:
        # A connection is never kept: what was checked must be what is used, and messages are rare.
        connector = aiohttp.TCPConnector(resolver=resolver, force_close=True, use_dns_cache=False)
        headers = {"Content-Type": "application/json", "User-Agent": f"stencilpress/{__version__}"}
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        return aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        )


async def send(courier: Courier, url: str, secret: str, message_id: str, message: Any, *, trusted: bool) -> str:
    """Sign and post one message; "" or why it was not taken."""
    body = msgspec.json.encode(message)
    return await courier.post(url, body, signed(secret, message_id, datetime.now(UTC), body), trusted=trusted)


def _reason(error: BaseException) -> str:
    """Nothing of what the address answered: it may be none of the sender's business."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ForbiddenAddressError):
            return "its name stands for an address inside this network"
        cause = cause.__cause__
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "it cannot be reached"
    return "the connection broke"
