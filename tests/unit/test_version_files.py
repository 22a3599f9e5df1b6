"""What of its files each version has for itself: kept, found again, gone with it; and versions from before."""

from __future__ import annotations

import json
import os
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES, read_config
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.erasure import purge_tenant
from stencilpress.gateway.catalog.lifecycle import delete_adapter, delete_version, purge
from stencilpress.gateway.catalog.models import VersionFilesRow
from stencilpress.gateway.catalog.records import NewVersion, Tenant, VersionFiles
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant
from stencilpress.gateway.catalog.version_files import find_files
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.lifecycle.originals import config_of, leave_content, read_files, read_weights, weights_of
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, open_safetensors
from tests.unit.adapters import GOOD, lora_tensors, safetensors_bytes, tiny_spec, write_adapter

BASE = BaseNames.of(("Acme/Small-135M",))
TENSORS = lora_tensors(tiny_spec())


@pytest.fixture
async def acme(db: Database) -> Tenant:
    return await create_tenant(db, "acme")


def files_of(who: str) -> VersionFiles:
    return VersionFiles(json.dumps({"revision": who}).encode(), zlib.compress(b'{"__metadata__":{}}'))


async def add(db: Database, tenant: Tenant, files: VersionFiles | None, content: int = 1, name: str = "helper") -> None:
    new = NewVersion(f"{content:064x}", BASE.id, False, (8,), ("q_proj",), 1000, (CONFIG_NAME,), files)
    await add_version(db, tenant.id, name, new, BASE)


async def kept(db: Database) -> int:
    async with db.read() as session:
        return await session.scalar(select(func.count()).select_from(VersionFilesRow)) or 0


# --- in the catalog ------------------------------------------------------------------------------------------


async def test_each_version_has_its_own_whatever_its_content(db: Database, acme: Tenant) -> None:
    other = await create_tenant(db, "other")
    await add(db, acme, files_of("ada"))
    await add(db, other, files_of("bob"))
    await add(db, acme, files_of("eve"), name="twin")
    assert await find_files(db, acme.id, "helper", 1) == files_of("ada")
    assert await find_files(db, other.id, "helper", 1) == files_of("bob")
    assert await find_files(db, acme.id, "twin", 1) == files_of("eve")
    assert await find_files(db, other.id, "twin", 1) is None
    assert await find_files(db, acme.id, "helper", 2) is None


async def test_the_same_content_again_changes_nothing_and_fills_what_is_missing(db: Database, acme: Tenant) -> None:
    await add(db, acme, None)
    assert await find_files(db, acme.id, "helper", 1) is None
    for who in ("ada", "bob"):
        await add(db, acme, files_of(who))
        assert await find_files(db, acme.id, "helper", 1) == files_of("ada")
    async with db.write() as session:
        await session.execute(update(VersionFilesRow).values(config=None, weights_header=None))
    assert await find_files(db, acme.id, "helper", 1) == "in blob"
    await add(db, acme, files_of("ada"))
    assert await find_files(db, acme.id, "helper", 1) == files_of("ada")


async def test_files_go_with_their_version(db: Database, acme: Tenant) -> None:
    for content in (1, 2):
        await add(db, acme, files_of("ada"), content)
    later = datetime.now(UTC) + timedelta(hours=1)
    await delete_version(db, acme.id, "helper", 2)
    assert await kept(db) == 2, "it can be restored"
    assert await purge(db, later, frozenset({f"{2:064x}"})) == 1
    assert await kept(db) == 1
    await delete_adapter(db, acme.id, "helper")
    assert await purge(db, later, frozenset({f"{1:064x}"})) == 1
    assert await kept(db) == 0


async def test_files_go_with_their_tenant(db: Database, acme: Tenant) -> None:
    other = await create_tenant(db, "other")
    await add(db, acme, files_of("ada"))
    await add(db, other, files_of("bob"))
    await delete_tenant(db, "acme")
    await purge_tenant(db, "acme")
    assert await kept(db) == 1
    assert await find_files(db, other.id, "helper", 1) == files_of("bob")


# --- in a folder ---------------------------------------------------------------------------------------------

WORDY: dict[str, Any] = {**GOOD, "revision": "main", "inference_mode": True, "loftq_config": {"path": "/home/zoe"}}


def folder_of(path: Path, metadata: dict[str, str] | None) -> Path:
    write_adapter(path, WORDY, TENSORS)
    (path / WEIGHTS_NAME).write_bytes(safetensors_bytes(TENSORS, metadata))
    return path


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", "by": "zoe"}, {"by": "zoe"}])
def test_files_fall_into_what_is_ones_own_and_content(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    folder = folder_of(tmp_path / "staging", metadata)
    uploaded = {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    (tmp_path / "part").hardlink_to(folder / WEIGHTS_NAME)
    files = read_files(folder)
    leave_content(folder)
    assert files.config == uploaded[CONFIG_NAME]
    header = zlib.decompress(files.weights_header)
    assert uploaded[WEIGHTS_NAME].startswith(len(header).to_bytes(8, "little") + header)
    assert (tmp_path / "part").read_bytes() == uploaded[WEIGHTS_NAME], "an upload that may have to be repeated"
    left = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not any(word in left for word in (b"zoe", b"main", b"acme"))
    assert {path.name for path in folder.iterdir()} == {CONFIG_NAME, WEIGHTS_NAME}
    with (folder / WEIGHTS_NAME).open("rb") as file:
        weights = open_safetensors(file, 100)
        for name, tensor in TENSORS.items():
            assert (weights.load(name) == tensor).all()


def test_what_is_left_of_a_config_means_the_same(tmp_path: Path) -> None:
    raw = {
        **WORDY,
        "lora_alpha": 0.1,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"v_proj": 1e-3},
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
        "exclude_modules": ["k_proj"],
    }
    folder = write_adapter(tmp_path, raw, TENSORS)
    leave_content(folder)
    assert read_config(json.loads((folder / CONFIG_NAME).read_bytes())) == read_config(raw)
    assert read_config(raw)[1] == []


@pytest.mark.parametrize("text", ["é" * 500_000, "\ud800" * 170_000, "x" * 1_000_000])
def test_what_is_left_of_a_large_config_can_be_read_back(tmp_path: Path, text: str) -> None:
    targets = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    folder = write_adapter(tmp_path, {}, TENSORS)
    config = json.dumps({**GOOD, "target_modules": targets}, ensure_ascii=False).encode(errors="backslashreplace")
    assert len(config) < MAX_CONFIG_BYTES
    (folder / CONFIG_NAME).write_bytes(config)
    leave_content(folder)
    left = (folder / CONFIG_NAME).read_bytes()
    assert len(left) < MAX_CONFIG_BYTES
    assert strict_json.parse(left, CONFIG_NAME)["target_modules"] == targets


def test_a_config_whose_numbers_grow_over_the_limit_is_refused(tmp_path: Path) -> None:
    patterns = ",".join(f'"{number:04}{"x" * 244}":1e9' for number in range(4096))
    folder = write_adapter(tmp_path, {}, TENSORS)
    config = f'{{"r":4,"lora_alpha":8,"target_modules":["q_proj"],"alpha_pattern":{{{patterns}}}}}'.encode()
    assert MAX_CONFIG_BYTES - 20_000 < len(config) < MAX_CONFIG_BYTES
    (folder / CONFIG_NAME).write_bytes(config)
    with pytest.raises(InvalidRequestError, match="takes more than") as caught:
        leave_content(folder)
    assert (caught.value.param, caught.value.code) == (CONFIG_NAME, "too_large")
    assert (folder / CONFIG_NAME).read_bytes() == config


def test_a_config_is_read_from_a_blob_only_where_it_is_ones_own(tmp_path: Path) -> None:
    blob = folder_of(tmp_path / "blob", None)
    uploaded = (blob / CONFIG_NAME).read_bytes()
    assert config_of(files_of("ada"), blob) == files_of("ada").config
    assert config_of(None, blob) is None
    assert config_of("in blob", blob) == uploaded
    leave_content(blob)
    assert config_of("in blob", blob) is None, "a later upload of the content has taken its place"


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "by": "zoe"}])
def test_weights_come_back_byte_by_byte_out_of_anothers_blob(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    """Whose tensors have another order, and names that mean the same."""
    mine = folder_of(tmp_path / "mine", metadata)
    renamed = {name.removeprefix("base_model.model."): TENSORS[name] for name in sorted(TENSORS, reverse=True)}
    blob = folder_of(tmp_path / "blob", {"by": "another"})
    (blob / WEIGHTS_NAME).write_bytes(safetensors_bytes(renamed, {"by": "another"}))
    leave_content(blob)
    weights = weights_of(read_files(mine), blob)
    assert weights is not None
    found = b"".join(read_weights(weights, blob))
    assert (found, weights.size_bytes) == ((mine / WEIGHTS_NAME).read_bytes(), len(found))


def test_weights_are_the_blobs_only_where_they_are_ones_own(tmp_path: Path) -> None:
    blob = folder_of(tmp_path / "blob", {"by": "zoe"})
    uploaded = (blob / WEIGHTS_NAME).read_bytes()
    weights = weights_of("in blob", blob)
    assert weights is not None
    assert b"".join(read_weights(weights, blob)) == uploaded
    assert weights.size_bytes == len(uploaded)
    assert weights_of(None, blob) is None
    leave_content(blob)
    assert weights_of("in blob", blob) is None


def test_tensors_that_follow_each_other_are_read_at_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "staging", None)
    files = read_files(folder)
    leave_content(folder)
    weights = weights_of(files, folder)
    assert weights is not None
    assert len(weights.spans) == 1


def test_a_blob_that_lacks_a_tensor_is_damaged(tmp_path: Path) -> None:
    files = read_files(folder_of(tmp_path / "mine", None))
    blob = folder_of(tmp_path / "blob", None)
    some = dict(list(TENSORS.items())[1:])
    (blob / WEIGHTS_NAME).write_bytes(safetensors_bytes(some))
    with pytest.raises(OSError, match="is damaged"):
        weights_of(files, blob)


@pytest.mark.parametrize("own", [True, False])
def test_a_file_that_becomes_shorter_while_it_is_read_is_damaged(tmp_path: Path, own: bool) -> None:
    blob = folder_of(tmp_path / "blob", None)
    weights = weights_of(read_files(blob) if own else "in blob", blob)
    assert weights is not None
    os.truncate(blob / WEIGHTS_NAME, weights.size_bytes - 1)
    with pytest.raises(OSError, match="is damaged"):
        b"".join(read_weights(weights, blob))
