"""What the supervisor holds for its children: listening sockets, the data folder's lock, the lifeline."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stencilpress.children import ServeError

BACKLOG = 4096
"""Connections that wait while a process starts; the kernel cuts it to its own limit."""
STALE_LIMIT_S = 5.0
"""How long children of a server that was killed may still hold its port."""


def run_dir(data_dir: Path) -> Path:
    """The folder of run-time files, closed to other users. Raises :class:`ServeError`."""
    path = data_dir.resolve() / "v1" / "run"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ServeError(f"the data folder {data_dir} cannot be used: {error.strerror}") from error
    return path


@contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Hold a lock file; ``what`` it stands for is named to who comes second, with the holder's process number.

    Yields whether the one before was killed: a clean end empties the file. Raises :class:`ServeError`.
    """
    with path.open("a+") as lock:
        lock.seek(0)
        owner = lock.read()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = f"process {owner} already serves" if owner else "a gateway or an engine of its own uses"
            raise ServeError(f"{holder} {what}") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield owner != ""
        finally:
            lock.truncate(0)


@contextmanager
def shared(path: Path, what: str) -> Iterator[None]:
    """Keep out who wants the lock file alone (:func:`locked`), nobody else. Raises :class:`ServeError`."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ServeError(f"process {lock.read()} already serves {what}") from None
        yield


@contextmanager
def http_port(host: str, port: int, *, was_killed: bool) -> Iterator[socket.socket]:
    """Take HOST and PORT, without listening yet; port 0 takes a free one. Raises :class:`ServeError`."""
    with _bound(host, port, STALE_LIMIT_S if was_killed else 0.0) as sock:
        yield sock


def listen_http(sock: socket.socket, host: str) -> None:
    """Raises :class:`ServeError` if another process has listened on the port since it was taken."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _refused(host, sock.getsockname()[1], error) from error


def _bound(host: str, port: int, patience_s: float) -> socket.socket:
    """Bind, trying again for ``patience_s`` while the port is taken."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _bind_tcp(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise _refused(host, port, error) from error
        time.sleep(0.1)


def _refused(host: str, port: int, error: OSError) -> ServeError:
    return ServeError(f"cannot listen on HOST {host} PORT {port}: {error.strerror}")


def _bind_tcp(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def engine_listener(path: Path) -> Iterator[socket.socket]:
    """Listen on an engine's socket, replacing that of a dead server; the lock is ours, so it is dead."""
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


@contextmanager
def peer_listener() -> Iterator[tuple[socket.socket, str]]:
    """A socket by which gateways ask one of them, and its name, which leaves nothing on any disk.

    The kernel picks the name, in Linux's abstract space: it is that of the bytes behind a zero byte.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind("")
        sock.listen(BACKLOG)
        yield sock, sock.getsockname()[1:].decode()


@contextmanager
def lifeline() -> Iterator[int]:
    """The read end of a pipe whose write end no other process gets."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(write_end)
        os.close(read_end)
