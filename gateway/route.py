"""From a request's ``model`` to the digest that the engine knows."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from weakref import WeakValueDictionary

from stencilpress.gateway.catalog.adapters import find_target
from stencilpress.gateway.catalog.records import Resolved, Version
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.changes import CatalogCache, Changes
from stencilpress.gateway.defaults import NO_DEFAULTS, VersionDefaults
from stencilpress.gateway.errors import ModelNotFoundError
from stencilpress.gateway.names import BaseNames, ModelRef, parse_model

CACHE_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. ``digest``, ``adapter`` are "" and ``version`` 0 for the base alone.

    ``echo`` is the ``model`` of the answer: the base's id, or the resolved ``name@3``.
    """

    digest: str
    echo: str
    adapter: str = ""
    version: int = 0
    defaults: VersionDefaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class _Choice:
    """The route of a name, and the one that ``percent`` of its users get while there is a canary."""

    stable: Route
    canary: Route | None
    percent: int
    seed: str

    def of(self, user: str) -> Route:
        if self.canary is None or not takes_canary(self.seed, user, self.percent):
            return self.stable
        return self.canary


def takes_canary(seed: str, user: str, percent: int) -> bool:
    """Whether a user is among the ``percent``. Who is in stays in when the share grows; each seed asks others first."""
    digest = hashlib.blake2b(f"{seed}/{user}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < percent * 2**64 // 100


class Router:
    """Resolves model names for one served base, remembering answers as long as ``changes`` vouches for them."""

    def __init__(self, db: Database, base: BaseNames, changes: Changes) -> None:
        self.base = base
        self._db = db
        self._changes = changes
        self._known: CatalogCache[tuple[int, ModelRef], _Choice] = CatalogCache(changes, CACHE_ENTRIES)
        self._looking: WeakValueDictionary[tuple[int, ModelRef], asyncio.Lock] = WeakValueDictionary()

    async def resolve(self, tenant_id: int, model: str, user: str = "") -> Route:
        """The version that ``user`` gets: with a canary always the same one.

        Raises :class:`ModelNotFoundError`, the same for unknown, malformed and foreign names, or
        :class:`UnavailableError`.
        """
        ref = parse_model(model, self.base)
        if not ref.adapter:
            return Route("", self.base.id)
        choice = self._known.get((tenant_id, ref))
        if choice is None:
            async with self._looking.setdefault((tenant_id, ref), asyncio.Lock()):  # one query for a burst of requests
                choice = self._known.get((tenant_id, ref)) or await self._look_up(tenant_id, ref, model)
        return choice.of(user)

    async def _look_up(self, tenant_id: int, ref: ModelRef, model: str) -> _Choice:
        seen = self._changes.seen
        target = await find_target(self._db, tenant_id, ref.adapter, number=ref.version, alias=ref.alias)
        if target is None or target.version.base_id != self.base.id:
            raise ModelNotFoundError(model)
        choice = _choice(target, ref, self.base.id)
        self._known.put((tenant_id, ref), target.owner_id, seen, choice)  # what its owner changes counts, guest or not
        return choice


def _choice(target: Resolved, ref: ModelRef, base_id: str) -> _Choice:
    canary = target.canary if target.canary is not None and target.canary.base_id == base_id else None
    seed = f"{target.adapter_id}/{ref.alias}/{canary.number}" if canary is not None else ""
    return _Choice(_route(target.version), _route(canary) if canary is not None else None, target.percent, seed)


def _route(version: Version) -> Route:
    return Route(version.digest, version.ref, version.adapter, version.number, version.defaults)
