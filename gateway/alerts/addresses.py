"""Which addresses a tenant's webhook may have: none inside. A server that calls what it is told would otherwise be a
way into the operator's own network (SSRF).

The name is resolved once, by the resolver that the connection then uses, so that a second answer cannot differ from
the one that was checked; addresses that are written out are checked before.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from stencilpress.gateway.errors import InvalidRequestError

MAX_URL_CHARS = 2000
_NAT64 = IPv6Network("64:ff9b::/96")
_UNICAST = IPv6Network("2000::/3")
"""All that has been given out. Outside lie older ways to write an IPv4 address (``::127.0.0.1``), a network's own NAT64
(``64:ff9b:1::/48``) and site-local addresses, which the standard library takes for global ones."""
_IETF = IPv4Network("192.0.0.0/24")
"""For protocols alone (RFC 6890); not all versions of the standard library know."""


class ForbiddenAddressError(OSError):
    """A name stands for an address inside. An ``OSError``, as other failures to resolve are."""


def check_url(text: str, *, private: bool) -> URL:
    """The URL of a webhook. ``private`` allows addresses inside. Raises :class:`InvalidRequestError`."""
    if not 0 < len(text) <= MAX_URL_CHARS or any(not "!" <= c <= "~" or c == "\\" for c in text):
        raise _bad(f"must be 1 to {MAX_URL_CHARS} printable ASCII characters, without spaces or backslashes")
    try:
        url = URL(text)
        host = url.host
    except ValueError:
        raise _bad("is no URL such as https://hooks.example/alerts") from None
    if url.scheme not in ("http", "https") or not host:
        raise _bad("is no URL such as https://hooks.example/alerts")
    if url.user is not None or url.password is not None:
        raise _bad("must not hold a user or a password; use a secret to sign what is sent")
    if not private and _is_written_out(host) and not is_public(host):
        raise _bad("is an address inside this network")
    return url


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, by what it stands for if it wraps another."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast and ip not in _IETF
    if ip.ipv4_mapped is not None:
        return is_public(str(ip.ipv4_mapped))
    inner = IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.sixtofour
    if inner is not None and not is_public(str(inner)):
        return False
    return ip.is_global and (ip in _UNICAST or ip in _NAT64)


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses alone."""

    def __init__(self) -> None:
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises :class:`ForbiddenAddressError` if any of the answers lies inside."""
        found = await self._system.resolve(host, port, family)
        if not all(is_public(one["host"]) for one in found):
            raise ForbiddenAddressError("the name stands for an address inside this network")
        return found

    async def close(self) -> None:
        await self._system.close()


def _is_written_out(host: str) -> bool:
    """An address, in any of the spellings that ``inet_aton`` takes: 127.1, 0x7f000001, 2130706433."""
    if ":" in host:
        return True
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True


def _bad(text: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: {text}", param="url")
