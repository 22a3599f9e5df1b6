"""The cold tier: an object store that keeps the files of every version, so that a blob need not lie on each host.

Only the two uploaded files are there. What is fetched goes through intake's worker again, which builds the image and
computes the digest: nothing reaches an engine that is not what the catalog says.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.blobs import Staging, is_digest
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

SCHEMES = ("s3", "gs", "az", "file")
CHUNK_BYTES = 8 << 20
FILES = (WEIGHTS_NAME, CONFIG_NAME)
"""In the order of writing: whoever finds the config finds the weights too."""


class ColdTierError(Exception):
    """The store did not do what was asked. The text is for the log."""


class ColdTier:
    """Blobs by digest in an object store: Amazon S3 and what speaks its protocol, Google, Azure, or a local folder."""

    def __init__(self, url: str) -> None:
        """Credentials come from the environment, under the names that the provider's own tools use.

        Raises :class:`SettingsError`.
        """
        scheme = url.partition("://")[0]
        if scheme not in SCHEMES:
            raise SettingsError(f"STENCILPRESS_COLD_STORE_URL: expected one of {', '.join(SCHEMES)} before ://")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise SettingsError("STENCILPRESS_COLD_STORE_URL needs `pip install stencilpress[cold]`") from None
        try:
            self._store: Any = from_url(url, mkdir=True) if scheme == "file" else from_url(url)
        except (obstore.exceptions.BaseError, ValueError) as error:
            text = f"STENCILPRESS_COLD_STORE_URL cannot be used: {type(error).__name__}"  # its own text has the secrets
            raise SettingsError(text) from None
        self._obstore: Any = obstore

    async def has(self, digest: str) -> bool:
        """Whether a version's files are there, all of them. Raises :class:`ColdTierError`."""
        try:
            for name in FILES:
                await self._obstore.head_async(self._store, _key(digest, name))
        except FileNotFoundError:
            return False
        except self._obstore.exceptions.BaseError as error:
            raise ColdTierError(f"{type(error).__name__} for {digest[:12]}") from None
        return True

    async def store(self, digest: str, folder: Path) -> None:
        """Copy a blob's files there, also if they are: how long it takes tells nobody that another tenant has them.

        Raises :class:`ColdTierError`, ``OSError``.
        """
        for name in FILES:
            try:
                await self._obstore.put_async(self._store, _key(digest, name), folder / name)
            except self._obstore.exceptions.BaseError as error:
                raise ColdTierError(f"{type(error).__name__} for {digest[:12]}") from None

    async def fetch(self, digest: str, staging: Staging) -> None:
        """Bring a version's files into a staging folder. Raises :class:`ColdTierError`, :class:`StorageFullError`."""
        for name in FILES:
            await staging.receive(name, self._chunks(digest, name))

    async def remove(self, digest: str) -> None:
        """Forget a version's files, the config first. Raises :class:`ColdTierError`."""
        for name in reversed(FILES):
            try:
                await self._obstore.delete_async(self._store, _key(digest, name))
            except FileNotFoundError:
                continue
            except self._obstore.exceptions.BaseError as error:
                raise ColdTierError(f"{type(error).__name__} for {digest[:12]}") from None

    async def digests(self, *, whole: bool = True) -> frozenset[str]:
        """All that are there, or with ``whole`` off also those of which only a part is. Raises :class:`ColdTierError`.

        No file stands for another: what is stored while somebody removes the same content may end as either one alone.
        """
        found: defaultdict[str, set[str]] = defaultdict(set)
        try:
            async for objects in self._obstore.list(self._store, chunk_size=1000):
                for one in objects:
                    digest, _, name = one["path"].partition("/")
                    if is_digest(digest):
                        found[digest].add(name)
        except self._obstore.exceptions.BaseError as error:
            raise ColdTierError(type(error).__name__) from None
        return frozenset(digest for digest, names in found.items() if not whole or names.issuperset(FILES))

    async def _chunks(self, digest: str, name: str) -> AsyncIterator[bytes]:
        try:
            found = await self._obstore.get_async(self._store, _key(digest, name))
            async for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                yield await asyncio.to_thread(bytes, chunk)
        except FileNotFoundError:
            raise ColdTierError(f"{digest[:12]} is not there") from None
        except self._obstore.exceptions.BaseError as error:
            raise ColdTierError(f"{type(error).__name__} for {digest[:12]}") from None


def _key(digest: str, name: str) -> str:
    if not is_digest(digest):
        raise ValueError("not a digest")
    return f"{digest}/{name}"
