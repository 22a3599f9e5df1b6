"""The cold tier on a server that speaks S3: moto's, over HTTP, as a MinIO or Ceph of an operator's would be."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.blobs import BlobStore
from stencilpress.gateway.lifecycle.cold import ColdTier, ColdTierError
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

BUCKET = "press"
PARTS_BYTES = 23 << 20
"""More than one part of a multipart upload, and several chunks of a download."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with one empty bucket."""
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3")
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield url
    server.stop()


@pytest.fixture
def _as_an_operator_would(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "secret-of-ours",
        "AWS_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


pytestmark = [
    pytest.mark.usefixtures("_as_an_operator_would"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:moto|botocore|boto3|werkzeug"),
]


def blob(folder: Path, size: int) -> Path:
    folder.mkdir()
    (folder / WEIGHTS_NAME).write_bytes(secrets.token_bytes(size))
    (folder / CONFIG_NAME).write_text('{"r": 8}')
    return folder


async def test_files_go_there_and_come_back_whole(tmp_path: Path) -> None:
    cold = ColdTier(f"s3://{BUCKET}/adapters")
    large, small = "ab" * 32, "cd" * 32
    folders = {large: blob(tmp_path / "large", PARTS_BYTES), small: blob(tmp_path / "small", 1000)}
    assert not await cold.has(large)
    for digest, folder in folders.items():
        await cold.store(digest, folder)
        await cold.store(digest, folder)  # again, as each upload of this content does
        assert await cold.has(digest)
    assert await cold.digests() == folders.keys()
    for digest, folder in folders.items():
        async with BlobStore(tmp_path / digest[:4]).stage(2 * PARTS_BYTES) as staging:
            await cold.fetch(digest, staging)
            for name in (WEIGHTS_NAME, CONFIG_NAME):
                assert (staging.folder / name).read_bytes() == (folder / name).read_bytes()
    await cold.remove(large)
    await cold.remove(large)
    assert await cold.digests() == {small}
    assert not await cold.has(large)


async def test_prefixes_of_one_bucket_are_apart(tmp_path: Path) -> None:
    digest = "ef" * 32
    await ColdTier(f"s3://{BUCKET}/one").store(digest, blob(tmp_path / "files", 10))
    assert await ColdTier(f"s3://{BUCKET}/one").digests() == {digest}
    assert await ColdTier(f"s3://{BUCKET}/two").digests() == frozenset()


async def test_what_is_not_there_is_told_without_secrets(tmp_path: Path) -> None:
    for url in ("s3://nowhere", f"s3://{BUCKET}/adapters"):
        cold = ColdTier(url)
        async with BlobStore(tmp_path / "v1").stage(1000) as staging:
            with pytest.raises(ColdTierError) as caught:
                await cold.fetch("01" * 32, staging)
            assert "secret-of-ours" not in str(caught.value)
