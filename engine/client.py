"""A gateway's end of the boundary: submit, abort, ensure, stats. Nothing here shows how the engine is reached.

One asyncio loop owns a client. A step of the engine arrives as one message, is decoded once and handed to the
streams it names. When the engine is gone every open stream gets its terminal message and the client keeps
connecting until an engine answers again; request ids never repeat, so nothing old can reach a new stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import msgspec

from stencilpress.engine.connection import (
    Batch,
    Connection,
    EngineBusyError,
    EngineError,
    EngineUnavailableError,
    Stream,
)
from stencilpress.engine.messages import (
    PROTOCOL_VERSION,
    Adapters,
    AskAdapters,
    AskHeld,
    AskPages,
    AskStats,
    Ensure,
    Ensured,
    Forget,
    Forgotten,
    FromEngine,
    Held,
    Hello,
    Keep,
    Kept,
    Pages,
    Stats,
    Submit,
    Welcome,
)
from stencilpress.engine.ring import (
    REPLIES,
    REQUESTS,
    Channel,
    ProtocolError,
    RingReader,
    RingWriter,
    create_ring,
    decode,
    map_ring,
)

REQUEST_RING_BYTES = 4 << 20
REPLY_RING_BYTES = 2 << 20
WELCOME_BYTES = 4096
HANDSHAKE_LIMIT_S = 30.0
"""Long, because an engine that is still loading leaves the connection waiting in its socket's queue."""
SUBMIT_LIMIT_S = 5.0
SILENCE_LIMIT_S = 60.0
"""After so long without an answer an engine counts as gone. Many times the longest step: no step answers anything."""
PROBE_S = 2.0
"""How often an engine is asked for a sign of life."""
RESPONSIVE_S = 10.0
"""An answer that takes longer is doubted, unless the engine has taken its time before: a step on few cores does."""
SLOWEST_ANSWERS = 4
"""An engine is given so many times its slowest answer."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0
QUIET_S = 5.0
"""A connection that lived this long resets the back-off."""

__all__ = ["Batch", "EngineBusyError", "EngineClient", "EngineError", "EngineUnavailableError", "Stream"]

logger = logging.getLogger(__name__)


class EngineClient:
    """The engine behind the Unix socket ``socket_path``.

    ``await start()`` begins connecting and returns at once; ``await close()`` ends it. Also an async context
    manager. Must be used from the loop it was started in.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        request_ring_bytes: int = REQUEST_RING_BYTES,
        reply_ring_bytes: int = REPLY_RING_BYTES,
        handshake_limit_s: float = HANDSHAKE_LIMIT_S,
        submit_limit_s: float = SUBMIT_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._socket_path = socket_path
        self._request_ring_bytes = request_ring_bytes
        self._reply_ring_bytes = reply_ring_bytes
        self._handshake_limit_s = handshake_limit_s
        self._submit_limit_s = submit_limit_s
        self._silence_limit_s = silence_limit_s
        self._ids = itertools.count(1)
        self._keep = Keep(0)
        self._saying: asyncio.Future[Kept] | None = None
        self._connection: Connection | None = None
        self._connected = asyncio.Event()
        self.crowded = False
        """Whether requests waited for seats when the engine answered last, whoever's they were."""
        self._asked_at: float | None = None
        """When the question was put that has no answer yet."""
        self._patience_s = silence_limit_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin connecting, and go on for as long as the client lives."""
        self._task = asyncio.create_task(self._stay_connected(), name="engine-client")

    async def close(self) -> None:
        """Disconnect. Open streams end with ``engine_lost``; the engine aborts their requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        """Whether an engine is connected."""
        return self._connection is not None and not self._connection.ended.done()

    @property
    def responsive(self) -> bool:
        """Whether an engine is connected and answers within what its own answers have taken so far.

        Until its first step, which may compile for minutes, it has all the time that it needs.
        """
        asked_at = self._asked_at
        return self.ready and (asked_at is None or asyncio.get_running_loop().time() - asked_at < self._patience_s)

    @property
    def open_requests(self) -> int:
        """Requests that the engine has, or is about to get, from this client."""
        return self._connection.open_requests if self._connection is not None else 0

    def open_requests_of(self, tenant: int) -> int:
        """Those of one tenant."""
        return self._connection.open_requests_of(tenant) if self._connection is not None else 0

    async def wait_ready(self) -> Welcome:
        """Wait until an engine is connected."""
        while not self.ready:
            await self._connected.wait()
        return self.welcome

    @property
    def welcome(self) -> Welcome:
        """Limits and generation of the engine. Raises :class:`EngineUnavailableError`."""
        return self._require().welcome

    async def submit(self, request: Submit) -> Stream:
        """Hand a request over; ``request.id`` is replaced by one of our own.

        Waits while the request ring is full. Raises :class:`EngineBusyError` after the time limit,
        :class:`EngineUnavailableError` without an engine, and ``ValueError`` if the prompt could never fit the ring.
        """
        request = msgspec.structs.replace(request, id=next(self._ids))
        return await self._require().submit(request, self._submit_limit_s)

    def abort(self, request_id: int) -> None:
        """Ask the engine to stop a request. Its stream goes on until its terminal message; unknown ids do nothing."""
        if self._connection is not None:
            self._connection.abort(request_id)

    async def ensure(self, adapter: str) -> Ensured:
        """Have an adapter brought into host memory and checked. Raises as :meth:`submit` does."""
        return await self._require().ask(Ensure(next(self._ids), adapter), Ensured, self._submit_limit_s)

    async def stats(self) -> Stats:
        """The engine's gauges and counters. Raises as :meth:`submit` does; a hung engine answers never."""
        return await self._require().ask(AskStats(next(self._ids)), Stats, self._submit_limit_s)

    async def adapters(self, offset: int = 0, limit: int = 64) -> Adapters:
        """What the engine has seen of adapters, the one used last first. Raises as :meth:`submit` does."""
        question = AskAdapters(next(self._ids), offset, limit)
        return await self._require().ask(question, Adapters, self._submit_limit_s)

    async def held(self, after: str = "") -> Held:
        """Adapters that take memory, those whose digests come next after ``after``. Raises as :meth:`submit` does."""
        return await self._require().ask(AskHeld(next(self._ids), after), Held, self._submit_limit_s)

    async def pages(self) -> Pages:
        """Who holds which page of the pool: drawn in parts between its steps. Raises as :meth:`submit` does."""
        return await self._require().ask(AskPages(next(self._ids)), Pages, self._submit_limit_s)

    async def keep(self, pinned: Collection[str], preloaded: Collection[str] = ()) -> Kept:
        """Say which adapters should be at hand, instead of what was said before; said again at every reconnect.

        Raises as :meth:`submit` does; without an engine it is said to the next one all the same.
        """
        self._keep = Keep(0, tuple(pinned), tuple(preloaded))
        return await self._say_keep(self._require())

    async def forget(self, adapter: str) -> Forgotten:
        """Tell that a version is deleted; its memory is freed when its last request has ended. Raises as :meth:`submit`
        does: an engine that starts later knows nothing of it anyway."""
        return await self._require().ask(Forget(next(self._ids), adapter), Forgotten, self._submit_limit_s)

    async def _say_keep(self, connection: Connection) -> Kept:
        keep = msgspec.structs.replace(self._keep, id=next(self._ids))
        return await connection.ask(keep, Kept, self._submit_limit_s)

    def _require(self) -> Connection:
        if self._connection is None or self._connection.ended.done():
            raise EngineUnavailableError("no engine is connected")
        return self._connection

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                connection = await self._connect()
            except (OSError, ProtocolError) as error:
                logger.debug("no engine yet: %s", error)
            else:
                connected_at = loop.time()
                await self._serve(connection)
                if loop.time() - connected_at > QUIET_S:
                    backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _serve(self, connection: Connection) -> None:
        logger.info("connected to engine generation %d", connection.welcome.generation)
        self._connection = connection
        self._asked_at, self._patience_s, self.crowded = None, self._silence_limit_s, False
        self._connected.set()
        self._connected.clear()  # a pulse: waiters look at `ready`, which is false from the very moment of a loss
        try:
            if self._keep.pinned or self._keep.preloaded:
                self._keep_again(connection)
            await self._watch(connection)
            logger.warning("the engine is gone: %s", connection.ended.result())
        finally:
            self._connection = None
            connection.lose("the gateway is shutting down")

    def _keep_again(self, connection: Connection) -> None:
        """Not waited for: an engine that answers nothing is for :meth:`_watch` to end."""
        self._saying = asyncio.ensure_future(self._say_keep(connection))
        self._saying.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _watch(self, connection: Connection) -> None:
        """Return when the connection has ended, and end one that is silent: its streams would wait for ever.

        Two questions in a row must stay unanswered: one may have run out while this process itself was stopped.
        """
        missed, slowest_s = 0, 0.0
        while missed < 2:
            pause_s = 0 if missed else min(PROBE_S, self._silence_limit_s / 4)
            await asyncio.wait([connection.ended], timeout=pause_s)  # cancelling this wait leaves the future alone
            if connection.ended.done():
                return
            asked_at = connection.loop.time()
            self._asked_at = self._asked_at or asked_at
            try:
                async with asyncio.timeout(self._silence_limit_s / 2):
                    stats = await connection.ask(AskStats(next(self._ids)), Stats, self._silence_limit_s)
            except TimeoutError:
                missed += 1
            except EngineUnavailableError:
                return
            else:
                missed, self._asked_at, self.crowded = 0, None, stats.waiting > 0
                if stats.steps:
                    slowest_s = max(slowest_s, connection.loop.time() - asked_at)
                    self._patience_s = max(RESPONSIVE_S, SLOWEST_ANSWERS * slowest_s)
        connection.lose(f"it has not answered for {self._silence_limit_s:g} s")

    async def _connect(self) -> Connection:
        """Connect and shake hands. Raises ``OSError`` (``TimeoutError`` included) or :class:`ProtocolError`."""
        request_bytes, reply_bytes = self._request_ring_bytes, self._reply_ring_bytes
        fds: list[int] = []
        sock = _connect_socket(self._socket_path)
        try:
            fds.append(create_ring("stencilpress-requests", request_bytes))
            fds.append(create_ring("stencilpress-replies", reply_bytes))
            hello = Hello(PROTOCOL_VERSION, os.getpid(), request_bytes, reply_bytes)
            welcome = await self._greet(sock, hello, fds)
            writer = RingWriter(map_ring(fds[0], request_bytes, writable=True), REQUESTS, welcome.generation)
            reader = RingReader(map_ring(fds[1], reply_bytes, writable=False), REPLIES, welcome.generation)
        except BaseException:
            sock.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return Connection(Channel(sock, writer, reader, msgspec.msgpack.Decoder(FromEngine)), welcome)

    async def _greet(self, sock: socket.socket, hello: Hello, fds: list[int]) -> Welcome:
        socket.send_fds(sock, [msgspec.msgpack.encode(hello)], fds)
        async with asyncio.timeout(self._handshake_limit_s):
            data = await asyncio.get_running_loop().sock_recv(sock, WELCOME_BYTES)
        if not data:
            raise ProtocolError("the engine refused the handshake")
        welcome = decode(msgspec.msgpack.Decoder(Welcome), data)
        if welcome.version != PROTOCOL_VERSION:
            raise ProtocolError(f"the engine speaks version {welcome.version}, this gateway {PROTOCOL_VERSION}")
        return welcome


def _connect_socket(path: Path) -> socket.socket:
    """Connect through the folder's descriptor, since a socket address holds only 107 bytes of path."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock
