"""vLLM's ``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, for scripts that were written for it.

Off unless ``STENCILPRESS_LORA_LOAD_DIR`` names the folder to load from, and for operators' keys alone: a path of the
server's is what the caller chooses here. Adapters belong to the key's tenant and pass intake like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from stencilpress.gateway.access import Actor, Permission, check_permission
from stencilpress.gateway.api.admin.dispatch import actor_of, check_adapter
from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.schemas import parse_fields
from stencilpress.gateway.blobs import StorageFullError
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.lifecycle import delete_adapter, restore_adapter
from stencilpress.gateway.catalog.records import AddedVersion
from stencilpress.gateway.errors import (
    ConflictError,
    InsufficientStorageError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from stencilpress.gateway.intake import IntakeError
from stencilpress.gateway.keys import Principal
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.services import SERVICES

Name = Annotated[str, Meta(min_length=1, max_length=64)]


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``lora_path`` is a folder below the one that the operator has set, absolute or relative to it."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None
    base_model_name: str | None = None


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: Name
    lora_int_id: int | None = None


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Add the folder as the next version of the adapter, which ``prod`` then points at."""
    caller, desk, root = await _allowed(request)
    asked = parse_fields(await read_body(request, request.app[SERVICES].settings), LoadRequest, {})
    check_adapter(actor_of(request, caller), asked.lora_name)
    folder = await asyncio.to_thread(_inside, root, asked.lora_path)
    async with _way_made(desk, caller, asked, actor_of(request, caller)) as actor:
        added = await _add(desk, caller, asked.lora_name, folder, actor)
    await desk.keep_cold(added.version.digest)
    await _forget(request)
    if not added.promoted:
        raise ConflictError(f"{added.version.ref} was added, but must pass the smoke prompts before it is served")
    return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Take the adapter out of use; it can be restored until it is purged."""
    caller, _, _ = await _allowed(request)
    services = request.app[SERVICES]
    asked = parse_fields(await read_body(request, services.settings), UnloadRequest, {})
    check_adapter(actor_of(request, caller), asked.lora_name)
    await get_adapter(services.db, caller.tenant_id, asked.lora_name)
    await delete_adapter(services.db, caller.tenant_id, asked.lora_name, actor=actor_of(request, caller))
    await _forget(request)
    return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def _allowed(request: web.Request) -> tuple[Principal, AdapterDesk, Path]:
    """Raises :class:`NotFoundError` where it is off, :class:`PermissionDeniedError` for other keys."""
    caller = await authenticate(request)
    services = request.app[SERVICES]
    if services.desk is None or not services.settings.lora_load_dir:
        raise NotFoundError("There is nothing at this path.")
    check_permission(caller.role, Permission.OPERATE)
    return caller, services.desk, Path(services.settings.lora_load_dir)


def _inside(root: Path, path: str) -> Path:
    """The folder that is meant, with links resolved. Raises :class:`InvalidRequestError` for one outside ``root``."""
    try:
        folder = (root / path).resolve(strict=True)
        if folder.is_relative_to(root.resolve(strict=True)) and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):
        pass
    raise InvalidRequestError("'lora_path' is no folder that adapters may be loaded from.", param="lora_path")


@asynccontextmanager
async def _way_made(desk: AdapterDesk, caller: Principal, asked: LoadRequest, actor: Actor) -> AsyncIterator[Actor]:
    """Bring an unloaded adapter back, unless loading it fails.

    Raises :class:`InvalidRequestError` for one that is loaded, as vLLM does.
    """
    name = asked.lora_name
    try:
        adapter = await get_adapter(desk.db, caller.tenant_id, name, deleted=True)
    except NotFoundError:
        yield actor
        return
    if adapter.deleted_at is None and not asked.load_inplace:
        text = f"The lora adapter '{name}' has already been loaded; set 'load_inplace' to load it again."
        raise InvalidRequestError(text, param="lora_name")
    if adapter.deleted_at is not None:
        await restore_adapter(desk.db, caller.tenant_id, name, actor=actor)
    try:
        yield actor
    except BaseException:
        if adapter.deleted_at is not None:
            await delete_adapter(desk.db, caller.tenant_id, name, actor=actor)
        raise


async def _add(desk: AdapterDesk, caller: Principal, name: str, folder: Path, actor: Actor) -> AddedVersion:
    try:
        return await desk.enrolment.add_folder(folder, name, caller.tenant_id, caller.limits, promote=True, actor=actor)
    except StorageFullError:
        raise InsufficientStorageError("The server's disk is full; nothing of the adapter was kept.") from None
    except IntakeError as error:
        raise InternalError(str(error)) from error


async def _forget(request: web.Request) -> None:
    with suppress(UnavailableError):  # the change is made; without an answer nothing is taken from memory anyway
        await request.app[SERVICES].changes.poll()
