"""The engine's end: whatever one gateway does, the others and the engine go on, and nothing is leaked."""

from __future__ import annotations

import errno
import gc
import os
import pickle  # noqa: TID251 - the attack, not a format
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stencilpress.engine.link import MAX_CONNECTIONS, Closed, Link, Received
from stencilpress.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AskStats,
    Finished,
    Hello,
    Sampling,
    Step,
    Submit,
    Token,
    pack_tokens,
)
from stencilpress.engine.ring import MIN_RING_BYTES, create_ring
from tests.fakes.engine import Options, listen
from tests.fakes.peer import Peer, connect
from tests.shared_memory import shared_memory_names

ROOT = Path(__file__).parents[2]
LIMIT_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def link(path: Path) -> Iterator[Link]:
    link = Link(listen(path), Options(generation=3).welcome())
    yield link
    link.close()


def attach(link: Link, path: Path, **sizes: int) -> Peer:
    """A gateway that has shaken hands."""
    peer = Peer(path, **sizes)
    peer.hello()
    link.poll(LIMIT_S)  # accepts
    link.poll(LIMIT_S)  # greets
    peer.welcomed()
    return peer


def events(link: Link, count: int) -> list[Received | Closed]:
    """The next ``count`` events, however many polls they take."""
    found: list[Received | Closed] = []
    while len(found) < count:
        found += link.poll(LIMIT_S)
    return found


def token_step(number: int) -> Step:
    return Step((Token(1, number, -0.25, ((number, -0.25),) * 5),), ())


def test_messages_go_both_ways_in_order(link: Link, path: Path) -> None:
    peer = attach(link, path)
    submit = Submit(1, pack_tokens([1, 2]), "", 8, Sampling(seed=5, logit_bias={3: -1.5}), (2,), 7, 0.5, b"salt")
    peer.send(submit)
    peer.send(Abort(1))
    assert events(link, 2) == [Received(1, submit), Received(1, Abort(1))]
    assert link.send(1, token_step(9))
    assert link.send(1, Step((), (Finished(1, "stop", 2, 1),)))
    assert peer.receive() == [token_step(9), Step((), (Finished(1, "stop", 2, 1),))]
    peer.close()
    [closed] = events(link, 1)
    assert isinstance(closed, Closed)
    assert closed.connection == 1
    assert link.send(1, token_step(1)), "a message to a gateway that is gone counts as sent"
    assert not link.writable(1)


def test_the_welcome_carries_generation_and_limits(link: Link, path: Path) -> None:
    peer = Peer(path)
    peer.hello()
    link.poll(LIMIT_S)
    link.poll(LIMIT_S)
    assert peer.welcomed() == Options(generation=3).welcome()
    peer.close()


def test_wake_ends_a_poll_from_another_thread(link: Link) -> None:
    waker = threading.Timer(0.05, link.wake)
    waker.start()
    assert link.poll(None) == []
    waker.join()


def test_wake_and_close_after_close_do_nothing_to_descriptors_that_came_since(path: Path) -> None:
    link = Link(listen(path), Options().welcome())
    link.close()
    pipes = [os.pipe() for _ in range(4)]
    link.wake()
    link.close()
    for read_end, write_end in pipes:
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 1)
        os.close(read_end)
        os.close(write_end)


def pickle_bomb(canary: Path) -> bytes:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return os.mkdir, (str(canary),)

    return pickle.dumps(Bomb())


BAD_PAYLOADS = {
    "random": b"\xc1" * 40,
    "empty": b"",
    "unknown-tag": msgspec.msgpack.encode(["shutdown", 1]),
    "wrong-type": msgspec.msgpack.encode(["abort", "one"]),
    "too-short": msgspec.msgpack.encode(["submit", 1]),
    "reply-as-request": msgspec.msgpack.encode(token_step(1)),
    "nested": b"\x93" + msgspec.msgpack.encode("abort") + b"\x01" + b"\x91" * 100_000 + b"\x00",
    "huge-array": b"\xdd\xff\xff\xff\xff",
    "half-a-token": msgspec.msgpack.encode(Submit(1, b"123", "", 1, Sampling())),
    "trailing": msgspec.msgpack.encode(Abort(1)) + b"\x00",
}


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_an_undecodable_message_drops_its_sender_alone(link: Link, path: Path, payload: bytes) -> None:
    bad, good = attach(link, path), attach(link, path)
    bad.send(Abort(5))
    bad.send_payload(payload)
    first, second = events(link, 2)
    assert first == Received(1, Abort(5)), "what came before the garbage counts"
    assert isinstance(second, Closed)
    assert second.connection == 1
    assert "undecodable" in second.reason or "whole token ids" in second.reason
    good.send(Abort(6))
    assert events(link, 1) == [Received(2, Abort(6))]
    assert link.send(2, token_step(1))
    assert good.receive() == [token_step(1)]
    assert bad.sock.recv(100) == b""
    bad.close()
    good.close()


def test_a_pickle_is_never_run(link: Link, path: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bomb = pickle_bomb(canary)
    peer = attach(link, path)
    peer.send_payload(bomb)
    assert isinstance(events(link, 1)[0], Closed)
    assert not canary.exists()
    pickle.loads(bomb)  # noqa: S301 - the bomb is live: the test is not empty
    assert canary.exists()
    peer.close()


BAD_PACKETS: dict[str, Callable[[Peer], bytes]] = {
    "short": lambda _: b"SPp1",
    "long": lambda _: b"SPp1" + bytes(17),
    "tag": lambda _: bytes(20),
    "pickle": lambda _: pickle_bomb(Path("/nonexistent")),
    "ahead": lambda peer: b"SPp1" + (peer.sizes[0] + 1).to_bytes(8, "little") + bytes(8),
    "half-frame": lambda _: b"SPp1" + (3).to_bytes(8, "little") + bytes(8),
    "unwritten": lambda _: b"SPp1" + (16).to_bytes(8, "little") + bytes(8),
    "acknowledges-unsent": lambda _: b"SPp1" + bytes(8) + (1).to_bytes(8, "little"),
}


@pytest.mark.parametrize("packet", BAD_PACKETS.values(), ids=BAD_PACKETS)
def test_a_bad_packet_drops_its_sender_alone(link: Link, path: Path, packet: Callable[[Peer], bytes]) -> None:
    bad, good = attach(link, path), attach(link, path)
    bad.sock.send(packet(bad))
    [closed] = events(link, 1)
    assert isinstance(closed, Closed)
    assert closed.connection == 1
    good.send(AskStats(1))
    assert events(link, 1) == [Received(2, AskStats(1))]
    bad.close()
    good.close()


def unsealed(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def hello(version: int = PROTOCOL_VERSION, size: int = MIN_RING_BYTES) -> bytes:
    return msgspec.msgpack.encode(Hello(version, 1, size, size))


def ring() -> int:
    return create_ring("test", MIN_RING_BYTES)


BAD_HELLOS: dict[str, Callable[[], tuple[bytes, list[int]]]] = {
    "empty": lambda: (b"", []),
    "garbage": lambda: (b"GET / HTTP/1.1\r\n\r\n", []),
    "nested": lambda: (b"\x91" * 4000, []),
    "too-long": lambda: (hello() + bytes(5000), [ring(), ring()]),
    "version": lambda: (hello(version=PROTOCOL_VERSION + 1), [ring(), ring()]),
    "no-rings": lambda: (hello(), []),
    "one-ring": lambda: (hello(), [ring()]),
    "three-rings": lambda: (hello(), [ring(), ring(), ring()]),
    "unsealed-requests": lambda: (hello(), [unsealed(MIN_RING_BYTES), ring()]),
    "unsealed-replies": lambda: (hello(), [ring(), unsealed(MIN_RING_BYTES)]),
    "smaller-than-announced": lambda: (hello(size=2 * MIN_RING_BYTES), [ring(), ring()]),
    "negative-size": lambda: (hello(size=-1), [ring(), ring()]),
    "sockets": lambda: (hello(), [socket.socket().detach(), socket.socket().detach()]),
}


@pytest.mark.parametrize("make", BAD_HELLOS.values(), ids=BAD_HELLOS)
def test_a_bad_hello_is_refused_without_a_leak(
    link: Link, path: Path, make: Callable[[], tuple[bytes, list[int]]]
) -> None:
    before = resources()
    data, fds = make()
    sock = connect(path)
    socket.send_fds(sock, [data], fds)
    for fd in fds:
        os.close(fd)
    assert link.poll(LIMIT_S) == link.poll(LIMIT_S) == []
    assert sock.recv(100) == b""
    sock.close()
    assert resources() == before


def test_a_silent_connection_is_closed_in_time(link: Link, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stencilpress.engine.link.HANDSHAKE_LIMIT_S", 0.0)
    sock = connect(path)
    link.poll(LIMIT_S)
    link.poll(0)
    assert sock.recv(100) == b""
    sock.close()


def test_a_hello_that_waited_through_a_long_step_counts(
    link: Link, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stencilpress.engine.link.HANDSHAKE_LIMIT_S", 0.05)
    peer = Peer(path)
    link.poll(LIMIT_S)
    peer.hello()
    time.sleep(0.1)  # the step
    link.poll(LIMIT_S)
    assert peer.welcomed().generation == 3
    peer.close()


def test_connections_are_bounded(link: Link, path: Path) -> None:
    socks = [connect(path) for _ in range(MAX_CONNECTIONS + 1)]
    for _ in socks:
        link.poll(LIMIT_S)
    assert socks[-1].recv(100) == b""
    socks[0].close()
    link.poll(LIMIT_S)
    peer = attach(link, path)
    for sock in socks:
        sock.close()
    peer.close()


def test_a_full_reply_ring_refuses_until_half_is_free_and_loses_nothing(link: Link, path: Path) -> None:
    peer, other = attach(link, path), attach(link, path)
    sent = 0
    while link.send(1, token_step(sent)):
        sent += 1
    assert not link.writable(1)
    assert link.writable(2)
    assert link.send(2, token_step(0)), "the other gateway is not held up"
    assert link.send(1, Step((), (Finished(1, "stop", 1, 1),))), "terminal messages have room of their own"
    assert not link.send(1, token_step(sent))
    assert peer.receive() == [*map(token_step, range(sent)), Step((), (Finished(1, "stop", 1, 1),))]
    assert link.poll(LIMIT_S) == []
    assert link.writable(1)
    assert link.send(1, token_step(sent))
    assert peer.receive() == [token_step(sent)]
    peer.close()
    other.close()


def test_a_full_socket_delays_positions_and_loses_nothing(link: Link, path: Path) -> None:
    peer = attach(link, path, reply_bytes=1 << 20)
    count = 5000  # packets of which a socket's buffer takes a few hundred
    for number in range(count):
        assert link.send(1, token_step(number))
    received = peer.receive()
    while len(received) < count:
        link.poll(LIMIT_S)
        received += peer.receive()
    assert received == [*map(token_step, range(count))]
    peer.close()


def test_a_reply_that_no_ring_of_that_gateway_could_hold_drops_it(link: Link, path: Path) -> None:
    peer = attach(link, path)
    assert link.send(1, Step(tuple(Token(1, 2**31 - n) for n in range(5000)), ()))
    [closed] = events(link, 1)
    assert isinstance(closed, Closed)
    peer.close()


def test_a_gateway_whose_packets_the_kernel_refuses_is_dropped_alone(
    link: Link, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, other = attach(link, path), attach(link, path)

    def refuse() -> bool:
        raise OSError(errno.ENOBUFS, "no buffer space available")

    monkeypatch.setattr(link._connections[1].channel, "publish", refuse)
    assert link.send(1, token_step(1)), "there is nothing to be kept for it"
    assert isinstance(link.poll(LIMIT_S)[0], Closed)
    assert link.send(2, token_step(1))
    assert other.receive() == [token_step(1)]
    peer.close()
    other.close()


def test_what_an_engine_wrote_before_it_ended_is_still_read(path: Path) -> None:
    link = Link(listen(path), Options().welcome())
    peer = attach(link, path)
    peer.send(Abort(1))  # stays unread in the engine's socket, which makes the kernel report a reset to us
    link.send(1, token_step(1))
    link.close()
    assert peer.receive() == [token_step(1)]
    assert not peer.channel.receive()
    peer.close()


def resources() -> tuple[int, int, int, int]:
    """Open descriptors, mappings of rings, all of /dev/shm, and threads of this process."""
    gc.collect()  # what earlier tests left to the collector is closed now, and not while one counts
    maps = sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        maps,
        len(shared_memory_names()),
        threading.active_count(),
    )


KILLED_GATEWAY = """
import asyncio, sys
from pathlib import Path
from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Sampling, Submit, pack_tokens

async def main():
    async with EngineClient(Path(sys.argv[1])) as client:
        await client.wait_ready()
        stream = await client.submit(Submit(0, pack_tokens([1]), "", 100, Sampling()))
        async for _ in stream:
            pass

asyncio.run(main())
"""


def test_twenty_killed_gateways_leave_nothing_behind(link: Link, path: Path) -> None:
    bystander = attach(link, path)
    before = resources()
    for cycle in range(2, 22):
        command = [sys.executable, "-c", KILLED_GATEWAY, str(path)]
        with subprocess.Popen(command, cwd=ROOT) as gateway:
            [received] = events(link, 1)
            assert isinstance(received, Received)
            assert received.connection == cycle
            link.send(cycle, token_step(1))
            gateway.kill()
            [closed] = events(link, 1)
            assert isinstance(closed, Closed)
            assert closed.connection == cycle
    assert resources() == before
    bystander.send(Abort(1))
    assert events(link, 1) == [Received(1, Abort(1))]
    bystander.close()


def test_the_wire_loads_neither_torch_nor_http_nor_sql() -> None:
    code = (
        "import sys; import stencilpress.engine.link, stencilpress.engine.client, stencilpress.engine.lifeline\n"
        "print(sorted({'torch', 'aiohttp', 'sqlalchemy', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
