"""What a gateway asks of its catalog: nothing on the warm path, nothing while it streams, and changes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.adapters import promote
from stencilpress.gateway.catalog.credentials import revoke_key
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.keys import issue_key
from tests.fakes.engine import Options
from tests.integration.admin_client import admin_client
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway

CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=512, step_delay_s=0.005)
    async with running_gateway(tmp_path, options) as running:
        yield running


@contextmanager
def statements(db: Database) -> Iterator[list[str]]:
    """All that the database is told meanwhile, but for the question after changes."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "catalog_stamps" not in statement and statement != "BEGIN":
            seen.append(statement)

    event.listen(db._engine.sync_engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(db._engine.sync_engine, "before_cursor_execute", note)


async def test_warm_requests_cost_no_sql(gateway: Gateway) -> None:
    changes = gateway.services.changes
    changes._clock = lambda: changes._asked_at  # however late a busy machine asks, the last answer is fresh
    pinned = {"model": "pirate@2", "prompt": "hi", "max_tokens": 2}
    with statements(gateway.services.db) as cold:
        assert (await gateway.post("/v1/chat/completions", CHAT))[0] == 200
        assert (await gateway.post("/v1/completions", pinned))[0] == 200
    assert len(cold) > 1, "the first requests ask for the key and the models"
    with statements(gateway.services.db) as warm:
        for _ in range(10):
            assert (await gateway.post("/v1/chat/completions", CHAT))[0] == 200
            assert (await gateway.post("/v1/completions", pinned))[0] == 200
    assert warm == []


async def test_no_connection_is_held_while_streaming(gateway: Gateway) -> None:
    pool: Any = gateway.services.db._engine.pool
    client = await gateway.openai()
    stream = await client.chat.completions.create(
        model="pirate", messages=[{"role": "user", "content": "x" * 50}], max_tokens=400, stream=True
    )
    chunks = aiter(stream)
    await anext(chunks)
    while pool.checkedout():  # noqa: ASYNC110 - the question after changes takes one for a moment; a pool has no event
        await asyncio.sleep(0)
    assert gateway.services.metrics.answers_open._value.get() == 1
    await stream.close()


async def test_another_processs_changes_hold_with_the_next_word_from_the_catalog(gateway: Gateway) -> None:
    """The other process is a second connection to the same database: nothing in this process knows of it."""
    token = (await issue_key(gateway.services.db, "demo")).token
    headers = {"Authorization": f"Bearer {token}"}
    status, answer = await gateway.post("/v1/chat/completions", CHAT, headers=headers)
    assert (status, answer["model"]) == (200, "pirate@1")
    async with Database(gateway.services.settings.database_url) as other:
        await promote(other, 1, "pirate", 2)
        await gateway.services.changes.poll()
        assert (await gateway.post("/v1/chat/completions", CHAT, headers=headers))[1]["model"] == "pirate@2"
        await revoke_key(other, token.split("_")[1])
        await gateway.services.changes.poll()
        assert (await gateway.post("/v1/chat/completions", CHAT, headers=headers))[0] == 401


async def test_a_plan_that_changes_holds_for_the_next_request(gateway: Gateway) -> None:
    operator = await admin_client(gateway, "other", Role.OPERATOR)
    assert (await gateway.post("/v1/chat/completions", CHAT))[0] == 200
    await operator("PATCH", "/tenants/demo", {"max_tokens": 3, "weight": 4.5})
    assert (await gateway.post("/v1/chat/completions", CHAT))[0] == 400
    assert (await gateway.post("/v1/chat/completions", {**CHAT, "max_tokens": 3}))[0] == 200
    assert gateway.engine.submits[-1].weight == 4.5
