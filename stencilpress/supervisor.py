"""The process of `stencilpress serve`: it owns the sockets, starts engines and gateways and starts them again.

It computes nothing and holds no request, so it has no reason to fail; when it ends all the same, by any signal, its
children find their lifeline closed (engine/lifeline.py) and end too. Since it holds all listening sockets, what
connects while a process restarts waits instead of failing. `stencilpress engine` and `stencilpress gateway` are the
same process with one kind of children, for two containers that share the sockets' folder.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stencilpress.children import Child, ServeError, end
from stencilpress.engine.heartbeat import Pulse
from stencilpress.engine.settings import engine_sockets
from stencilpress.engine.threads import usable_cores
from stencilpress.sockets import (
    engine_listener,
    http_port,
    lifeline,
    listen_http,
    locked,
    peer_listener,
    run_dir,
    shared,
)

DRAIN_S = 2.5
GATEWAYS_SLACK_S = 0.9
"""From the end of the drain to that of all gateways."""
ENGINES_SLACK_S = 1.4
"""From the end of the drain to that of the engines, which by then serve nobody. What is left of the 5 s that a stop
takes by default is for our own exit."""
PROBE_INTERVAL_S = 0.1
PROBE_LIMIT_S = 5.0
ENGINE_COMMAND = (sys.executable, "-m", "stencilpress.engine")
GATEWAY_COMMAND = (sys.executable, "-m", "stencilpress.gateway")

__all__ = ["ServeError", "ServeSettings", "Server", "claimed", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a server needs. ``environment`` is the whole environment of the children; ``port`` 0 takes a free one.

    Without ``gateways`` no address is taken. Without ``engines`` those are used that others run at ``engine_socket``,
    as many as the environment's ``STENCILPRESS_ENGINES``. ``devices`` has one accelerator per engine, as
    CUDA_VISIBLE_DEVICES names them, or is empty.
    """

    data_dir: Path
    host: str
    port: int
    gateways: int
    environment: Mapping[str, str]
    engines: int = 1
    devices: Sequence[str] = ()
    engine_socket: Path | None = None
    """By default in the data folder."""
    drain_s: float = DRAIN_S
    tls: bool = False
    engine_command: Sequence[str] = ENGINE_COMMAND
    gateway_command: Sequence[str] = GATEWAY_COMMAND


def run(settings: ServeSettings, on_ready: Callable[[str], None] = lambda _url: None) -> int:
    """Claim what is needed and serve; see :func:`claimed` and :meth:`Server.run`."""
    with claimed(settings) as server:
        return server.run(on_ready)


@contextmanager
def claimed(settings: ServeSettings) -> Iterator[Server]:
    """Take the address and the data folder, so that whatever is done before serving is not done in vain.

    Raises :class:`ServeError` if one of them is in use.
    """
    with ExitStack() as stack:
        was_killed, http = False, None
        folder = run_dir(settings.data_dir)
        lock, what = folder / "lock", f"the data folder {folder.parents[1]}"
        if settings.engine_socket is None:
            first = folder / "engine.sock"
            was_killed = stack.enter_context(locked(lock, what))
        else:
            first = settings.engine_socket
            stack.enter_context(shared(lock, what))
            if settings.engines:
                stack.enter_context(locked(first.with_suffix(".lock"), f"the socket {first}"))
        if settings.gateways:
            http = stack.enter_context(http_port(settings.host, settings.port, was_killed=was_killed))
        yield Server(settings, first, http)


@dataclass(frozen=True, slots=True)
class Server:
    """A server whose address and folder are taken."""

    settings: ServeSettings
    engine_socket: Path
    http: socket.socket | None
    stack: ExitStack = field(default_factory=ExitStack)

    def run(self, on_ready: Callable[[str], None] = lambda _url: None) -> int:
        """Serve until SIGINT or SIGTERM, then stop everything, within 5 s by default, and return 0.

        ``on_ready`` is called with the server's URL when ``GET /readyz`` first answers 200. Raises
        :class:`ServeError` if a process refuses its settings (it has said why on stderr).
        """
        with self.stack:
            if self.http is not None:
                listen_http(self.http, self.settings.host)
            line = self.stack.enter_context(lifeline())
            sockets = engine_sockets(self.engine_socket, self.settings.engines)
            engines = [self._engine(index, path, line) for index, path in enumerate(sockets)]
            asyncio.run(_serve(self.settings, self._gateways(line), engines, self.http, on_ready))
        return 0

    def _engine(self, index: int, path: Path, line: int) -> Child:
        settings = self.settings
        listener = self.stack.enter_context(engine_listener(path)).fileno()
        pulse = self._pulse()
        given = {
            "STENCILPRESS_ENGINE_FD": str(listener),
            "STENCILPRESS_HEARTBEAT_FD": str(pulse.fd),
            "STENCILPRESS_LIFELINE_FD": str(line),
        }
        environment = {**settings.environment, **given}
        if settings.devices:
            environment["CUDA_VISIBLE_DEVICES"] = settings.devices[index]
        if settings.engines > 1 and not environment.get("STENCILPRESS_THREADS"):
            environment["STENCILPRESS_THREADS"] = str(max(1, usable_cores() // settings.engines))
        name = "engine" if settings.engines == 1 else f"engine {index + 1}"
        return Child(name, settings.engine_command, environment, (listener, pulse.fd, line), pulse)

    def _gateways(self, line: int) -> list[Child]:
        settings = self.settings
        if self.http is None:
            return []
        listener = self.http.fileno()
        peers = [self.stack.enter_context(peer_listener()) for _ in range(settings.gateways)]
        given = {
            "STENCILPRESS_HTTP_FD": str(listener),
            "STENCILPRESS_ENGINE_SOCKET": str(self.engine_socket),
            "STENCILPRESS_LIFELINE_FD": str(line),
            "STENCILPRESS_PEERS": ",".join(name for _, name in peers),
        }
        if settings.engines:
            given["STENCILPRESS_ENGINES"] = str(settings.engines)
        environment = {**settings.environment, **given}
        return [
            self._gateway(number, environment, listener, peer.fileno(), line)
            for number, (peer, _) in enumerate(peers, 1)
        ]

    def _gateway(self, number: int, environment: Mapping[str, str], listener: int, peer: int, line: int) -> Child:
        pulse = self._pulse()
        own = {
            "STENCILPRESS_GATEWAY": str(number),
            "STENCILPRESS_PEER_FD": str(peer),
            "STENCILPRESS_HEARTBEAT_FD": str(pulse.fd),
        }
        fds = (listener, peer, pulse.fd, line)
        return Child(f"gateway {number}", self.settings.gateway_command, {**environment, **own}, fds, pulse)

    def _pulse(self) -> Pulse:
        pulse = Pulse()
        self.stack.callback(pulse.close)
        return pulse


class _StopRequestedError(Exception):
    """SIGINT or SIGTERM."""


async def _serve(
    settings: ServeSettings,
    gateways: list[Child],
    engines: list[Child],
    http: socket.socket | None,
    on_ready: Callable[[str], None],
) -> None:
    children = [*engines, *gateways]
    work = [
        _stop_requested(),
        *(child.keep_running() for child in children),
        *(child.keep_alive() for child in children),
    ]
    if http is not None:
        work.append(_announce(http, on_ready, tls=settings.tls))
    tasks = [asyncio.create_task(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if http is not None:
            http.close()  # several gateways close theirs as they drain: who connects then is refused at once
        drained_at = asyncio.get_running_loop().time() + settings.drain_s
        await end(gateways, drained_at + GATEWAYS_SLACK_S)
        await end(engines, drained_at + ENGINES_SLACK_S)
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


async def _announce(http: socket.socket, on_ready: Callable[[str], None], *, tls: bool) -> None:
    """Ask ``/readyz`` until it answers 200, once."""
    host, port = http.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if http.family == socket.AF_INET6 else "127.0.0.1"
    while not await _answers_ready(host, port, tls=tls):  # noqa: ASYNC110 - the event is in another process
        await asyncio.sleep(PROBE_INTERVAL_S)
    scheme = "https" if tls else "http"
    on_ready(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")


async def _answers_ready(host: str, port: int, *, tls: bool) -> bool:
    """One probe. It waits in the socket's queue while the gateways start."""
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=_own_certificate() if tls else None)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
    except OSError:
        return False


def _own_certificate() -> ssl.SSLContext:
    """We know whom we ask, and the certificate names another host than a loopback address."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
