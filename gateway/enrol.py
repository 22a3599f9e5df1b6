"""From an upload to a version: validate, publish the blob, then write the row."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from stencilpress.engine.image_format import image_name
from stencilpress.engine.spec import load_spec
from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.archive import ARCHIVE_NAME
from stencilpress.gateway.blobs import BlobStore, Staging, UploadError, open_regular, storage_errors
from stencilpress.gateway.catalog.adapters import add_version, list_digests
from stencilpress.gateway.catalog.records import AddedVersion, NewVersion, TenantLimits, VersionFiles
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import InvalidAdapterError, InvalidRequestError
from stencilpress.gateway.intake import Accepted, IntakeLimits, Rejected, validate_upload
from stencilpress.gateway.intake_records import BaseCheck, Dtype
from stencilpress.gateway.lifecycle.gate import IntakeGate
from stencilpress.gateway.lifecycle.originals import leave_content, read_files
from stencilpress.gateway.names import BaseNames, check_adapter_name
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

FILES = (CONFIG_NAME, WEIGHTS_NAME)
READ_BYTES = 1 << 20


class Enrolment:
    """Adds adapters of one base to a catalog and a blob store. ``max_rank`` is what the engine can serve."""

    def __init__(
        self,
        db: Database,
        blobs: BlobStore,
        model_dir: Path,
        base: BaseNames,
        *,
        dtype: Dtype,
        max_rank: int,
        gate: IntakeGate | None = None,
    ) -> None:
        self._db = db
        self._blobs = blobs
        self._model_dir = model_dir
        self._base = base
        self._dtype = dtype
        self._max_rank = max_rank
        self.gate = gate or IntakeGate()

    async def add_folder(
        self,
        folder: Path,
        name: str,
        tenant_id: int,
        limits: TenantLimits,
        *,
        assert_base: bool = False,
        promote: bool | None = None,
        actor: Actor = SYSTEM,
    ) -> AddedVersion:
        """Add the two files of an adapter folder as the next version of ``name``; ``promote`` as in ``add_version``.

        Raises :class:`InvalidRequestError` (name, a file, a limit), :class:`InvalidAdapterError` with all findings,
        :class:`IntakeError`, :class:`StorageFullError`. Nothing stays unless a version does.
        """
        async with self.stage(name, tenant_id, limits) as staging:
            for file in FILES:
                await _receive(staging, folder / file)
            return await self.add_staged(
                staging, name, tenant_id, limits, assert_base=assert_base, promote=promote, actor=actor
            )

    async def add_archive(
        self,
        archive: Path,
        name: str,
        tenant_id: int,
        limits: TenantLimits,
        *,
        assert_base: bool = False,
        promote: bool | None = None,
        actor: Actor = SYSTEM,
    ) -> AddedVersion:
        """Add a zip or tar of an adapter. Raises as :meth:`add_folder`."""
        async with self.stage(name, tenant_id, limits) as staging:
            await _receive(staging, archive, ARCHIVE_NAME)
            return await self.add_staged(
                staging,
                name,
                tenant_id,
                limits,
                archive=ARCHIVE_NAME,
                assert_base=assert_base,
                promote=promote,
                actor=actor,
            )

    @asynccontextmanager
    async def stage(self, name: str, tenant_id: int, limits: TenantLimits) -> AsyncIterator[Staging]:
        """A folder for one upload, which :meth:`add_staged` turns into a version. What does not become one is removed.

        Raises :class:`InvalidRequestError` (name), :class:`TooManyUploadsError`.
        """
        check_adapter_name(name, self._base)
        max_bytes = limits.max_adapter_bytes + MAX_CONFIG_BYTES
        async with self.gate.upload(tenant_id), self._blobs.stage(max_bytes) as staging:
            yield staging

    async def add_staged(
        self,
        staging: Staging,
        name: str,
        tenant_id: int,
        limits: TenantLimits,
        *,
        archive: str = "",
        assert_base: bool = False,
        promote: bool | None = None,
        actor: Actor = SYSTEM,
    ) -> AddedVersion:
        """Add what lies in a staging folder: the two files, or an ``archive`` of them. Raises as :meth:`add_folder`."""
        check: BaseCheck = "asserted" if assert_base else "named"
        allowed = _intake_limits(limits, self._max_rank)
        async with self.gate.turn(tenant_id):
            accepted = await self._validate(staging.folder, allowed, check, archive)
        files = await asyncio.to_thread(_taken_apart, staging.folder)
        await staging.publish(accepted)  # locked until the staging ends, so the row comes in time
        new = _new_version(accepted, files)
        added = await add_version(self._db, tenant_id, name, new, self._base, promote=promote, actor=actor)
        return replace(added, modules=accepted.modules)

    async def rebuild_images(self, *, cold: bool = False) -> AsyncIterator[tuple[str, InvalidAdapterError | None]]:
        """Make the images that the served base lacks, as after a change of ``dtype``.

        Yields each digest when it is done, with the reason if the adapter can no longer be served. ``cold``: what is
        not in this data folder lies in a cold tier, and gets its image when it is fetched.
        """
        wanted = image_name(load_spec(self._model_dir, self._dtype).fingerprint())
        for digest in sorted(await list_digests(self._db, self._base.id)):
            folder = self._blobs.folder(digest)
            if (folder / wanted).exists() or (cold and not folder.exists()):
                continue
            try:
                await self.rebuild(folder)
            except InvalidAdapterError as error:
                yield digest, error
            else:
                yield digest, None

    async def rebuild(self, folder: Path) -> Accepted:
        """Make the image of a version that the catalog has, beside its files. Raises :class:`InvalidAdapterError`.

        It was accepted once: what its base was called then, and the limits of its tenant, do not matter any more.
        """
        limits = IntakeLimits(max_rank=self._max_rank, max_bytes=sys.maxsize)
        return await self._validate(folder, limits, "known", "")

    async def _validate(self, folder: Path, limits: IntakeLimits, check: BaseCheck, archive: str) -> Accepted:
        verdict = await validate_upload(
            folder, self._model_dir, dtype=self._dtype, limits=limits, base_check=check, archive=archive
        )
        if isinstance(verdict, Rejected):
            raise InvalidAdapterError("The adapter cannot be served.", rejected=verdict)
        return verdict


async def _receive(staging: Staging, path: Path, name: str = "") -> None:
    try:
        await staging.receive(name or path.name, _chunks(path))
    except UploadError as error:
        raise InvalidRequestError(f"{path.name}: {error}", param=path.name, code=error.code) from None


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(open_regular, path) as file:
        while chunk := await asyncio.to_thread(file.read, READ_BYTES):
            yield chunk


def _intake_limits(limits: TenantLimits, max_rank: int) -> IntakeLimits:
    return IntakeLimits(
        max_rank=min(limits.max_rank, max_rank),
        max_bytes=limits.max_adapter_bytes,
        target_modules=limits.target_modules or (),
    )


def _taken_apart(folder: Path) -> VersionFiles:
    """What is the uploader's goes to the version, what is left to the blob. Blocks."""
    with storage_errors():
        files = read_files(folder)
        leave_content(folder)
    return files


def _new_version(accepted: Accepted, files: VersionFiles) -> NewVersion:
    return NewVersion(
        digest=accepted.digest,
        base_id=accepted.base_id,
        base_asserted=accepted.base_asserted,
        ranks=accepted.ranks,
        target_modules=accepted.target_modules,
        size_bytes=accepted.size_bytes,
        source_files=FILES,
        files=files,
    )
