"""Uploads in parts: what was acknowledged is kept, what was not never counts, whatever ended in between."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.archive import ARCHIVE_NAME
from stencilpress.gateway.blobs import BlobStore
from stencilpress.gateway.errors import (
    ApiError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    TooManyUploadsError,
)
from stencilpress.gateway.lifecycle.uploads import LIFETIME_S, MAX_OPEN_PER_TENANT, Upload, UploadStore
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

ROOT = Path(__file__).parents[2]
TENANT, STRANGER = 1, 2
DATA = os.urandom(300_000)


@pytest.fixture
def store(tmp_path: Path) -> UploadStore:
    return UploadStore(tmp_path)


@pytest.fixture
async def upload(store: UploadStore) -> Upload:
    return await store.create(TENANT, "helper", 1 << 20)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def chunks(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def put(store: UploadStore, upload: Upload, data: bytes, offset: int = 0, file: str = "archive") -> Upload:
    return await store.put(TENANT, upload.id, file, offset, sha256(data), chunks(data))


async def whole(store: UploadStore, upload: Upload, root: Path, expected: dict[str, bytes]) -> None:
    digests = {file: sha256(data) for file, data in expected.items()}
    async with store.completing(TENANT, upload.id, digests) as completion, BlobStore(root).stage(1 << 20) as staging:
        await completion.move_to(staging)
        found = {path.name: path.read_bytes() for path in staging.folder.iterdir()}
        assert sorted(found.values()) == sorted(expected.values())


async def test_parts_add_up(store: UploadStore, upload: Upload, tmp_path: Path) -> None:
    for start in range(0, len(DATA), 70_000):
        upload = await put(store, upload, DATA[start : start + 70_000], start)
    assert upload.received_bytes == {"archive": len(DATA)}
    assert await UploadStore(tmp_path).get(TENANT, upload.id) == upload
    await whole(store, upload, tmp_path, {"archive": DATA})


async def test_two_files_are_as_good_as_an_archive(store: UploadStore, upload: Upload, tmp_path: Path) -> None:
    await put(store, upload, b"{}", file=CONFIG_NAME)
    await put(store, upload, DATA, file=WEIGHTS_NAME)
    await whole(store, upload, tmp_path, {CONFIG_NAME: b"{}", WEIGHTS_NAME: DATA})


async def test_a_part_whose_digest_differs_does_not_count(store: UploadStore, upload: Upload, tmp_path: Path) -> None:
    await put(store, upload, DATA[:1000])
    with pytest.raises(InvalidRequestError) as caught:
        await store.put(TENANT, upload.id, "archive", 1000, sha256(b"other"), chunks(DATA[1000:]))
    assert caught.value.code == "digest_mismatch"
    assert (await store.get(TENANT, upload.id)).received_bytes == {"archive": 1000}
    await put(store, upload, DATA[1000:], 1000)
    await whole(store, upload, tmp_path, {"archive": DATA})


async def test_a_part_begins_where_the_last_one_ended(store: UploadStore, upload: Upload) -> None:
    await put(store, upload, DATA[:1000])
    for offset in (0, 999, 1001, 10**15):
        with pytest.raises(ConflictError, match="has 1000 bytes") as caught:
            await put(store, upload, DATA[1000:], offset)
        assert caught.value.code == "wrong_offset"


async def test_a_broken_connection_costs_one_part(store: UploadStore, upload: Upload, tmp_path: Path) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield DATA[100_000:200_000]
        raise ConnectionResetError

    await put(store, upload, DATA[:100_000])
    with pytest.raises(ConnectionResetError):
        await store.put(TENANT, upload.id, "archive", 100_000, sha256(DATA[100_000:]), breaks())
    assert (await store.get(TENANT, upload.id)).received_bytes == {"archive": 100_000}
    await put(store, upload, DATA[100_000:], 100_000)
    await whole(store, upload, tmp_path, {"archive": DATA})


WRITER = """
import asyncio, hashlib, sys
from pathlib import Path
from stencilpress.gateway.lifecycle.uploads import UploadStore

async def stalls():
    yield bytes(3 << 20)
    print("half", flush=True)
    await asyncio.Event().wait()

async def main():
    store = UploadStore(Path(sys.argv[1]))
    await store.put(1, sys.argv[2], "archive", int(sys.argv[3]), hashlib.sha256(b"").hexdigest(), stalls())

asyncio.run(main())
"""


async def test_a_killed_gateway_costs_one_part(store: UploadStore, tmp_path: Path) -> None:
    upload = await store.create(TENANT, "helper", 8 << 20)
    await put(store, upload, DATA)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(tmp_path), upload.id, str(len(DATA)), stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"half\n"
    with pytest.raises(ConflictError) as caught:
        await put(store, upload, DATA, len(DATA))
    assert caught.value.code == "upload_busy"
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    again = UploadStore(tmp_path)
    assert (await again.get(TENANT, upload.id)).received_bytes == {"archive": len(DATA)}
    assert (tmp_path / "uploads" / upload.id / ARCHIVE_NAME).stat().st_size > len(DATA), "the dead one's bytes"
    await put(again, upload, DATA[:5], len(DATA))
    await whole(again, upload, tmp_path, {"archive": DATA + DATA[:5]})


async def test_what_a_dead_process_left_is_not_part_of_the_whole(store: UploadStore, tmp_path: Path) -> None:
    upload = await store.create(TENANT, "helper", 8 << 20)
    await put(store, upload, DATA)
    with (tmp_path / "uploads" / upload.id / ARCHIVE_NAME).open("ab") as file:
        file.write(b"unacknowledged")
    await whole(store, upload, tmp_path, {"archive": DATA})


async def test_of_two_writers_one_waits_for_nothing(store: UploadStore, upload: Upload) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        started.set()
        await go.wait()
        yield DATA

    first = asyncio.create_task(store.put(TENANT, upload.id, "archive", 0, sha256(DATA), slowly()))
    await started.wait()
    with pytest.raises(ConflictError) as caught:
        await put(store, upload, b"x")
    assert caught.value.code == "upload_busy"
    go.set()
    assert (await first).received_bytes == {"archive": len(DATA)}


async def test_limits_hold_while_bytes_come(store: UploadStore) -> None:
    upload = await store.create(TENANT, "helper", 1000)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 50_000
            yield bytes(50_000)

    with pytest.raises(RequestTooLargeError):
        await store.put(TENANT, upload.id, "archive", 0, sha256(b""), endless())
    assert sent <= 1000 + MAX_CONFIG_BYTES + 50_000
    with pytest.raises(RequestTooLargeError):
        await put(store, upload, bytes(MAX_CONFIG_BYTES + 1), file=CONFIG_NAME)


@pytest.mark.parametrize(
    ("files", "digests", "code"),
    [
        ({}, {}, "incomplete_upload"),
        ({CONFIG_NAME: b"{}"}, {CONFIG_NAME: b"{}"}, "incomplete_upload"),
        ({"archive": b"x", CONFIG_NAME: b"{}"}, {"archive": b"x", CONFIG_NAME: b"{}"}, "incomplete_upload"),
        ({"archive": b"x"}, {}, "invalid_value"),
        ({"archive": b"x"}, {"archive": b"y"}, "digest_mismatch"),
    ],
)
async def test_completion_needs_the_whole(
    store: UploadStore, upload: Upload, files: dict[str, bytes], digests: dict[str, bytes], code: str
) -> None:
    for file, data in files.items():
        await put(store, upload, data, file=file)
    given = {file: sha256(data) for file, data in digests.items()}
    with pytest.raises(InvalidRequestError) as caught:
        async with store.completing(TENANT, upload.id, given):
            pass
    assert caught.value.code == code
    await store.get(TENANT, upload.id)


async def test_completion_can_be_tried_again_and_its_result_is_remembered(
    store: UploadStore, upload: Upload, tmp_path: Path
) -> None:
    """A gateway that dies within it leaves the upload whole; a client that missed the answer asks again."""
    await put(store, upload, DATA)
    await whole(store, upload, tmp_path, {"archive": DATA})
    with pytest.raises(ConflictError):
        await put(store, upload, b"more", len(DATA))
    await whole(store, upload, tmp_path, {"archive": DATA})
    async with store.completing(TENANT, upload.id, {"archive": sha256(DATA)}) as completion:
        await completion.end("helper@3", created=True, promoted=False)
    assert (await store.get(TENANT, upload.id)).result == "helper@3"
    async with store.completing(TENANT, upload.id, {"archive": sha256(DATA)}) as completion:
        assert (completion.upload.result, completion.upload.created) == ("helper@3", True)
    assert [path.name for path in (tmp_path / "uploads" / upload.id).iterdir()] == ["upload.json"]
    with pytest.raises(ConflictError) as caught:
        await put(store, upload, b"more", len(DATA))
    assert caught.value.code == "upload_completed"


@pytest.mark.parametrize("upload_id", ["", "x", "../uploads", "/etc", "a" * 32, "A" * 32, "." * 32, "a" * 31 + "\n"])
async def test_only_own_uploads_exist(store: UploadStore, upload: Upload, upload_id: str) -> None:
    for tenant, wanted in ((TENANT, upload_id), (STRANGER, upload.id)):
        attempts = [
            store.get(tenant, wanted),
            store.put(tenant, wanted, "archive", 0, sha256(b"x"), chunks(b"x")),
            store.remove(tenant, wanted),
        ]
        for attempt in attempts:
            with pytest.raises(NotFoundError):
                await attempt
    assert await store.get(TENANT, upload.id) == upload


@pytest.mark.parametrize("file", ["", "x", "../archive", "upload.json", "adapter_model.bin", "a" * 1000])
async def test_only_known_files_are_taken(store: UploadStore, upload: Upload, file: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await put(store, upload, b"x", file=file)
    assert (caught.value.param, len(caught.value.message) < 200) == ("file", True)


async def test_a_digest_is_hexadecimal(store: UploadStore, upload: Upload) -> None:
    for text in ("", "x" * 64, sha256(b"x").upper(), sha256(b"x")[:-1]):
        with pytest.raises(InvalidRequestError) as caught:
            await store.put(TENANT, upload.id, "archive", 0, text, chunks(b"x"))
        assert caught.value.param == "sha256"


async def test_a_tenant_has_so_many_and_old_ones_go(tmp_path: Path) -> None:
    now = 1_000_000.0
    store = UploadStore(tmp_path, clock=lambda: now)
    mine = [await store.create(TENANT, "helper", 1000) for _ in range(MAX_OPEN_PER_TENANT)]
    with pytest.raises(TooManyUploadsError):
        await store.create(TENANT, "helper", 1000)
    await store.create(STRANGER, "helper", 1000)
    await store.remove(TENANT, mine[0].id)
    await store.create(TENANT, "helper", 1000)
    assert await store.clean() == 0
    now += LIFETIME_S + 1
    with pytest.raises(NotFoundError):
        await store.get(TENANT, mine[1].id)
    assert await store.clean() == MAX_OPEN_PER_TENANT + 1
    assert list((tmp_path / "uploads").iterdir()) == []


def test_errors_are_of_the_tree() -> None:
    assert issubclass(TooManyUploadsError, ApiError)
    assert TooManyUploadsError.status == 429
