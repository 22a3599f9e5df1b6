"""What survives `kill -9`, and what must not be left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
from openai import AsyncOpenAI

from bench.server import Server, serving

pytestmark = pytest.mark.timeout(300)

LONG = 700


@pytest.fixture
def fresh(demo_data: Path) -> Iterator[Server]:
    """A server of its own, since the test kills parts of it. Nothing may be left in /dev/shm."""
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208, S108 - names only; the place is the point
    with serving(demo_data, max_model_len="1024") as running:
        yield running
    assert set(os.listdir("/dev/shm")) == before  # noqa: PTH208, S108


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


class Streaming:
    """One long streamed chat; ``started`` is set at its first token."""

    def __init__(self, server: Server, model: str) -> None:
        self.started = asyncio.Event()
        self.finish_reasons: list[str] = []
        self._api = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)
        self.task = asyncio.create_task(self._run(model))

    async def _run(self, model: str) -> None:
        stream = await self._api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Write a long story."}],
            max_tokens=LONG,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            self.started.set()
            self.finish_reasons += [c.finish_reason for c in chunk.choices if c.finish_reason]


async def test_killing_the_engine_ends_streams_with_an_error_and_the_next_request_works(fresh: Server) -> None:
    streams = [Streaming(fresh, model) for model in ("pirate", "support", "smollm2-135m-instruct")]
    await asyncio.gather(*(s.started.wait() for s in streams))
    child(fresh, "engine").kill()
    for stream in streams:
        with pytest.raises(openai.APIError):
            await stream.task
        assert stream.finish_reasons == []
    await eventually(lambda: ready(fresh), 60)
    again = Streaming(fresh, "pirate")
    await again.started.wait()
    again.task.cancel()


async def test_killing_a_gateway_aborts_its_requests_and_a_new_one_attaches_to_the_same_engine(fresh: Server) -> None:
    engine, idle = child(fresh, "engine"), metric(fresh, "stencilpress_engine_pages_kv")
    stream = Streaming(fresh, "pirate")
    await stream.started.wait()
    assert metric(fresh, "stencilpress_engine_pages_kv") > idle
    child(fresh, "gateway").kill()
    with pytest.raises((openai.APIError, Exception)):
        await stream.task
    await eventually(lambda: ready(fresh), 30)
    await eventually(lambda: metric(fresh, "stencilpress_engine_pages_kv") == idle, 10)
    assert child(fresh, "engine").pid == engine.pid
    again = Streaming(fresh, "pirate")
    await again.started.wait()
    again.task.cancel()


async def test_killing_the_supervisor_ends_everything_within_five_seconds(fresh: Server) -> None:
    stream = Streaming(fresh, "pirate")
    await stream.started.wait()
    children = fresh.supervisor.children(recursive=True)
    fresh.supervisor.kill()
    await eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children), 5)
    stream.task.cancel()


async def test_ctrl_c_while_streaming_stops_everything_within_five_seconds(fresh: Server) -> None:
    stream = Streaming(fresh, "pirate")
    await stream.started.wait()
    children = [fresh.supervisor, *fresh.supervisor.children(recursive=True)]
    fresh.supervisor.send_signal(signal.SIGINT)
    await eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children), 5)
    stream.task.cancel()
