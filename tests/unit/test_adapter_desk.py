"""Enrolment in a gateway: turns at intake, leases, purging, garbage, and the cold tier, over a real data folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import update

from stencilpress.engine.image import adapter_digest, image_name
from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.archive import ARCHIVE_NAME
from stencilpress.gateway.catalog.adapters import find_target, get_adapter
from stencilpress.gateway.catalog.lifecycle import delete_adapter, delete_version
from stencilpress.gateway.catalog.models import VersionFilesRow
from stencilpress.gateway.catalog.records import AddedVersion, Tenant, TenantLimits
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.errors import AdapterUnavailableError, InvalidAdapterError, TooManyUploadsError
from stencilpress.gateway.lifecycle.cold import ColdTier, ColdTierError
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.lifecycle.gate import IntakeGate
from stencilpress.gateway.lifecycle.upkeep import (
    collect_cold_garbage,
    collect_garbage,
    copy_to_cold,
    make_room,
    purge_deleted,
)
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.unit.adapters import BASE_ID, FIRST_B, GOOD, Desk, lora_tensors, write_adapter, write_base
from tests.unit.test_archive import tar_bytes

BASE = BaseNames.of((BASE_ID, "tiny"))
NOW = timedelta(seconds=-1)
"""A grace that is over already."""


@pytest.fixture
def folders(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
async def desk(db: Database, folders: Desk, tmp_path: Path) -> AdapterDesk:
    return open_desk(db, folders, tmp_path / "v1")


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    return await create_tenant(db, "acme")


def open_desk(db: Database, folders: Desk, root: Path, cold: ColdTier | None = None) -> AdapterDesk:
    return AdapterDesk.open(db, root, folders.model_dir, BASE, dtype="auto", max_rank=64, gate=IntakeGate(), cold=cold)


async def add(desk: AdapterDesk, folders: Desk, tenant: Tenant, seed: int = 0, name: str = "helper") -> AddedVersion:
    folders.weights(lora_tensors(folders.spec, seed=seed))
    return await desk.enrolment.add_folder(folders.folder, name, tenant.id, tenant.limits)


def blobs(desk: AdapterDesk) -> set[str]:
    return set(desk.blobs.digests())


# --- enrolment -----------------------------------------------------------------------------------------------


async def test_an_archive_becomes_a_version_with_what_matched(
    db: Database, desk: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    files = {name: (folders.folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}

    async def packed() -> AsyncIterator[bytes]:
        yield tar_bytes(files, "w:gz")

    async with desk.enrolment.stage("helper", tenant.id, tenant.limits) as staging:
        await staging.receive(ARCHIVE_NAME, packed())
        added = await desk.enrolment.add_staged(staging, "helper", tenant.id, tenant.limits, archive=ARCHIVE_NAME)
    assert [(found.name, found.layers, found.ranks) for found in added.modules] == [
        ("q_proj", 2, (4,)),
        ("v_proj", 2, (4,)),
    ]
    assert added.version.digest == adapter_digest(folders.spec, GOOD, lora_tensors(folders.spec))
    assert {path.name for path in desk.blobs.folder(added.version.digest).iterdir()} == {
        CONFIG_NAME,
        WEIGHTS_NAME,
        image_name(folders.spec.fingerprint()),
    }


async def test_a_refusal_tells_every_finding_and_what_matched(desk: AdapterDesk, folders: Desk, tenant: Tenant) -> None:
    tensors = lora_tensors(folders.spec)
    tensors[FIRST_B][0, 0] = 3.4e38
    folders.weights({**tensors, "stray": np.zeros((2, 2), np.float32)})
    with pytest.raises(InvalidAdapterError) as caught:
        await desk.enrolment.add_folder(folders.folder, "helper", tenant.id, tenant.limits)
    fields = json.loads(caught.value.body())["error"]
    assert fields.keys() == {"message", "type", "param", "code", "findings", "modules", "size_bytes"}
    assert {(one["field"], one["code"]) for one in fields["findings"]} == {
        ("stray", "unknown_tensor"),
        (FIRST_B, "overflow"),
    }
    assert [one["name"] for one in fields["modules"]] == ["q_proj", "v_proj"]
    assert fields["size_bytes"] > 0
    assert blobs(desk) == set()


async def test_half_precision_that_overflows_is_a_finding(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant
) -> None:
    tensors = lora_tensors(folders.spec)
    tensors[FIRST_B][0, 0] = 70_000.0
    folders.weights(tensors)
    options = {"dtype": "float16", "max_rank": 64, "gate": IntakeGate()}
    half = AdapterDesk.open(db, tmp_path / "v1", folders.model_dir, BASE, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidAdapterError, match="cannot be served") as caught:
        await half.enrolment.add_folder(folders.folder, "helper", tenant.id, tenant.limits)
    assert [(one.field, one.code) for one in caught.value.rejected.findings] == [(FIRST_B, "overflow")]


async def test_an_image_is_rebuilt_for_a_version_whose_base_had_another_alias(
    db: Database, desk: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    folders.config(base_model_name_or_path="tiny")
    added = await desk.enrolment.add_folder(folders.folder, "helper", tenant.id, tenant.limits)
    write_base(folders.model_dir, folders.spec, aliases=("another",))
    (desk.blobs.folder(added.version.digest) / image_name(folders.spec.fingerprint())).unlink()
    rebuilt = [(digest, error) async for digest, error in desk.enrolment.rebuild_images()]
    assert rebuilt == [(added.version.digest, None)]
    assert (desk.blobs.folder(added.version.digest) / image_name(folders.spec.fingerprint())).exists()


async def test_workers_are_bounded_per_tenant_and_overall() -> None:
    gate, running, most, go = (
        IntakeGate(workers=2, per_tenant=1),
        dict[int, int](),
        list[tuple[int, int]](),
        asyncio.Event(),
    )

    async def work(tenant_id: int) -> None:
        async with gate.turn(tenant_id):
            running[tenant_id] = running.get(tenant_id, 0) + 1
            most.append((running[tenant_id], sum(running.values())))
            await asyncio.sleep(0)
            await go.wait()
            running[tenant_id] -= 1

    tasks = [asyncio.create_task(work(1 + i % 4)) for i in range(24)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert most == [(1, 1), (1, 2)]
    go.set()
    await asyncio.gather(*tasks)
    assert max(own for own, _ in most) == 1
    assert max(total for _, total in most) == 2


async def test_a_tenants_uploads_in_progress_are_bounded(desk: AdapterDesk, tenant: Tenant) -> None:
    gate = IntakeGate(uploads_per_tenant=2)
    async with gate.upload(1), gate.upload(1):
        with pytest.raises(TooManyUploadsError):
            async with gate.upload(1):
                pass
        async with gate.upload(2):
            pass
    async with gate.upload(1):
        pass


# --- leases, purging, garbage --------------------------------------------------------------------------------


async def test_a_deleted_version_is_purged_after_its_last_request(
    db: Database, desk: AdapterDesk, folders: Desk, tmp_path: Path, tenant: Tenant
) -> None:
    first, second = await add(desk, folders, tenant, 1), await add(desk, folders, tenant, 2)
    elsewhere = open_desk(db, folders, tmp_path / "v1")  # another gateway of the host
    async with desk.using(second.version.digest, tenant.id), elsewhere.using(second.version.digest, tenant.id):
        await delete_version(db, tenant.id, "helper", 2)
        assert await purge_deleted(db, desk.blobs, timedelta(hours=1)) == 0, "its grace is not over"
        assert await purge_deleted(db, desk.blobs, NOW) == 0, "it is in use"
    async with elsewhere.using(second.version.digest, tenant.id):
        async with desk.using(second.version.digest, tenant.id):
            pass
        assert await purge_deleted(db, desk.blobs, NOW) == 0, "the other gateway still uses it"
    assert await purge_deleted(db, desk.blobs, NOW) == 1
    assert await collect_garbage(db, desk.blobs) == 1
    assert blobs(desk) == {first.version.digest}
    async with desk.using(second.version.digest, tenant.id):
        pass  # gone: the engine will say so


async def test_content_that_another_version_has_stays(
    db: Database, desk: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    other = await create_tenant(db, "other")
    mine, theirs = await add(desk, folders, tenant, 1), await add(desk, folders, other, 1)
    assert mine.version.digest == theirs.version.digest
    await delete_adapter(db, tenant.id, "helper")
    assert await purge_deleted(db, desk.blobs, NOW) == 1
    assert await collect_garbage(db, desk.blobs) == 0
    assert blobs(desk) == {theirs.version.digest}


async def test_what_is_being_enrolled_is_no_garbage(
    db: Database, desk: AdapterDesk, folders: Desk, tmp_path: Path, tenant: Tenant
) -> None:
    """Between the publication of a blob and its row, also where the blob was there before."""
    for _ in range(2):
        async with desk.blobs.stage(1 << 20) as staging:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                shutil.copy(folders.folder / name, staging.folder / name)
            accepted = await desk.enrolment.rebuild(staging.folder)
            await staging.publish(accepted)
            assert await collect_garbage(db, desk.blobs) == 0
            assert blobs(desk) == {accepted.digest}
    assert await collect_garbage(db, desk.blobs) == 1
    assert blobs(desk) == set()


async def test_uploads_deletions_and_upkeep_at_the_same_time_lose_no_version(
    db: Database, desk: AdapterDesk, folders: Desk, tmp_path: Path, tenant: Tenant
) -> None:
    shelf = [write_adapter(tmp_path / f"shelf{seed}", GOOD, lora_tensors(folders.spec, seed=seed)) for seed in range(2)]

    async def come_and_go(folder: Path, name: str) -> None:
        for _ in range(3):
            await desk.enrolment.add_folder(folder, name, tenant.id, tenant.limits)
            await delete_adapter(db, tenant.id, name)
            await purge_deleted(db, desk.blobs, NOW)
            await collect_garbage(db, desk.blobs)
        await desk.enrolment.add_folder(folder, name, tenant.id, tenant.limits)

    await asyncio.gather(*(come_and_go(folder, f"a{i}") for i, folder in enumerate([*shelf, shelf[0]])))
    for i in range(3):
        target = await find_target(db, tenant.id, f"a{i}")
        assert target is not None
        assert target.version.digest in blobs(desk)


async def test_a_blob_whose_config_cannot_be_read_is_unavailable(
    db: Database, desk: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    """Of a version from before each had its own."""
    version = (await add(desk, folders, tenant)).version
    async with db.write() as session:
        await session.execute(update(VersionFilesRow).values(config=None, weights_header=None))
    (desk.blobs.folder(version.digest) / CONFIG_NAME).unlink()
    for asked in (desk.contents(version, tenant.id), desk.diff(version, version, tenant.id)):
        with pytest.raises(AdapterUnavailableError, match="cannot be read"):
            await asked


# --- the cold tier -------------------------------------------------------------------------------------------


@pytest.fixture
def cold(tmp_path: Path) -> ColdTier:
    pytest.importorskip("obstore")
    return ColdTier(f"file://{tmp_path / 'cold'}")


async def test_a_blob_is_fetched_when_it_is_asked_for(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier
) -> None:
    home = open_desk(db, folders, tmp_path / "v1", cold)
    added = await add(home, folders, tenant, 1)
    digest = added.version.digest
    await home.keep_cold(digest)
    assert await cold.digests() == {digest}
    away = open_desk(db, folders, tmp_path / "other-host" / "v1", cold)

    async def use() -> set[str]:
        async with away.using(digest, tenant.id):
            return {path.name for path in away.blobs.folder(digest).iterdir()}

    seen = await asyncio.gather(*(use() for _ in range(8)))
    assert seen == [{CONFIG_NAME, WEIGHTS_NAME, image_name(folders.spec.fingerprint())}] * 8
    image = image_name(folders.spec.fingerprint())
    assert (away.blobs.folder(digest) / image).read_bytes() == (home.blobs.folder(digest) / image).read_bytes()


async def test_an_upload_is_copied_whoever_has_the_same(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier
) -> None:
    """A copy that was left out would make the second answer a quick one: a tenant would know of the first."""
    home = open_desk(db, folders, tmp_path / "v1", cold)
    other = await create_tenant(db, "other")
    for one in (tenant, other):
        digest = (await add(home, folders, one, 1)).version.digest
        files = [tmp_path / "cold" / digest / name for name in (CONFIG_NAME, WEIGHTS_NAME)]
        for path in files:
            path.unlink(missing_ok=True)
        (tmp_path / "cold" / digest).mkdir(exist_ok=True)
        files[0].write_text("what is there already")
        await home.keep_cold(digest)
        assert [path.read_bytes() for path in files] == [
            (home.blobs.folder(digest) / path.name).read_bytes() for path in files
        ]


async def test_what_is_not_what_the_catalog_says_reaches_nobody(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier
) -> None:
    home = open_desk(db, folders, tmp_path / "v1", cold)
    added = await add(home, folders, tenant, 1)
    digest = added.version.digest
    await home.keep_cold(digest)
    away = open_desk(db, folders, tmp_path / "other-host" / "v1", cold)
    stored = tmp_path / "cold" / digest / WEIGHTS_NAME
    sound = stored.read_bytes()
    folders.weights(lora_tensors(folders.spec, seed=9))
    for content in ((folders.folder / WEIGHTS_NAME).read_bytes(), sound[:-1], b"\x80pickle"):
        stored.write_bytes(content)
        with pytest.raises(AdapterUnavailableError):
            async with away.using(digest, tenant.id):
                pass
        assert blobs(away) == set()
    stored.unlink()
    with pytest.raises(AdapterUnavailableError):
        async with away.using(digest, tenant.id):
            pass
    stored.write_bytes(sound)
    async with away.using(digest, tenant.id):
        assert blobs(away) == {digest}


async def test_upkeep_fills_and_clears_the_cold_tier_and_makes_room(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier
) -> None:
    home = open_desk(db, folders, tmp_path / "v1", cold)
    first, second, third = [(await add(home, folders, tenant, seed)).version.digest for seed in (1, 2, 3)]
    assert await copy_to_cold(db, home.blobs, cold) == 3
    assert await copy_to_cold(db, home.blobs, cold) == 0
    size = home.blobs.sizes()[first][0]
    async with home.using(second, tenant.id):
        assert await make_room(home.blobs, cold, 0) == 0
        assert await make_room(home.blobs, cold, 2 * size) == 1
        assert blobs(home) == {second, third}, "the one that was used least recently"
        assert await make_room(home.blobs, cold, 1) == 1
        assert blobs(home) == {second}, "what is in use stays"
    await delete_version(db, tenant.id, "helper", 3)
    await purge_deleted(db, home.blobs, NOW)
    assert await collect_cold_garbage(db, cold) == 1
    assert await cold.digests() == {first, second}
    half = tmp_path / "cold" / ("ab" * 32) / WEIGHTS_NAME  # a removal or a copy that a kill cut short
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(b"weights")
    assert await collect_cold_garbage(db, cold) == 1
    assert not half.exists()
    assert await cold.digests(whole=False) == {first, second}


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
async def test_what_is_in_the_cold_tier_by_half_is_copied_again_before_it_leaves(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier, name: str
) -> None:
    """It was garbage and has been uploaded anew: one file was stored before its removal, the other after it."""
    home = open_desk(db, folders, tmp_path / "v1", cold)
    digest = (await add(home, folders, tenant, 1)).version.digest
    await home.keep_cold(digest)
    (tmp_path / "cold" / digest / name).unlink()
    assert await make_room(home.blobs, cold, 1) == 0
    assert await copy_to_cold(db, home.blobs, cold) == 1
    assert await make_room(home.blobs, cold, 1) == 1
    async with home.using(digest, tenant.id):
        assert blobs(home) == {digest}


class _SlowStore(ColdTier):
    """Says that it has everything, when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def has(self, digest: str) -> bool:  # noqa: ARG002 - as its base has it
        self.asked.set()
        await self.answers.wait()
        return True


async def test_who_asks_for_a_blob_that_is_leaving_gets_it_from_the_cold_tier(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier
) -> None:
    """Upkeep has claimed it and asks the store whether it may go: the request that comes then must not find it gone."""
    home = open_desk(db, folders, tmp_path / "v1", cold)
    digest = (await add(home, folders, tenant, 1)).version.digest
    await home.keep_cold(digest)
    slow = _SlowStore()
    leaving = asyncio.create_task(make_room(home.blobs, slow, 1))
    await slow.asked.wait()

    async def use() -> set[str]:
        async with home.using(digest, tenant.id):
            await leaving
            return blobs(home)

    using = asyncio.create_task(use())
    await asyncio.sleep(0.01)
    slow.answers.set()
    assert await using == {digest}
    assert leaving.result() == 1


async def test_a_blob_that_is_a_link_is_used_at_once(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can lock it, and nobody removes it."""
    home = open_desk(db, folders, tmp_path / "v1", cold)
    digest = (await add(home, folders, tenant, 1)).version.digest
    home.blobs.folder(digest).rename(tmp_path / "elsewhere")
    home.blobs.folder(digest).symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(asyncio, "sleep", None)
    async with home.using(digest, tenant.id):
        assert blobs(home) == {digest}


async def test_a_blob_that_was_not_to_be_kept_is_kept_for_the_next_who_asks(
    db: Database, desk: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    """However many requests overlap with the one that came while upkeep looked at it."""
    digest = (await add(desk, folders, tenant, 1)).version.digest
    async with AsyncExitStack() as early:
        with desk.blobs.claim(digest) as claimed:
            assert claimed
            await early.enter_async_context(desk.using(digest, tenant.id))
        async with desk.using(digest, tenant.id):
            with desk.blobs.claim(digest) as claimed:
                assert not claimed
        with desk.blobs.claim(digest) as claimed:
            assert not claimed, "the first one still uses it"
    with desk.blobs.claim(digest) as claimed:
        assert claimed


async def test_a_blob_that_is_nowhere_else_is_not_removed(
    db: Database, folders: Desk, tmp_path: Path, tenant: Tenant, cold: ColdTier
) -> None:
    home = open_desk(db, folders, tmp_path / "v1", cold)
    added = await add(home, folders, tenant, 1)
    assert await make_room(home.blobs, cold, 1) == 0
    assert blobs(home) == {added.version.digest}


@pytest.mark.parametrize("url", ["", "folder", "/folder", "http://host/x", "memory:///", "s3:bucket"])
def test_a_store_of_another_kind_is_refused_by_name(url: str) -> None:
    with pytest.raises(SettingsError, match="STENCILPRESS_COLD_STORE_URL"):
        ColdTier(url)


async def test_a_store_that_is_away_is_told_without_its_secrets(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    cold = ColdTier(f"file://{tmp_path / 'cold'}")
    shutil.rmtree(tmp_path / "cold")
    (tmp_path / "cold").write_text("not a folder")
    with pytest.raises(ColdTierError) as caught:
        await cold.store("ab" * 32, write_adapter(tmp_path / "adapter", GOOD, {}))
    assert str(tmp_path) not in str(caught.value)


async def test_limits_are_the_tenants(db: Database, desk: AdapterDesk, folders: Desk) -> None:
    small = await create_tenant(db, "small", TenantLimits(max_rank=2))
    with pytest.raises(InvalidAdapterError) as caught:
        await desk.enrolment.add_folder(folders.folder, "helper", small.id, small.limits)
    assert {finding.code for finding in caught.value.rejected.findings} == {"rank_over_limit"}
    with pytest.raises(Exception, match="does not exist"):
        await get_adapter(db, small.id, "helper")
