"""Which adapters the engines keep at hand: those that the settings name, and those that operators have chosen.

A name stands for a version that may change: whenever something in the catalog has, the names are looked up again, and
the engines are told if others are meant now. Every gateway does so by itself; an engine keeps what any of them says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from stencilpress.engine.settings import PREFIX, SettingsError
from stencilpress.gateway.catalog.adapters import find_target
from stencilpress.gateway.catalog.kept import kept_versions
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.errors import ModelNotFoundError, NotFoundError, UnavailableError
from stencilpress.gateway.names import BaseNames, ModelRef, is_name, parse_model
from stencilpress.gateway.settings import GatewaySettings

RENEW_S = 0.5
"""How often it is looked whether the catalog has changed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptName:
    """``tenant/adapter``, ``tenant/adapter@alias`` or ``tenant/adapter@3``."""

    tenant: str
    model: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.model}"


def kept_names(setting: str, variable: str) -> tuple[KeptName, ...]:
    """The names of a setting, separated by commas. Raises :class:`SettingsError` naming the variable."""
    names = []
    for text in filter(None, map(str.strip, setting.split(","))):
        tenant, _, model = text.partition("/")
        try:
            adapter = parse_model(model, BaseNames.of(("-",))).adapter
        except ModelNotFoundError:
            adapter = ""
        if not is_name(tenant) or not adapter:
            raise SettingsError(f"{variable}: expected tenant/adapter or tenant/adapter@alias, got {text[:130]!r}")
        names.append(KeptName(tenant, model))
    return tuple(names)


def check_names(settings: GatewaySettings) -> None:
    """Raises :class:`SettingsError` for names that no adapter can have."""
    kept_names(settings.pin, f"{PREFIX}PIN")
    kept_names(settings.preload, f"{PREFIX}PRELOAD")


def keeper_of(settings: GatewaySettings, db: Database, engine: Engines, changes: Changes, base: BaseNames) -> Keeper:
    """With the names of the settings. Raises :class:`SettingsError`."""
    pin, preload = kept_names(settings.pin, f"{PREFIX}PIN"), kept_names(settings.preload, f"{PREFIX}PRELOAD")
    return Keeper(db, engine, changes, base, pin=pin, preload=preload)


class Keeper:
    """Tells ``engine`` what to pin and what to preload. ``pin`` and ``preload`` are the settings' names."""

    def __init__(
        self,
        db: Database,
        engine: Engines,
        changes: Changes,
        base: BaseNames,
        *,
        pin: Sequence[KeptName] = (),
        preload: Sequence[KeptName] = (),
    ) -> None:
        self._db = db
        self._engine = engine
        self._changes = changes
        self._base = base
        self._pin = pin
        self._preload = preload
        self._said: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._saying = asyncio.Lock()
        self._unknown: frozenset[KeptName] = frozenset()

    async def say(self, *, again: bool = True) -> None:
        """Look the names up and tell the engines; unless ``again`` only if others are meant than before.

        Said again, an adapter that had to go since it was preloaded is brought in once more. Raises
        :class:`UnavailableError`.
        """
        async with self._saying:
            meant = await self._meant()
            if not again and meant == self._said:
                return
            self._said = meant
            for kept in await self._engine.keep(*map(sorted, meant)):
                if kept is not None and kept.error:
                    logger.warning("an engine does not keep the adapters that it should: %s", kept.error)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Say it once, and after each change of the catalog while the block runs. Raises :class:`UnavailableError`."""
        seen = self._changes.seen
        await self.say(again=False)
        task = asyncio.create_task(self._follow(seen))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self, seen: int) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            newest = self._changes.seen
            if newest != seen:
                with suppress(UnavailableError):
                    await self.say(again=False)
                    seen = newest

    async def _meant(self) -> tuple[frozenset[str], frozenset[str]]:
        """The digests to be pinned, and those to be preloaded."""
        pinned, preloaded, unknown = set[str](), set[str](), set[KeptName]()
        for one in await kept_versions(self._db, self._base.id):
            (pinned if one.kept == "pin" else preloaded).add(one.digest)
        for names, digests in ((self._pin, pinned), (self._preload, preloaded)):
            for name in names:
                found = await self._digests(name)
                digests.update(found)
                if not found:
                    unknown.add(name)
        for text in sorted(map(str, unknown - self._unknown)):
            logger.warning("%s is to be kept at hand but is no adapter of this base (yet)", text)
        self._unknown = frozenset(unknown)
        return frozenset(pinned), frozenset(preloaded - pinned)

    async def _digests(self, name: KeptName) -> set[str]:
        """What a name stands for, a canary included; nothing if it stands for nothing now."""
        try:
            ref: ModelRef = parse_model(name.model, self._base)
            tenant = await get_tenant(self._db, name.tenant)
        except NotFoundError:
            return set()
        if tenant.disabled_at is not None:
            return set()
        target = await find_target(self._db, tenant.id, ref.adapter, number=ref.version, alias=ref.alias)
        versions = (target.version, target.canary) if target is not None else ()
        return {one.digest for one in versions if one is not None and one.base_id == self._base.id}
