"""Blobs: whole or absent after any end of an upload, and no name of an upload ever becomes a path."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stencilpress.engine.image import read_image
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.blobs import BlobStore, UploadError
from stencilpress.gateway.intake import Accepted, validate_upload
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.unit.adapters import Desk

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1 << 20
DIGEST = "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "v1")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def chunks(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def staged(store: BlobStore) -> list[Path]:
    return list(store.staging.iterdir())


async def upload(store: BlobStore, desk: Desk) -> tuple[Accepted, bool]:
    """All that an upload does, and whether the blob is new."""
    async with store.stage(MAX_BYTES) as staging:
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            await staging.receive(name, chunks((desk.folder / name).read_bytes()))
        verdict = await validate_upload(staging.folder, desk.model_dir)
        assert isinstance(verdict, Accepted)
        return verdict, await staging.publish(verdict)


# --- the whole way -------------------------------------------------------------------------------------------


async def test_an_upload_becomes_a_blob_that_an_engine_reads(store: BlobStore, desk: Desk) -> None:
    accepted, new = await upload(store, desk)
    blob = store.folder(accepted.digest)
    assert new
    assert store.folder(accepted.digest).exists()
    assert {path.name for path in blob.iterdir()} == {CONFIG_NAME, WEIGHTS_NAME, accepted.image}
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        assert (blob / name).read_bytes() == (desk.folder / name).read_bytes()
    read_image(blob / accepted.image, digest=accepted.digest, fingerprint=desk.spec.fingerprint())
    assert staged(store) == []


async def test_the_same_content_is_stored_once_and_heals_a_damaged_image(store: BlobStore, desk: Desk) -> None:
    accepted, _ = await upload(store, desk)
    image = store.folder(accepted.digest) / accepted.image
    sound = image.read_bytes()
    image.write_bytes(b"damaged")
    again, new = await upload(store, desk)
    assert again.digest == accepted.digest
    assert not new
    assert image.read_bytes() == sound
    assert len(list(store.adapters.iterdir())) == 1
    assert staged(store) == []


async def test_equal_uploads_at_the_same_time_end_in_one_blob(store: BlobStore, desk: Desk) -> None:
    results = await asyncio.gather(*(upload(store, desk) for _ in range(4)))
    assert len({accepted.digest for accepted, _ in results}) == 1
    assert sorted(new for _, new in results) == [False, False, False, True]
    assert staged(store) == []


async def test_an_image_for_another_dtype_is_built_from_the_blob(store: BlobStore, desk: Desk) -> None:
    accepted, _ = await upload(store, desk)
    blob = store.folder(accepted.digest)
    verdict = await validate_upload(blob, desk.model_dir, dtype="float32")
    assert isinstance(verdict, Accepted)
    assert verdict.digest == accepted.digest
    assert {path.name for path in blob.iterdir()} == {CONFIG_NAME, WEIGHTS_NAME, accepted.image, verdict.image}


async def test_a_removed_blob_is_gone_and_may_come_again(store: BlobStore, desk: Desk) -> None:
    accepted, _ = await upload(store, desk)
    with (store.folder(accepted.digest) / accepted.image).open("rb") as reader:
        await store.remove(accepted.digest)
        assert len(reader.read()) == accepted.image_bytes, "a load in progress ends well"
    assert not store.folder(accepted.digest).exists()
    await store.remove(accepted.digest)
    _, new = await upload(store, desk)
    assert new


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "x", "../adapter_config.json", "/etc/passwd", "adapter_model.bin", "ADAPTER_CONFIG.JSON", "a\0b", ".."]
)
async def test_only_the_two_names_are_taken(store: BlobStore, name: str) -> None:
    async with store.stage(MAX_BYTES) as staging:
        with pytest.raises(UploadError) as caught:
            await staging.receive(name, chunks(b"data"))
        assert caught.value.code == "bad_file_name"
        assert list(staging.folder.iterdir()) == []


@pytest.mark.parametrize("digest", ["", "x", "../../etc", "AB" * 32, "ab" * 31, "ab" * 33, "ab" * 32 + "\n", "." * 64])
async def test_only_digests_are_places(store: BlobStore, digest: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        store.folder(digest)
    with pytest.raises(ValueError, match="not a digest"):
        await store.remove(digest)


async def test_a_second_file_of_a_name_is_refused(store: BlobStore) -> None:
    async with store.stage(MAX_BYTES) as staging:
        await staging.receive(CONFIG_NAME, chunks(b"{}"))
        with pytest.raises(UploadError) as caught:
            await staging.receive(CONFIG_NAME, chunks(b"{}"))
        assert caught.value.code == "duplicate_file"
        assert (staging.folder / CONFIG_NAME).read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("files", "max_bytes"),
    [
        ([(WEIGHTS_NAME, 1001)], 1000),
        ([(WEIGHTS_NAME, 600), (CONFIG_NAME, 401)], 1000),
        ([(CONFIG_NAME, MAX_CONFIG_BYTES + 1)], 1 << 30),
    ],
)
async def test_bytes_are_counted_as_they_come(store: BlobStore, files: list[tuple[str, int]], max_bytes: int) -> None:
    """The sender stops being read at the limit: it never gets to send the rest."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x"

    *before, (last, size) = files
    async with store.stage(max_bytes) as staging:
        for name, count in before:
            assert await staging.receive(name, chunks(bytes(count))) == count
        with pytest.raises(UploadError) as caught:
            await staging.receive(last, endless())
        assert caught.value.code == "too_large"
        assert sent == size
    assert staged(store) == []


async def test_a_link_in_the_place_of_a_blob_is_not_followed(store: BlobStore, desk: Desk, tmp_path: Path) -> None:
    accepted, _ = await upload(store, desk)
    store.folder(accepted.digest).rename(tmp_path / "elsewhere")
    store.folder(accepted.digest).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere" / accepted.image).stat()
    with pytest.raises(OSError, match="Not a directory"):
        await upload(store, desk)
    assert (tmp_path / "elsewhere" / accepted.image).stat() == before
    assert staged(store) == []


# --- ends that nobody planned --------------------------------------------------------------------------------


class ClientGoneError(Exception):
    """What a handler sees when the connection breaks."""


async def test_a_broken_upload_leaves_nothing(store: BlobStore) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield bytes(3 << 20)
        raise ClientGoneError

    with pytest.raises(ClientGoneError):
        async with store.stage(8 << 20) as staging:
            await staging.receive(WEIGHTS_NAME, breaks())
    assert staged(store) == []
    assert list(store.adapters.iterdir()) == []


async def test_a_cancelled_upload_leaves_nothing(store: BlobStore) -> None:
    waiting = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield bytes(3 << 20)
        waiting.set()
        await asyncio.Event().wait()

    async def receive() -> None:
        async with store.stage(8 << 20) as staging:
            await staging.receive(WEIGHTS_NAME, stalls())

    task = asyncio.create_task(receive())
    await waiting.wait()
    assert len(staged(store)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert staged(store) == []


async def test_a_publication_cancelled_at_any_moment_is_whole_or_absent(store: BlobStore, desk: Desk) -> None:
    """The thread that renames goes on when its caller is cancelled; the folder must not be emptied under it."""
    accepted, _ = await upload(store, desk)
    files = {path.name: path.read_bytes() for path in store.folder(accepted.digest).iterdir()}
    for turns in range(12):
        await store.remove(accepted.digest)

        async def publish() -> None:
            async with store.stage(MAX_BYTES) as staging:
                for name, content in files.items():
                    (staging.folder / name).write_bytes(content)
                await staging.publish(accepted)

        task = asyncio.create_task(publish())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert staged(store) == []
        if store.folder(accepted.digest).exists():
            blob = store.folder(accepted.digest)
            assert {path.name: path.read_bytes() for path in blob.iterdir()} == files


UPLOADER = """
import asyncio, sys
from pathlib import Path
from stencilpress.gateway.blobs import BlobStore

async def stalls():
    yield bytes(2 << 20)
    print("half", flush=True)
    await asyncio.Event().wait()

async def main():
    async with BlobStore(Path(sys.argv[1])).stage(8 << 20) as staging:
        await staging.receive("adapter_model.safetensors", stalls())

asyncio.run(main())
"""


async def test_staging_of_a_killed_process_is_cleaned_and_that_of_a_live_one_is_not(
    store: BlobStore, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UPLOADER, str(tmp_path / "v1"), stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"half\n"
    (theirs,) = staged(store)
    async with store.stage(MAX_BYTES) as mine:
        assert await store.clean() == 0
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        assert await BlobStore(tmp_path / "v1").clean() == 1
        assert staged(store) == [mine.folder]
        assert not theirs.exists()


async def test_many_uploads_survive_cleaners_that_run_all_the_time(store: BlobStore) -> None:
    async def one() -> None:
        async with store.stage(MAX_BYTES) as staging:
            await staging.receive(CONFIG_NAME, chunks(b"{}"))
            assert (staging.folder / CONFIG_NAME).read_bytes() == b"{}"

    await asyncio.gather(*(one() for _ in range(40)), *(store.clean() for _ in range(20)))
    assert staged(store) == []


FULL_DISK = """
import asyncio, sys
from pathlib import Path
from stencilpress.gateway.blobs import BlobStore, StorageFullError
from stencilpress.gateway.intake import validate_upload

async def of(data):
    yield data

async def main(root, upload, model_dir):
    store = BlobStore(root)
    for fill in (True, False):
        try:
            async with store.stage(8 << 20) as staging:
                if fill:
                    await staging.receive("adapter_model.safetensors", of(bytes(4 << 20)))
                for name in ("adapter_config.json", "adapter_model.safetensors"):
                    await staging.receive(name, of((upload / name).read_bytes()))
                free = root / "filler"
                try:
                    free.write_bytes(bytes(4 << 20))
                except OSError:
                    pass
                await validate_upload(staging.folder, model_dir)
        except StorageFullError:
            print("full while", "receiving" if fill else "building")
    print(len(list(store.staging.iterdir())), len(list(store.adapters.iterdir())))

asyncio.run(main(*map(Path, sys.argv[1:])))
"""


def test_a_full_disk_is_told_and_leaves_nothing(desk: Desk, tmp_path: Path) -> None:
    """On a real file system of 256 KiB, in a mount namespace of our own."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=256k tmpfs {small}"
    upload = f'exec {sys.executable} -c "$CODE" {small}/v1 {desk.folder} {desk.model_dir}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && {upload}"],
        env={**os.environ, "CODE": FULL_DISK},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.stdout.splitlines() == ["full while receiving", "full while building", "0 0"], done.stderr
