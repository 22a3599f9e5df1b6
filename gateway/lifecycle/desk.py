"""All that a gateway does with adapters beside serving them, over one data folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stencilpress.gateway.adapter_config import MAX_CONFIG_BYTES
from stencilpress.gateway.blobs import BlobStore, StorageFullError, UploadError
from stencilpress.gateway.catalog.records import StoredFiles, Version
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.version_files import find_files
from stencilpress.gateway.enrol import Enrolment
from stencilpress.gateway.errors import AdapterUnavailableError, ConflictError, InvalidAdapterError
from stencilpress.gateway.intake import IntakeError
from stencilpress.gateway.intake_records import Dtype
from stencilpress.gateway.lifecycle.cold import ColdTier, ColdTierError
from stencilpress.gateway.lifecycle.contents import Contents, read_contents
from stencilpress.gateway.lifecycle.diff import Diff, Side, diff_versions
from stencilpress.gateway.lifecycle.gate import IntakeGate
from stencilpress.gateway.lifecycle.leases import Leases
from stencilpress.gateway.lifecycle.originals import UploadedFile, config_of, open_file
from stencilpress.gateway.lifecycle.uploads import UploadStore
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.worker_process import WorkerError

MAX_FETCHED_BYTES = 64 << 30
"""Of one version out of the cold tier: whatever the limits were when it came."""
LEAVING_S = 0.02
"""How often it is looked whether a blob that upkeep has claimed is gone."""
LEAVING_LIMIT_S = 5.0
"""So long the cold tier may take to say that it has it, which upkeep asks before. Then it is used unkept."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterDesk:
    """Made once per process. ``cold`` is None without an object store."""

    db: Database
    blobs: BlobStore
    enrolment: Enrolment
    uploads: UploadStore
    leases: Leases
    cold: ColdTier | None
    model_dir: Path
    dtype: Dtype
    _fetching: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        db: Database,
        root: Path,
        model_dir: Path,
        base: BaseNames,
        *,
        dtype: Dtype,
        max_rank: int,
        gate: IntakeGate,
        cold: ColdTier | None = None,
    ) -> AdapterDesk:
        """``root`` is the data folder's ``v1``."""
        blobs = BlobStore(root)
        enrolment = Enrolment(db, blobs, model_dir, base, dtype=dtype, max_rank=max_rank, gate=gate)
        return cls(db, blobs, enrolment, UploadStore(root), Leases(blobs), cold, model_dir, dtype)

    @asynccontextmanager
    async def using(self, digest: str, tenant_id: int) -> AsyncIterator[None]:
        """Keep a blob on this host while the block runs, fetched from the cold tier if it is not here.

        One that is about to leave for the cold tier is fetched from there when it has gone, or kept if it stays. What
        is nowhere is the engine's to complain about. Raises :class:`AdapterUnavailableError`.
        """
        waited_s = 0.0
        while True:
            if digest and self.cold is not None and not self.blobs.folder(digest).exists():
                await self._fetch_once(digest, tenant_id)
            with self.leases.hold(digest) as kept:
                if kept or self.cold is None or waited_s >= LEAVING_LIMIT_S:
                    yield
                    return
            await asyncio.sleep(LEAVING_S)
            waited_s += LEAVING_S

    async def keep_cold(self, digest: str) -> None:
        """Copy a new version to the cold tier; where that fails upkeep tries again."""
        if self.cold is not None:
            try:
                await self.cold.store(digest, self.blobs.folder(digest))
            except (ColdTierError, OSError) as error:
                logger.warning("adapter %.12s is not in the cold tier yet: %s", digest, error)

    async def diff(self, left: Version, right: Version, tenant_id: int) -> Diff:
        """Compare two versions. Raises :class:`AdapterUnavailableError`, :class:`WorkerError`."""
        async with (
            self.using(left.digest, tenant_id),
            self.using(right.digest, tenant_id),
            self.enrolment.gate.turn(tenant_id),
        ):
            sides = [await self._side(version, tenant_id) for version in (left, right)]
            try:
                return await diff_versions(sides[0], sides[1], self.model_dir, self.dtype)
            except TimeoutError:
                raise WorkerError("the comparison took too long") from None
            except OSError as error:
                raise _unreadable(left, error) from error

    async def contents(self, version: Version, tenant_id: int) -> Contents:
        """What a version consists of. Raises :class:`AdapterUnavailableError`."""
        async with self.using(version.digest, tenant_id):
            files, blob = await self._stored(version, tenant_id)
            try:
                return await read_contents(version, files, blob)
            except OSError as error:
                raise _unreadable(version, error) from error

    @asynccontextmanager
    async def file(self, version: Version, name: str, tenant_id: int) -> AsyncIterator[UploadedFile]:
        """One of a version's two files as it was uploaded; the blob stays here while the block runs.

        Raises :class:`AdapterUnavailableError`, :class:`ConflictError` where it was not kept.
        """
        async with self.using(version.digest, tenant_id):
            files, blob = await self._stored(version, tenant_id)
            try:
                found = await asyncio.to_thread(open_file, name, files, blob)
            except OSError as error:
                raise _unreadable(version, error) from error
            if found is None:
                text = "file: it was not kept when the version was added; uploading the same files again keeps them"
                raise ConflictError(text, param="file", code="file_not_kept")
            with closing(found.chunks):
                yield found

    async def _side(self, version: Version, tenant_id: int) -> Side:
        files, blob = await self._stored(version, tenant_id)
        try:
            return Side(blob, await asyncio.to_thread(config_of, files, blob))
        except OSError as error:
            raise _unreadable(version, error) from error

    async def _stored(self, version: Version, tenant_id: int) -> tuple[StoredFiles, Path]:
        """What the catalog keeps of a version's files, and the folder of its blob."""
        files = await find_files(self.db, tenant_id, version.adapter, version.number)
        return files, self.blobs.folder(version.digest)

    async def _fetch_once(self, digest: str, tenant_id: int) -> None:
        """However many requests wait for it. It goes on if one that waits leaves."""
        task = self._fetching.get(digest)
        if task is None:
            task = asyncio.create_task(self._fetch(digest, tenant_id), name=digest)
            self._fetching[digest] = task
            task.add_done_callback(self._fetched)
        try:
            await asyncio.shield(task)
        except (ColdTierError, InvalidAdapterError, IntakeError, StorageFullError, UploadError) as error:
            raise AdapterUnavailableError("The adapter of this model cannot be loaded.") from error

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetching.pop(task.get_name(), None)
        if not task.cancelled():
            task.exception()  # it is in the log, even if nobody waits for it any more

    async def _fetch(self, digest: str, tenant_id: int) -> None:
        if self.cold is None:
            return
        try:
            async with self.blobs.stage(MAX_FETCHED_BYTES + MAX_CONFIG_BYTES) as staging:
                await self.cold.fetch(digest, staging)
                async with self.enrolment.gate.turn(tenant_id):
                    accepted = await self.enrolment.rebuild(staging.folder)
                if accepted.digest != digest:
                    raise ColdTierError(f"what is there under {digest[:12]} has the digest {accepted.digest[:12]}")
                await staging.publish(accepted)
        except Exception as error:
            logger.error("adapter %.12s cannot be fetched: %s", digest, error)
            raise

    async def close(self) -> None:
        """End what is being fetched."""
        for task in list(self._fetching.values()):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _unreadable(version: Version, error: OSError) -> AdapterUnavailableError:
    logger.error("files of adapter %s, version %d, cannot be read: %s", version.adapter, version.number, error)
    return AdapterUnavailableError("The files of this version cannot be read.")
