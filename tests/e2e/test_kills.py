"""What survives `kill -9`, and what must not be left behind."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
from openai import AsyncOpenAI

from bench.server import Server, serving
from tests.demo_base import NAME as BASE
from tests.shared_memory import shared_memory_names

pytestmark = pytest.mark.timeout(300)

LONG = 700


@pytest.fixture
def fresh(demo_data: Path) -> Iterator[Server]:
    """A server of its own, since the test kills parts of it. Nothing may be left in /dev/shm."""
    before = shared_memory_names()
    with serving(demo_data, max_model_len="1024") as running:
        yield running
    assert shared_memory_names() == before


def child(server: Server, kind: str) -> psutil.Process:
    """The one process of a kind."""
    [found] = [p for p in server.supervisor.children(recursive=True) if f"stencilpress.{kind}" in " ".join(p.cmdline())]
    return found


async def eventually(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.05)


def ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#"))


@dataclass(slots=True)
class Reader:
    """Reads one long streamed chat; ``started`` is set at its first token."""

    task: asyncio.Task[None]
    started: asyncio.Event
    finish_reasons: list[str]


@asynccontextmanager
async def reading(server: Server, model: str) -> AsyncIterator[Reader]:
    """A reader that has its first token; it is stopped at the end."""
    started, reasons = asyncio.Event(), list[str]()

    async def read() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as api:
            stream = await api.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Write a long story."}],
                max_tokens=LONG,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                started.set()
                reasons.extend(c.finish_reason for c in chunk.choices if c.finish_reason)

    task = asyncio.create_task(read())
    try:
        async with asyncio.timeout(60):
            await started.wait()
        yield Reader(task, started, reasons)
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()


def gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_killing_the_engine_ends_streams_with_an_error_and_the_next_request_works(fresh: Server) -> None:
    async with reading(fresh, "pirate") as one, reading(fresh, "support") as two, reading(fresh, BASE) as three:
        child(fresh, "engine").kill()
        for reader in (one, two, three):
            with pytest.raises(openai.APIError):
                await reader.task
            assert reader.finish_reasons == []
    await eventually(lambda: ready(fresh), 60)
    async with reading(fresh, "pirate"):
        pass


async def test_killing_a_gateway_aborts_its_requests_and_a_new_one_attaches_to_the_same_engine(fresh: Server) -> None:
    engine, idle = child(fresh, "engine"), metric(fresh, "stencilpress_engine_pages_kv")
    async with reading(fresh, "pirate") as reader:
        assert metric(fresh, "stencilpress_engine_pages_kv") > idle
        child(fresh, "gateway").kill()
        await asyncio.wait([reader.task])
        assert reader.task.exception() is not None
        assert reader.finish_reasons == []
    await eventually(lambda: ready(fresh), 30)
    await eventually(lambda: metric(fresh, "stencilpress_engine_pages_kv") == idle, 60)
    assert child(fresh, "engine").pid == engine.pid
    async with reading(fresh, "pirate"):
        pass


async def test_killing_the_supervisor_ends_everything_within_five_seconds(fresh: Server) -> None:
    async with reading(fresh, "pirate"):
        children = fresh.supervisor.children(recursive=True)
        fresh.supervisor.kill()
        await eventually(lambda: all(gone(process) for process in children), 5)


async def test_ctrl_c_while_streaming_stops_everything_within_five_seconds(fresh: Server) -> None:
    async with reading(fresh, "pirate"):
        processes = [fresh.supervisor, *fresh.supervisor.children(recursive=True)]
        fresh.supervisor.send_signal(signal.SIGINT)
        await eventually(lambda: all(gone(process) for process in processes), 5)
