"""The process of `stencilpress serve`: it owns the sockets, starts engine and gateways and starts them again.

It computes nothing and holds no request, so it has no reason to fail; when it ends all the same, by any signal, its
children find their lifeline closed (engine/lifeline.py) and end too. Since it holds both listening sockets, what
connects while a process restarts waits instead of failing.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BAD_SETTINGS = 2
"""Exit code with which a process says that starting it again cannot help."""
FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 10.0
QUIET_S = 60.0
"""A process that lived this long starts again without delay."""
GATEWAYS_LIMIT_S = 3.4
"""From the signal to the end of all gateways: they drain for 3 s."""
ENGINE_LIMIT_S = 3.9
"""From the signal to the end of the engine, which by then serves nobody. What is left of 5 s is for our own exit."""
PROBE_INTERVAL_S = 0.1
PROBE_LIMIT_S = 5.0
STALE_LIMIT_S = 5.0
"""How long children of a server that was killed may still hold its port."""
BACKLOG = 4096
"""Connections that wait while a process starts; the kernel cuts it to its own limit."""
ENGINE_COMMAND = (sys.executable, "-m", "stencilpress.engine")
GATEWAY_COMMAND = (sys.executable, "-m", "stencilpress.gateway")

logger = logging.getLogger(__name__)


class ServeError(Exception):
    """Why the server cannot start, in words for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What `run` needs. ``environment`` is the whole environment of the children; ``port`` 0 takes a free one."""

    data_dir: Path
    host: str
    port: int
    gateways: int
    environment: Mapping[str, str]
    engine_command: Sequence[str] = ENGINE_COMMAND
    gateway_command: Sequence[str] = GATEWAY_COMMAND


def run(settings: ServeSettings, on_ready: Callable[[str], None] = lambda _url: None) -> int:
    """Serve until SIGINT or SIGTERM, then stop everything within 5 s and return 0.

    ``on_ready`` is called with the server's URL when ``GET /readyz`` first answers 200. Raises :class:`ServeError`
    if the address or the data folder is in use, or a process refuses its settings (it has said why on stderr).
    """
    with ExitStack() as stack:
        run_dir = _run_dir(settings.data_dir)
        was_killed = stack.enter_context(_locked(run_dir))
        http = stack.enter_context(_listen_http(settings, STALE_LIMIT_S if was_killed else 0.0))
        engine = stack.enter_context(_listen_engine(run_dir / "engine.sock"))
        lifeline = stack.enter_context(_lifeline())
        gateways = _gateways(settings, http.fileno(), run_dir / "engine.sock", lifeline)
        engines = [_engine(settings, engine.fileno(), lifeline)]
        asyncio.run(_serve(gateways, engines, http, on_ready))
    return 0


@dataclass(eq=False)
class _Child:
    """A process that is started again whenever it ends. ``process`` is the last one, running or not."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    fds: tuple[int, ...]
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone."""
        self.starts += 1
        environment = {**self.environment, "STENCILPRESS_GENERATION": str(self.starts)}
        self.process = subprocess.Popen(
            self.command, env=environment, pass_fds=self.fds, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def terminate(self) -> None:
        """Ask the process to end. It has not been reaped, so its number is still its own."""
        if self.process is not None and self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and all it started."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for the process; what it started ends with it. Returns its exit code, negative for a signal."""
        if self.process is None:
            return 0
        if self.process.returncode is None:
            await _exited(self.process.pid)
            self.kill()
        return self.process.wait()

    async def keep_running(self) -> None:
        """Start, and start again with back-off, until cancelled. Raises :class:`ServeError` for bad settings."""
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_at = loop.time()
            end = await self._run_once()
            if loop.time() - started_at > QUIET_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("the %s ended with %s; starting it again in %.1f s", self.name, end, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _run_once(self) -> str:
        try:
            self.start()
        except OSError as error:  # no memory or process number to be had now
            return str(error)
        status = await self.ended()
        if status == BAD_SETTINGS and self.starts == 1:
            raise ServeError(f"the {self.name} refused its settings; its message is above")
        return f"exit code {status}" if status >= 0 else signal.Signals(-status).name


def _engine(settings: ServeSettings, listener: int, lifeline: int) -> _Child:
    given = {"STENCILPRESS_ENGINE_FD": str(listener), "STENCILPRESS_LIFELINE_FD": str(lifeline)}
    return _Child("engine", settings.engine_command, {**settings.environment, **given}, (listener, lifeline))


def _gateways(settings: ServeSettings, listener: int, engine_socket: Path, lifeline: int) -> list[_Child]:
    given = {
        "STENCILPRESS_HTTP_FD": str(listener),
        "STENCILPRESS_ENGINE_SOCKET": str(engine_socket),
        "STENCILPRESS_LIFELINE_FD": str(lifeline),
    }
    environment = {**settings.environment, **given}
    return [
        _Child(f"gateway {number}", settings.gateway_command, environment, (listener, lifeline))
        for number in range(1, settings.gateways + 1)
    ]


class _StopRequestedError(Exception):
    """SIGINT or SIGTERM."""


async def _serve(
    gateways: list[_Child], engines: list[_Child], http: socket.socket, on_ready: Callable[[str], None]
) -> None:
    children = [*engines, *gateways]
    work = [_stop_requested(), *(child.keep_running() for child in children), _announce(http, on_ready)]
    tasks = [asyncio.create_task(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        began = asyncio.get_running_loop().time()
        await _end(gateways, began + GATEWAYS_LIMIT_S)
        await _end(engines, began + ENGINE_LIMIT_S)
    for error in [task.exception() for task in done]:
        if error is not None and not isinstance(error, _StopRequestedError):
            raise error


async def _stop_requested() -> None:
    """Raise when the first signal comes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    raise _StopRequestedError


async def _end(children: list[_Child], deadline: float) -> None:
    """SIGTERM, and SIGKILL to those that are still there at the deadline."""
    waits = [asyncio.ensure_future(child.ended()) for child in children]
    for child in children:
        child.terminate()
    await asyncio.wait(waits, timeout=deadline - asyncio.get_running_loop().time())
    for child in children:
        child.kill()
    await asyncio.wait(waits)


async def _exited(pid: int) -> None:
    """Wait until a child is a zombie, without reaping it."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _announce(http: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Ask ``/readyz`` until it answers 200, once."""
    host, port = http.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if http.family == socket.AF_INET6 else "127.0.0.1"
    while not await _answers_ready(host, port):  # noqa: ASYNC110 - the event is in another process
        await asyncio.sleep(PROBE_INTERVAL_S)
    on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


async def _answers_ready(host: str, port: int) -> bool:
    """One probe. It waits in the socket's queue while the gateways start."""
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
    except OSError:
        return False


def _run_dir(data_dir: Path) -> Path:
    path = data_dir.resolve() / "v1" / "run"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ServeError(f"the data folder {data_dir} cannot be used: {error.strerror}") from error
    return path


@contextmanager
def _locked(run_dir: Path) -> Iterator[bool]:
    """Hold the data folder for one server. Yields whether the one before was killed: a clean end empties the file."""
    with (run_dir / "lock").open("a+") as lock:
        lock.seek(0)
        owner = lock.read()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(f"process {owner} already serves the data folder {run_dir.parents[1]}") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield owner != ""
        finally:
            lock.truncate(0)


def _listen_http(settings: ServeSettings, patience_s: float) -> socket.socket:
    """Listen on HOST and PORT, trying again for ``patience_s`` while the port is taken."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _listen_tcp(settings.host, settings.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                where = f"HOST {settings.host} PORT {settings.port}"
                raise ServeError(f"cannot listen on {where}: {error.strerror}") from error
        time.sleep(0.1)


def _listen_tcp(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def _lifeline() -> Iterator[int]:
    """The read end of a pipe whose write end no other process gets."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(write_end)
        os.close(read_end)


@contextmanager
def _listen_engine(path: Path) -> Iterator[socket.socket]:
    """Listen on the engine's socket, replacing that of a dead server; the lock is ours, so it is dead."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's address holds only 107 bytes of path
            sock.listen(BACKLOG)
            yield sock
    finally:
        path.unlink(missing_ok=True)
        os.close(folder)
