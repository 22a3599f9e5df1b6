"""From a request's ``model`` to the digest that the engine knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from stencilpress.gateway.catalog.adapters import find_version
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.changes import CatalogCache, Changes
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


class Router:
    """Resolves model names for one served base, remembering answers as long as ``changes`` vouches for them."""

    def __init__(self, db: Database, base: BaseNames, changes: Changes) -> None:
        self.base = base
        self._db = db
        self._changes = changes
        self._known: CatalogCache[tuple[int, ModelRef], Route] = CatalogCache(changes, CACHE_ENTRIES)
        self._looking: WeakValueDictionary[tuple[int, ModelRef], asyncio.Lock] = WeakValueDictionary()

    async def resolve(self, tenant_id: int, model: str) -> Route:
        """Raises :class:`ModelNotFoundError`, the same for unknown, malformed and foreign names, or
        :class:`UnavailableError`.
        """
        ref = parse_model(model, self.base)
        if not ref.adapter:
            return Route("", self.base.id)
        route = self._known.get((tenant_id, ref))
        if route is None:
            async with self._looking.setdefault((tenant_id, ref), asyncio.Lock()):  # one query for a burst of requests
                route = self._known.get((tenant_id, ref)) or await self._look_up(tenant_id, ref, model)
        return route

    async def _look_up(self, tenant_id: int, ref: ModelRef, model: str) -> Route:
        seen = self._changes.seen
        version = await find_version(self._db, tenant_id, ref.adapter, number=ref.version, alias=ref.alias)
        if version is None or version.base_id != self.base.id:
            raise ModelNotFoundError(model)
        route = Route(version.digest, version.ref, version.adapter, version.number)
        self._known.put((tenant_id, ref), tenant_id, seen, route)
        return route
