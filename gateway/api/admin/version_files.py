"""The files of a version as they were uploaded, to take away."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.api.admin.desk import desk_of, number_of
from stencilpress.gateway.api.admin.operation import JSON, Call, operation
from stencilpress.gateway.catalog import adapters
from stencilpress.gateway.catalog.records import find_version_of
from stencilpress.gateway.enrol import FILES
from stencilpress.gateway.errors import NotFoundError
from stencilpress.gateway.lifecycle.originals import UploadedFile
from stencilpress.gateway.slow_clients import cut, write_parts

OCTETS = "application/octet-stream"

logger = logging.getLogger(__name__)


class BrokenFileError(ConnectionError):
    """A file ended before its size when its head had been sent, so the connection was cut off."""


@operation(
    "GET",
    "/tenants/{tenant}/adapters/{adapter}/versions/{version}/files/{file}",
    Permission.WRITE,
    produces=OCTETS,
)
async def get_version_file(call: Call) -> web.StreamResponse:
    """A file of a version, byte by byte as it was uploaded.

    FILE is `adapter_config.json` or `adapter_model.safetensors`; of an archive those that were in it. For whoever may
    replace them: a viewer sees what is in them, and does not get the weights.
    """
    name = call.path("file")
    adapter = await adapters.get_adapter(call.services.db, call.tenant.id, call.path("adapter"))
    version = find_version_of(adapter, number_of(call))
    if name not in FILES:
        raise NotFoundError(f"file: {name[:64]!r} is none of {', '.join(FILES)}", param="file")
    async with desk_of(call).file(version, name, call.tenant.id) as file:
        return await _send(call, name, file)


async def _send(call: Call, name: str, file: UploadedFile) -> web.StreamResponse:
    """Raises ``SlowClientError`` for a client that stops reading, which would keep the blob on this host, and
    :class:`BrokenFileError` for a file that ends too early, of which the client would wait for the rest.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": JSON if name == CONFIG_NAME else OCTETS,
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
    )
    response.content_length = file.size_bytes
    await response.prepare(call.request)
    limit_s = call.services.settings.write_limit_s
    while chunk := await _next_chunk(call, file):
        await write_parts(call.request, response, chunk, limit_s, call.services.metrics)
    await response.write_eof()
    return response


async def _next_chunk(call: Call, file: UploadedFile) -> bytes:
    try:
        return await asyncio.to_thread(next, file.chunks, b"")
    except OSError as error:
        logger.error("a version's file broke off in the middle of its download: %s", error)
        cut(call.request)
        raise BrokenFileError(str(error)) from error


OPERATIONS = (get_version_file,)
