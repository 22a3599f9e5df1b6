"""The catalog as a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from tempfile import TemporaryFile
from typing import Annotated, BinaryIO

import msgspec
from aiohttp import web
from msgspec import Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.operation import Call, operation
from stencilpress.gateway.api.body import spool_body
from stencilpress.gateway.catalog.transfer import Imported, export_catalog, import_catalog
from stencilpress.gateway.slow_clients import write_parts

LINES = "application/x-ndjson"
MAX_FILE_BYTES = 4 << 30
READ_BYTES = 1 << 20


class ImportQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    skip_existing: Annotated[
        bool, Meta(description="Leave tenants that exist as they are, instead of refusing the file.")
    ] = False


@operation("GET", "/catalog", Permission.OPERATE, produces=LINES)
async def export_file(call: Call) -> web.StreamResponse:
    """Tenants, keys and adapters as a file for import elsewhere, on SQLite or PostgreSQL.

    It holds the hashes of keys and the salts of prefix caches: keep it as safe as the database. The adapters' tensors
    are not in it, their configs are.
    """
    with TemporaryFile() as file:
        async for line in export_catalog(call.services.db):  # to the disk first: a slow client holds no transaction
            file.write(line)
        file.seek(0)
        response = web.StreamResponse(
            headers={"Content-Type": LINES, "Content-Disposition": 'attachment; filename="catalog.ndjson"'}
        )
        await response.prepare(call.request)
        limit_s, metrics = call.services.settings.write_limit_s, call.services.metrics
        while chunk := await asyncio.to_thread(file.read, READ_BYTES):
            await write_parts(call.request, response, chunk, limit_s, metrics)
        await response.write_eof()
    return response


@operation("POST", "/catalog", Permission.OPERATE, accepts=[LINES])
async def import_file(call: Call, query: ImportQuery) -> Imported:
    """Add what an export holds, all of it or nothing.

    The schema must be the one of this version. Ids of tenants are given out anew.
    """
    with TemporaryFile() as file:
        await spool_body(call.request, file, MAX_FILE_BYTES, call.services.settings.body_limit_s)
        file.seek(0)
        return await import_catalog(call.services.db, _lines(file), skip_existing=query.skip_existing, actor=call.actor)


async def _lines(file: BinaryIO) -> AsyncIterator[bytes]:
    for line in file:
        yield line


OPERATIONS = (export_file, import_file)
