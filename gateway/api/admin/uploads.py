"""Uploads: in one request, as two files or an archive; or in parts that survive a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Annotated, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.adapter_views import AddedVersionView, NewUpload, Sha256, UploadDigests, UploadView
from stencilpress.gateway.api.admin.desk import desk_of
from stencilpress.gateway.api.admin.dispatch import check_adapter
from stencilpress.gateway.api.admin.operation import Call, operation
from stencilpress.gateway.archive import ARCHIVE_NAME
from stencilpress.gateway.blobs import Staging, StorageFullError, UploadError
from stencilpress.gateway.catalog import adapters
from stencilpress.gateway.catalog.records import AddedVersion
from stencilpress.gateway.enrol import FILES
from stencilpress.gateway.errors import (
    InsufficientStorageError,
    InternalError,
    InvalidAdapterError,
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedMediaTypeError,
)
from stencilpress.gateway.intake import IntakeError
from stencilpress.gateway.lifecycle.uploads import MAX_PART_BYTES, Upload
from stencilpress.gateway.names import check_adapter_name

MULTIPART = "multipart/form-data"
ARCHIVES = ("application/zip", "application/x-tar", "application/gzip")
OCTETS = "application/octet-stream"
READ_BYTES = 64 << 10

T = TypeVar("T")


class VersionQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    assert_base: Annotated[bool, Meta(description="Vouch that it fits the base, if its config names none.")] = False
    promote: Annotated[bool | None, Meta(description="Point `prod` at it; default: if it is the first version.")] = None


class PartQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    offset: Annotated[int, Meta(ge=0, description="Where the part begins: the `received_bytes` of its file.")]
    sha256: Annotated[Sha256, Meta(description="Of the part.")]


@operation(
    "POST",
    "/tenants/{tenant}/adapters/{adapter}/versions",
    Permission.WRITE,
    status=201,
    accepts=(MULTIPART, *ARCHIVES),
)
async def add_version(call: Call, query: VersionQuery) -> AddedVersionView:
    """Upload the next version of an adapter, which its first one creates.

    The body is `adapter_config.json` and `adapter_model.safetensors` as two files of a form, or a zip or tar of them.
    Content that the adapter has already is not a new version. What cannot be served is a 422 with every finding.
    """
    desk, name, tenant = desk_of(call), call.path("adapter"), call.tenant
    _check_encoding(call.request)
    with _faults_told():
        async with desk.enrolment.stage(name, tenant.id, tenant.limits) as staging:
            archive = await _receive(call, staging)
            added = await desk.enrolment.add_staged(
                staging,
                name,
                tenant.id,
                tenant.limits,
                archive=archive,
                assert_base=query.assert_base,
                promote=query.promote,
                actor=call.actor,
            )
        await desk.keep_cold(added.version.digest)
    return await _view(call, added)


@operation("POST", "/tenants/{tenant}/uploads", Permission.WRITE, status=201)
async def create_upload(call: Call, body: NewUpload) -> UploadView:
    """Begin an upload in parts.

    Send parts with `PUT …/files/FILE`, where FILE is `archive`, or `adapter_config.json` and
    `adapter_model.safetensors`; then complete it. It is kept for a day.
    """
    check_adapter(call.actor, body.adapter)
    check_adapter_name(body.adapter, call.services.router.base)
    with _faults_told():
        upload = await desk_of(call).uploads.create(
            call.tenant.id,
            body.adapter,
            call.tenant.limits.max_adapter_bytes,
            assert_base=body.assert_base,
            promote=body.promote,
        )
    return UploadView.of(upload)


@operation("GET", "/tenants/{tenant}/uploads/{upload}", Permission.WRITE)
async def get_upload(call: Call) -> UploadView:
    """How far an upload is, to go on after a failure."""
    return UploadView.of(await _mine(call))


@operation("PUT", "/tenants/{tenant}/uploads/{upload}/files/{file}", Permission.WRITE, accepts=(OCTETS,))
async def put_part(call: Call, query: PartQuery) -> UploadView:
    """Send one part of a file.

    It counts once it is answered: it is on disk then, and its SHA-256 was right. A part is at most 256 MiB.
    """
    _check_encoding(call.request)
    if (call.request.content_length or 0) > MAX_PART_BYTES:
        raise RequestTooLargeError(f"A part is at most {MAX_PART_BYTES} bytes.")
    await _mine(call)
    with _faults_told():
        upload = await desk_of(call).uploads.put(
            call.tenant.id, call.path("upload"), call.path("file"), query.offset, query.sha256, _body(call)
        )
    return UploadView.of(upload)


@operation("POST", "/tenants/{tenant}/uploads/{upload}/complete", Permission.WRITE)
async def complete_upload(call: Call, body: UploadDigests) -> AddedVersionView:
    """Make a version of an upload whose files are whole, as their SHA-256 tells.

    Repeated after a lost answer it gives the same. An upload that cannot be served is removed with the 422.
    """
    desk, tenant = desk_of(call), call.tenant
    await _mine(call)
    with _faults_told():
        async with desk.uploads.completing(tenant.id, call.path("upload"), body.sha256) as completion:
            upload = completion.upload
            if upload.result:
                return await _known(call, upload)
            async with desk.enrolment.stage(upload.adapter, tenant.id, tenant.limits) as staging:
                await completion.move_to(staging)
                try:
                    added = await desk.enrolment.add_staged(
                        staging,
                        upload.adapter,
                        tenant.id,
                        tenant.limits,
                        archive=completion.archive,
                        assert_base=upload.assert_base,
                        promote=upload.promote,
                        actor=call.actor,
                    )
                except InvalidAdapterError:
                    await completion.give_up()
                    raise
            await completion.end(
                added.version.ref, created=added.created, promoted=added.promoted, modules=added.modules
            )
        await desk.keep_cold(added.version.digest)
    return await _view(call, added)


@operation("DELETE", "/tenants/{tenant}/uploads/{upload}", Permission.WRITE, status=204)
async def delete_upload(call: Call) -> web.Response:
    """Give an upload up."""
    await _mine(call)
    await desk_of(call).uploads.remove(call.tenant.id, call.path("upload"))
    return web.Response(status=204)


OPERATIONS = (add_version, create_upload, get_upload, put_part, complete_upload, delete_upload)


async def _mine(call: Call) -> Upload:
    """The upload of the path, if it is for an adapter in scope. Raises :class:`NotFoundError`."""
    upload = await desk_of(call).uploads.get(call.tenant.id, call.path("upload"))
    check_adapter(call.actor, upload.adapter)
    return upload


async def _receive(call: Call, staging: Staging) -> str:
    """The body into the staging folder; returns the archive's name, or "" for two files."""
    kind = call.request.content_type
    if kind == MULTIPART:
        await _receive_form(call, staging)
        return ""
    if kind not in (*ARCHIVES, OCTETS):
        raise UnsupportedMediaTypeError(f"An upload is {MULTIPART}, or one of {', '.join(ARCHIVES)}.")
    await staging.receive(ARCHIVE_NAME, _body(call))
    return ARCHIVE_NAME


async def _receive_form(call: Call, staging: Staging) -> None:
    """The two files of a form, each once, by their file names or their fields' names."""
    try:
        reader = await call.request.multipart()
        while (part := await _within(call, reader.next())) is not None:
            if not isinstance(part, BodyPartReader):
                raise InvalidRequestError("The form must not contain another one.", param="body")
            name = part.filename or part.name or ""
            if name not in FILES:
                text = f"{name[:64]!r} is no part of an adapter, which has {' and '.join(FILES)}"
                raise InvalidRequestError(f"body: {text}", param="body", code="bad_file_name")
            if part.headers.get("Content-Encoding") or part.headers.get("Content-Transfer-Encoding"):
                raise UnsupportedMediaTypeError("Encoded parts are not accepted; send the files as they are.")
            await staging.receive(name, _chunks(call, part))
    except (ValueError, LookupError, AssertionError, HttpProcessingError) as error:  # whatever the library raises
        if isinstance(error, UploadError):
            raise
        raise InvalidRequestError("The form is malformed.", param="body") from None


async def _chunks(call: Call, part: BodyPartReader) -> AsyncIterator[bytes]:
    while chunk := await _within(call, part.read_chunk(READ_BYTES)):
        yield bytes(chunk)


async def _body(call: Call) -> AsyncIterator[bytes]:
    """The body as it comes; however large it is, only silence ends it."""
    content = call.request.content
    while chunk := await _within(call, content.readany()):
        yield chunk


async def _within(call: Call, arriving: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(call.services.settings.body_limit_s):
            return await arriving
    except TimeoutError:
        raise InvalidRequestError("The body did not arrive in time.", code="body_timeout") from None


def _check_encoding(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("Compressed request bodies are not accepted; send the file as it is.")


@contextlib.contextmanager
def _faults_told() -> Iterator[None]:
    """Turn what goes wrong with an upload into what its sender is told."""
    try:
        yield
    except UploadError as error:
        kind = RequestTooLargeError if error.code == "too_large" else InvalidRequestError
        raise kind(str(error), param="body", code=error.code) from None
    except StorageFullError:
        raise InsufficientStorageError("The server's disk is full; nothing of the upload was kept.") from None
    except IntakeError as error:
        raise InternalError(str(error)) from error


async def _view(call: Call, added: AddedVersion) -> AddedVersionView:
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, added.version.adapter)
    return AddedVersionView.of(added, adapter)


async def _known(call: Call, upload: Upload) -> AddedVersionView:
    """What a completed upload became; the version is shown as it is now."""
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, upload.adapter)
    for version in adapter.versions:
        if version.ref == upload.result:
            known = AddedVersion(version, created=upload.created, promoted=upload.promoted, modules=upload.modules)
            return AddedVersionView.of(known, adapter)
    raise InvalidRequestError(f"upload: it became {upload.result}, which was deleted since", param="upload")
