"""A gateway process that is killed or stopped: each request it had admitted has exactly one row."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import select

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRequestRow
from stencilpress.gateway.usage.journal import SUFFIX
from stencilpress.gateway.usage.recorder import Recorder
from tests.integration.test_gateway_process import Started, started

__all__ = ["started"]  # the fixture


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database(f"sqlite:///{tmp_path / 'catalog.db'}") as database:
        yield database


async def rows_of(db: Database) -> list[Any]:
    async with db.read() as session:
        return list((await session.execute(select(UsageRequestRow.__table__))).all())


async def read_all(response: aiohttp.ClientResponse) -> int:
    """Tokens that arrived until the connection broke; the engine echoes "abc", a token a character."""
    tokens = 0
    try:
        async for line in response.content:
            if line.startswith(b'data: {"id"'):
                tokens += len(json.loads(line[6:])["choices"][0]["text"])
    except aiohttp.ClientError:
        pass
    return tokens


async def test_a_killed_gateway_leaves_a_row_for_each_request_true_to_a_step(
    started: Started, db: Database, tmp_path: Path
) -> None:
    streams = [await started.stream(50_000) for _ in range(20)]
    short = [await started.stream(5) for _ in range(10)]
    for response in short:
        assert (await response.content.read()).endswith(b"[DONE]\n\n")
    reading = [asyncio.create_task(read_all(response)) for response in streams]
    for _ in range(3):
        await asyncio.gather(*[(await started.stream(20)).read() for _ in range(3)])
    started.process.kill()
    arrived = [1 + tokens for tokens in await asyncio.gather(*reading)]  # `stream` has read the first line
    assert await started.exit_code() == -signal.SIGKILL

    for _ in range(2):  # recovering twice changes nothing
        recorder = Recorder(db, tmp_path / "usage", 1 << 20)
        await recorder.recover()
        recorder.close()
    rows = await rows_of(db)
    assert len(rows) == 20 + 10 + 9
    assert len({row.request_id for row in rows}) == len(rows)
    lost = {row.request_id: row for row in rows if row.status == "lost"}
    assert len(lost) == 20
    for response, tokens in zip(streams, arrived, strict=True):
        row = lost[response.headers["x-request-id"]]
        assert row.prompt_tokens == 3
        in_flight = 65_536 // 150  # what was written, and lay in the sockets' buffers when the connection was reset
        assert tokens <= row.completion_tokens <= tokens + 1 + in_flight
    assert sum(row.completion_tokens for row in rows if row.status == "completed") == 10 * 5 + 9 * 20
    assert not list((tmp_path / "usage").glob(f"*{SUFFIX}"))


async def test_a_stopped_gateway_writes_its_rows_before_it_ends(started: Started, db: Database, tmp_path: Path) -> None:
    streams = [await started.stream(50) for _ in range(10)]
    started.process.send_signal(signal.SIGTERM)
    for response in streams:
        assert (await response.content.read()).endswith(b"[DONE]\n\n")
    assert await started.exit_code() == 0
    rows = await rows_of(db)
    assert [(row.status, row.completion_tokens) for row in rows] == [("completed", 50)] * 10
    assert not list((tmp_path / "usage").iterdir())


@pytest.mark.parametrize("started", [0.2], indirect=True)
async def test_streams_that_the_end_of_a_gateway_cuts_off_have_rows_too(
    started: Started, db: Database, tmp_path: Path
) -> None:
    streams = [await started.stream(50_000) for _ in range(5)]
    started.process.send_signal(signal.SIGTERM)
    for response in streams:
        await response.content.read()
    assert await started.exit_code() == 1
    rows = await rows_of(db)
    assert [(row.status, row.error_code) for row in rows] == [("failed", "service_unavailable")] * 5
    assert all(0 < row.completion_tokens < 50_000 for row in rows)
    assert not list((tmp_path / "usage").iterdir())
