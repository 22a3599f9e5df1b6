"""The demo: a tenant with a key and the shipped adapters, so that a first start has something to talk to.

The key lies in the data folder for the next start to print again. It is for trying out: give real callers
tenants and keys of their own, and start with ``--no-demo``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import stencilpress
from stencilpress.bases import Base, declared_base
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.blobs import BlobStore
from stencilpress.gateway.catalog.adapter_lists import list_served
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.records import StoredFiles, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, get_tenant
from stencilpress.gateway.catalog.version_files import find_files
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.enrol import Enrolment
from stencilpress.gateway.errors import AuthenticationError, ConflictError, InvalidAdapterError, NotFoundError
from stencilpress.gateway.keys import KeyRing, issue_key
from stencilpress.gateway.lifecycle.originals import config_of, read_weights, weights_of
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

TENANT = "demo"
SHOWN = 12
"""Adapters that the terminal names."""
QUESTION = "How do I reset my password?"


@dataclass(frozen=True, slots=True)
class Demo:
    """What a visitor needs: the key and the names of the adapters."""

    key: str
    adapters: tuple[str, ...]


def shipped_adapters() -> tuple[Path, ...]:
    """The folders of the adapters that come with the distribution, in a checkout or installed."""
    shelf = Path(stencilpress.__path__[0]) / "demo_adapters"
    return tuple(sorted(config.parent for config in shelf.glob(f"*/{CONFIG_NAME}")))


async def enrol_demo(
    db: Database, blobs: BlobStore, enrolment: Enrolment, base: Base, key_file: Path, say: Callable[[str], None]
) -> Demo | None:
    """Make sure that the demo tenant, its key and the shipped adapters of this base exist; quick if they do.

    None if an operator has disabled the tenant. ``say`` is told of each adapter that takes its time.
    """
    tenant = await _tenant(db)
    if tenant.disabled_at is not None:
        return None
    key = await _key(db, key_file)
    for folder in shipped_adapters():
        if declared_base(folder) in base.ids and not await _is_enrolled(db, blobs, tenant, folder):
            say(f"enrolling the demo adapter {folder.name}")
            try:
                await enrolment.add_folder(folder, folder.name, tenant.id, tenant.limits, promote=True)
            except InvalidAdapterError as error:  # an operator's limits may be below a shipped rank
                say(f"  left out: {'; '.join(error.findings)}")
    return Demo(key, tuple(one.name for one in await list_served(db, tenant.id, base.ids[0])))


def banner(url: str, base: Base, demo: Demo | None, console: str) -> str:
    """What the terminal shows when the server is ready. The curl command is one line that works when pasted.

    ``console`` is where people begin: the page to sign in, or the link that makes the first user.
    """
    head, place = f"Stencilpress serves {base.ids[0]} at {url}", f"  console  {console}"
    if demo is None:
        advice = "Make a tenant and a key: stencilpress tenant add NAME, stencilpress key create NAME"
        return f"{head}\n{place}\n{advice}"
    models = [base.short_name, *demo.adapters[:SHOWN]]
    more = [f"and {len(demo.adapters) - SHOWN} more"] if len(demo.adapters) > SHOWN else []
    lines = [
        head,
        f"  models   {'  '.join((*models, *more))}",
        f"  demo key {demo.key}",
        place,
        "Try one of them:",
        curl(url, demo.key, models[-1]),
    ]
    return "\n".join(lines)


def curl(url: str, key: str, model: str) -> str:
    """A command that streams one chat."""
    body = {"model": model, "stream": True, "max_tokens": 64, "messages": [{"role": "user", "content": QUESTION}]}
    headers = (f"Authorization: Bearer {key}", "Content-Type: application/json")
    words = ["curl", "-N", f"{url}/v1/chat/completions", *(word for header in headers for word in ("-H", header))]
    return shlex.join([*words, "-d", json.dumps(body)])


async def _tenant(db: Database) -> Tenant:
    try:
        return await create_tenant(db, TENANT)
    except ConflictError:
        return await get_tenant(db, TENANT)


async def _key(db: Database, file: Path) -> str:
    """The key of the last start, unless it has been revoked or the catalog is another one."""
    token = await asyncio.to_thread(_read, file)
    try:
        await KeyRing(db, Changes(db)).authenticate(token)
    except AuthenticationError:
        token = (await issue_key(db, TENANT, "demo")).token
        await asyncio.to_thread(_write_private, file, token)
    return token


def _read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


def _write_private(file: Path, text: str) -> None:
    """Replace a file by one that only we may read, whole at any moment."""
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:  # noqa: PTH123 - for its mode
        stream.write(text + "\n")
    fresh.replace(file)


async def _is_enrolled(db: Database, blobs: BlobStore, tenant: Tenant, folder: Path) -> bool:
    """Whether the files are those of a version. Comparing them is quicker than validating them for their digest."""
    try:
        adapter = await get_adapter(db, tenant.id, folder.name)
    except NotFoundError:
        return False
    for version in adapter.versions:
        files = await find_files(db, tenant.id, adapter.name, version.number)
        if await asyncio.to_thread(_is_of, files, blobs.folder(version.digest), folder):
            return True
    return False


def _is_of(files: StoredFiles, blob: Path, folder: Path) -> bool:
    """Whether a version with these files and this blob was made of the two in ``folder``. Blocks."""
    shipped = [(folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    try:
        weights = weights_of(files, blob)
        return weights is not None and [config_of(files, blob), b"".join(read_weights(weights, blob))] == shipped
    except OSError:  # missing or damaged: enrolled once more, which is no reason not to serve the others
        return False
