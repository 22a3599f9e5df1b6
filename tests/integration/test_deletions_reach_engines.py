"""A real engine gives back what is deleted by somebody whom its gateway never hears from, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from stencilpress.engine.client import EngineClient, Stream
from stencilpress.engine.messages import Sampling, Submit, pack_tokens
from stencilpress.engine.spec import load_spec, page_geometry
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.records import NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.sweeper import Sweeper
from tests.integration.test_engine_process import LIMIT_S, engine, generate
from tests.unit.tiny_models import save_adapter, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "llama", max_position_embeddings=16384)
    return folder


@pytest.fixture(scope="module")
def adapters_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def digests(adapters_dir: Path, model_dir: Path) -> list[str]:
    return [save_adapter(adapters_dir, model_dir, seed=i, r=4, target_modules=["q_proj"]) for i in range(3)]


async def enrol(db: Database, tenant: Tenant, name: str, digest: str, base_id: str) -> None:
    new = NewVersion(digest, base_id, False, (4,), ("q_proj",), 1000, ("adapter_model.safetensors",))
    await add_version(db, tenant.id, name, new, BaseNames.of((base_id,)))


@asynccontextmanager
async def gateway(db: Database, path: Path) -> AsyncIterator[EngineClient]:
    """As much of one as follows deletions."""
    async with AsyncExitStack() as stack:
        client, changes = EngineClient(path), Changes(db)
        engines = await stack.enter_async_context(Engines([client]))
        await stack.enter_async_context(changes.following())
        await client.wait_ready()
        await stack.enter_async_context(Sweeper(db, engines, changes).following())
        yield client


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - the engine tells when it is asked
        await asyncio.sleep(0.02)


async def memory(client: EngineClient) -> dict[str, tuple[str, int]]:
    """Tier and host bytes of each adapter that the engine has not lost sight of."""
    return {one.digest: (one.tier, one.host_bytes) for one in (await client.adapters()).adapters}


async def test_memory_is_free_after_the_last_request_and_what_others_have_stays(
    tmp_path: Path, db: Database, database_url: str, model_dir: Path, adapters_dir: Path, digests: list[str]
) -> None:
    """A tenant is deleted elsewhere. One of its adapters idles, one runs, one's content another tenant has too."""
    idle, running, common = digests
    spec = load_spec(model_dir)
    acme, zoo = await create_tenant(db, "acme"), await create_tenant(db, "zoo")
    for name, digest in (("idle", idle), ("running", running), ("common", common)):
        await enrol(db, acme, name, digest, spec.base_id)
    await enrol(db, zoo, "common", common, spec.base_id)

    def submit(adapter: str, tokens: int) -> Submit:
        return Submit(0, pack_tokens([1, 2, 3] * 9), adapter, tokens, Sampling(temperature=0), tenant=1, salt=b"one")

    settings = {"pool_bytes": 800 * page_geometry(spec, 64).page_bytes}
    with engine(tmp_path / "sock", model_dir, adapters_dir, **settings):
        async with asyncio.timeout(LIMIT_S), Database(database_url) as elsewhere:
            async with gateway(db, tmp_path / "sock") as client:
                text, _ = await generate(client, submit(idle, 3))
                await generate(client, submit(common, 3))
                stream: Stream = await client.submit(submit(running, 16000))
                await anext(stream)
                shared = (await memory(client))[common]
                await delete_tenant(elsewhere, "acme")
                await until(lambda: is_gone(client, idle))
                seen = await memory(client)
                assert (seen[running][0], seen[common]) == ("hbm", shared), "one runs, zoo has the other in use"
                assert (await client.stats()).running == 1, "the stream goes on"
                client.abort(stream.id)
                await until(lambda: is_gone(client, running))
                stats = await client.stats()
                assert (stats.adapters_hbm, stats.adapters_host) == (1, 1)
                await enrol(elsewhere, zoo, "idle", idle, spec.base_id)
                assert (await generate(client, submit(idle, 3)))[0] == text
            await delete_tenant(elsewhere, "zoo")  # while no gateway is there
            async with gateway(db, tmp_path / "sock") as client:
                await until(lambda: is_gone(client, common))
                await until(lambda: is_gone(client, idle))
                stats = await client.stats()
                assert (stats.pages_free, stats.adapter_host_bytes) == (stats.pages_total, 0)


async def is_gone(client: EngineClient, digest: str) -> bool:
    return (await memory(client))[digest] == ("disk", 0)
