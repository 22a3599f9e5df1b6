"""Files go to clients that do not read, or that leave: nothing of this host stays tied up."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientError, web

from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.api.admin import catalog
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.models import VersionFilesRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from stencilpress.gateway.slow_clients import PART_BYTES
from tests.integration.admin_client import admin_client
from tests.integration.gateway_harness import Gateway, running_gateway
from tests.integration.test_gateway_failures import eventually, sample

PATH = f"{ADMIN_PREFIX}/tenants/demo/adapters/pirate/versions/1/files/{WEIGHTS_NAME}"
LARGE_BYTES = 64 << 20
SLOW_READS, SLOW_READ_BYTES, SLOW_PAUSE_S = 40, 32 << 10, 0.1
"""What a slow client does: some 300 KB/s."""


async def give_files(gateway: Gateway) -> str:
    """Weights that no buffer holds, to the version pirate@1; its digest."""
    db, desk = gateway.services.db, gateway.services.desk
    assert desk is not None
    digest = (await get_adapter(db, (await get_tenant(db, "demo")).id, "pirate")).versions[0].digest
    folder = desk.blobs.folder(digest)
    folder.mkdir()
    (folder / CONFIG_NAME).write_text("{}")
    with (folder / WEIGHTS_NAME).open("wb") as file:
        file.truncate(LARGE_BYTES)
    async with db.write() as session:
        session.add(VersionFilesRow(adapter_id=1, version=1))
    return digest


def is_free(gateway: Gateway, digest: str) -> bool:
    """Whether upkeep could remove the blob."""
    assert gateway.services.desk is not None
    with gateway.services.desk.blobs.claim(digest) as free:
        return free


async def ask(gateway: Gateway, lazy: socket.socket, *, path: str = PATH, role: Role = Role.ADMIN) -> None:
    """Send a request for the file, of which nothing is read."""
    key = (await admin_client(gateway, "demo", role)).key
    host, port = gateway.url.removeprefix("http://").split(":")
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect((host, int(port)))
    lazy.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_blob_is_free_again_when_a_client_does_not_read(tmp_path: Path, leaves: bool) -> None:
    limit_s = 60.0 if leaves else 0.3
    async with running_gateway(tmp_path, write_limit_s=limit_s) as gateway:
        digest = await give_files(gateway)
        with socket.socket() as lazy:
            await ask(gateway, lazy)
            await eventually(lambda: not is_free(gateway, digest))
            if not leaves:
                await eventually(lambda: sample(gateway, "stencilpress_slow_clients_cut_total") == 1)
        await eventually(lambda: is_free(gateway, digest))
        assert sample(gateway, "stencilpress_slow_clients_cut_total") == (0 if leaves else 1)


async def test_an_export_of_the_catalog_waits_for_nobody_who_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def large(_: Database) -> AsyncIterator[bytes]:
        for _part in range(LARGE_BYTES >> 20):
            yield bytes(1 << 20)

    monkeypatch.setattr(catalog, "export_catalog", large)
    async with running_gateway(tmp_path, write_limit_s=0.3) as gateway:
        with socket.socket() as lazy:
            await ask(gateway, lazy, path=f"{ADMIN_PREFIX}/catalog", role=Role.OPERATOR)
            await eventually(lambda: sample(gateway, "stencilpress_slow_clients_cut_total") == 1)


async def test_other_requests_are_answered_meanwhile_and_all_of_a_file_arrives(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        digest = await give_files(gateway)
        admin = await admin_client(gateway, "demo", Role.ADMIN)
        headers = {"Authorization": f"Bearer {admin.key}"}
        async with gateway.http.get(gateway.url + PATH, headers=headers) as response:
            first = await response.content.readexactly(1)
            assert (await admin("GET", "/tenants/demo/adapters/pirate/versions/1"))["number"] == 1
            rest = await response.read()
        assert len(first + rest) == response.content_length == LARGE_BYTES
        await eventually(lambda: is_free(gateway, digest))


async def test_a_client_that_reads_slowly_is_not_cut_off(tmp_path: Path) -> None:
    """It takes a fraction of a mebibyte within the limit, again and again."""
    async with running_gateway(tmp_path, write_limit_s=1.0) as gateway:
        digest = await give_files(gateway)
        with socket.socket() as lazy:
            await ask(gateway, lazy)
            await eventually(lambda: not is_free(gateway, digest))
            lazy.setblocking(False)
            for _ in range(SLOW_READS):
                taken = 0
                while taken < SLOW_READ_BYTES:
                    taken += len(await asyncio.get_running_loop().sock_recv(lazy, SLOW_READ_BYTES - taken))
                await asyncio.sleep(SLOW_PAUSE_S)
            assert sample(gateway, "stencilpress_slow_clients_cut_total") == 0
            assert not is_free(gateway, digest), "it still comes"


async def test_a_client_is_cut_off_where_a_file_breaks_off(tmp_path: Path) -> None:
    """Its size has been sent: without an end the client would wait for the rest."""
    async with running_gateway(tmp_path) as gateway:
        assert gateway.services.desk is not None
        weights = gateway.services.desk.blobs.folder(await give_files(gateway)) / WEIGHTS_NAME
        headers = {"Authorization": f"Bearer {(await admin_client(gateway, 'demo', Role.ADMIN)).key}"}
        async with gateway.http.get(gateway.url + PATH, headers=headers) as response:
            os.truncate(weights, LARGE_BYTES // 2)
            with pytest.raises(ClientError):
                await response.read()


async def test_others_have_their_turn_between_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast a client takes them."""
    turns = 0
    sent = list[tuple[int, int]]()
    write = web.StreamResponse.write

    async def noted(response: web.StreamResponse, data: bytes) -> None:
        sent.append((turns, len(data)))
        await write(response, data)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with running_gateway(tmp_path) as gateway:
        await give_files(gateway)
        headers = {"Authorization": f"Bearer {(await admin_client(gateway, 'demo', Role.ADMIN)).key}"}
        monkeypatch.setattr(web.StreamResponse, "write", noted)
        others = asyncio.create_task(take_turns())
        async with gateway.http.get(gateway.url + PATH, headers=headers) as response:
            assert len(await response.read()) == LARGE_BYTES
        others.cancel()
    assert sum(size for _, size in sent) == LARGE_BYTES
    assert max(size for _, size in sent) <= PART_BYTES
    assert len({turn for turn, _ in sent}) == len(sent), "one in a turn"
