"""Writes that wait for a client: how long, by what its host has acknowledged."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.slow_clients import SlowClientError, write_in_time

LIMIT_S = 0.02


def request_over(connection: socket.socket | None) -> tuple[web.Request, list[str]]:
    """A request on a connection, and what was done to that."""
    done: list[str] = []
    transport = SimpleNamespace(get_extra_info=lambda _: connection, abort=lambda: done.append("abort"))
    return cast("web.Request", SimpleNamespace(transport=transport)), done


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


def cuts(metrics: Metrics) -> Any:
    return metrics.registry.get_sample_value("stencilpress_slow_clients_cut_total")


@pytest.mark.parametrize("how", ["idle", "closed", "none"])
async def test_a_write_that_nothing_comes_of_ends_with_its_connection(how: str) -> None:
    server, client = connected()
    metrics = Metrics(1, 0)
    with server, client:
        if how == "closed":
            server.close()
        request, done = request_over(None if how == "none" else server)
        with pytest.raises(SlowClientError):
            await write_in_time(request, for_ever(), LIMIT_S, metrics)
    assert (done, cuts(metrics)) == (["abort"], 1)


async def test_a_write_may_take_as_long_as_the_other_side_takes_something() -> None:
    server, client = connected()
    metrics = Metrics(1, 0)
    ended = asyncio.Event()
    with server, client:
        request, done = request_over(server)
        writing = asyncio.create_task(write_in_time(request, cast("Any", ended.wait()), 0.5, metrics))
        for _ in range(20):
            server.send(b"more")
            await asyncio.sleep(0.1)
        ended.set()
        await writing
    assert (done, cuts(metrics)) == ([], 0)


async def test_a_write_that_is_done_leaves_no_timer() -> None:
    request, done = request_over(None)
    metrics = Metrics(1, 0)
    await write_in_time(request, asyncio.sleep(0), LIMIT_S, metrics)
    await asyncio.sleep(3 * LIMIT_S)
    assert (done, cuts(metrics)) == ([], 0)
