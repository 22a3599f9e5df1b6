"""A fake gateway process: the real :class:`EngineClient` behind a few lines of HTTP, for tests of the supervisor.

``GET /readyz`` answers 200 while an engine is connected, else 503. ``GET /stream/N`` waits for an engine, streams the N
tokens of one request, one a line, and ends with ``finished <reason> <code>``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from stencilpress.engine import lifeline
from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Sampling, Submit, pack_tokens


async def answer(client: EngineClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one connection."""
    path = (await reader.readline()).split()[1].decode()
    if path.startswith("/stream/"):
        await client.wait_ready()
    status = 200 if client.ready else 503
    writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n".encode())
    if path.startswith("/stream/"):
        submit = Submit(0, pack_tokens([1, 2, 3]), "", int(path.removeprefix("/stream/")), Sampling())
        async for tokens, finished in await client.submit(submit):
            writer.write(b"".join(b"%d\n" % token.token for token in tokens))
            if finished is not None:
                writer.write(f"finished {finished.reason} {finished.code}".encode())
            await writer.drain()
    writer.close()


async def main() -> None:
    """Serve until SIGTERM, or for ever with ``--stubborn``. ``--grandchild`` starts a sleeping process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    given = parser.parse_args()
    fd = int(os.environ["STENCILPRESS_LIFELINE_FD"])
    lifeline.hold(fd)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None if given.stubborn else stop.set())
    if given.grandchild:
        code = f"from stencilpress.engine import lifeline; import time; lifeline.hold({fd}); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], pass_fds=(fd,))  # noqa: ASYNC220 - before anything is served
    async with EngineClient(Path(os.environ["STENCILPRESS_ENGINE_SOCKET"])) as client:
        http = socket.socket(fileno=int(os.environ["STENCILPRESS_HTTP_FD"]))
        server = await asyncio.start_server(lambda r, w: answer(client, r, w), sock=http)
        await stop.wait()
        server.close()


if __name__ == "__main__":
    asyncio.run(main())
