"""A fake engine: the real :class:`Link`, and in place of a model a generator whose output a test can foretell.

Output token ``i`` of a request is ``prompt[i % len(prompt)]`` (an echo; token 0 for an empty prompt). A request ends
with ``length`` after ``max_tokens``, with ``stop`` after a token of ``stop_ids``, with ``aborted`` when asked, and with
an error for a prompt that fills ``max_model_len`` (``context_exceeded``) or an adapter named in ``missing``
(``adapter_unavailable``). An adapter in ``reversing`` echoes the prompt backwards, one in ``broken`` has NaN for every
logprob. Where logprobs are asked for, each token has :data:`LOGPROB` and is its own only
alternative. Every adapter not in ``missing`` can be ensured, and all may be kept. What it shows of adapters and pages
is what a test puts into ``adapters`` and ``pages``. :class:`Stats` counts requests, steps and tokens truly and has
zeros for pages. Adapters that a test puts into ``held`` are held until they are to be forgotten.

As a process, in place of ``python -m stencilpress.engine`` and with its variables (``STENCILPRESS_ENGINE_FD`` or
``--socket PATH``, ``STENCILPRESS_LIFELINE_FD``, ``STENCILPRESS_GENERATION``; ``STENCILPRESS_MODEL_DIR``, if set, gives
the limits of a real base)::

    python -m tests.fakes.engine [--tokens-per-step 1] [--step-delay-ms 0] [--crash-after N] [--hang-after N]
        [--missing DIGEST]... [--max-model-len N] [--socket PATH]

It shows its signs of life as the engine does (``STENCILPRESS_HEARTBEAT_FD``, ``STENCILPRESS_HANG_LIMIT_S``).
``--crash-after`` kills the process with SIGKILL once N tokens were sent, ``--hang-after`` stops it from reading and
writing then, with its connections open. Restarts read the same options.

In a thread, for unit tests::

    with running_engine(tmp_path / "engine.sock", Options(step_delay_s=0.01)) as engine:
        async with EngineClient(tmp_path / "engine.sock") as client:
            await client.wait_ready()
            stream = await client.submit(Submit(0, pack_tokens([5, 6]), "", 4, Sampling()))
            assert [t.token for tokens, _ in [b async for b in stream] for t in tokens] == [5, 6, 5, 6]
        engine.submits, engine.aborts, engine.keeps   # what arrived so far
        engine.heard                             # how many messages of each kind
        engine.waiting                           # how many it says that wait for a seat
        engine.parked                            # whether a gateway's reply ring is full
        engine.pause(), engine.resume()          # no tokens while paused; requests and aborts are taken in
        engine.hung()                            # a context in which it does nothing at all
        engine.crash()                           # closes everything at once, as the end of a process does
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from stencilpress.engine import lifeline
from stencilpress.engine.heartbeat import CPU_LIMIT_S, Heartbeat
from stencilpress.engine.link import Closed, Link, Received
from stencilpress.engine.messages import (
    MAX_HELD_SHOWN,
    PROTOCOL_VERSION,
    Abort,
    Adapters,
    AdapterSeen,
    AskAdapters,
    AskHeld,
    AskPages,
    AskStats,
    Ensure,
    Ensured,
    Finished,
    FinishReason,
    Forget,
    Forgotten,
    FromEngine,
    Held,
    Keep,
    Kept,
    Pages,
    Stats,
    Step,
    Submit,
    ToEngine,
    Token,
    Welcome,
    unpack_tokens,
)
from stencilpress.engine.plan import RequestKey
from stencilpress.engine.spec import load_spec

LOGPROB = -0.5


@dataclass(frozen=True)
class Options:
    """See the module. ``crash_after`` and ``hang_after`` count tokens of all requests; 0 means never."""

    tokens_per_step: int = 1
    step_delay_s: float = 0.0
    crash_after: int = 0
    hang_after: int = 0
    missing: frozenset[str] = frozenset()
    reversing: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    generation: int = 1
    base_id: str = "fake-base"
    spec_fingerprint: str = "0" * 16
    vocab_size: int = 32000
    max_model_len: int = 4096
    max_lora_rank: int = 64
    eos_ids: tuple[int, ...] = (2,)

    def welcome(self) -> Welcome:
        return Welcome(
            PROTOCOL_VERSION,
            self.generation,
            self.base_id,
            self.spec_fingerprint,
            self.vocab_size,
            self.max_model_len,
            self.max_lora_rank,
            self.eos_ids,
        )


@dataclass
class _Request:
    submit: Submit
    prompt: list[int]
    sent: int = 0

    def finished(self, reason: FinishReason, code: str = "") -> Finished:
        return Finished(self.submit.id, reason, len(self.prompt), self.sent, code=code, message=code)


@dataclass
class _Report:
    """What one step made for one gateway."""

    tokens: list[Token] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class FakeEngine:
    """The loop. ``listener`` is a listening SOCK_SEQPACKET socket, which it owns from here on."""

    def __init__(self, listener: socket.socket, options: Options, heartbeat: Heartbeat | None = None) -> None:
        self.options = options
        self._heartbeat = heartbeat or Heartbeat(-1, CPU_LIMIT_S)
        self.heard: Counter[str] = Counter()
        self.submits: list[Submit] = []
        self.aborts: list[int] = []
        self.keeps: list[Keep] = []
        self.forgotten: list[str] = []
        self.held: set[str] = set()
        self.adapters: list[AdapterSeen] = []
        self.pages = Pages(0, 0, (), b"")
        self.map_asks = 0
        self.waiting = 0
        self.crashed = False
        self._link = Link(listener, options.welcome())
        self._requests: dict[RequestKey, _Request] = {}
        self._kept: dict[int, deque[FromEngine]] = {}
        self._prompt_tokens = self._tokens = self._steps = 0
        self._next_step_at = 0.0
        self._running = True
        self._paused = False
        self._turn = threading.Lock()

    def run(self) -> None:
        """Serve until :meth:`stop` or :meth:`crash`, or until ``crash_after`` tokens were sent."""
        try:
            while self._running:
                with self._turn:
                    self._heartbeat.beat()
                for event in self._link.poll(self._pause_s()):
                    self._take(event)
                self._send_kept()
                if self._requests and not self._paused and time.monotonic() >= self._next_step_at:
                    self._next_step_at = time.monotonic() + self.options.step_delay_s
                    self._step()
        finally:
            self._link.close()

    @property
    def parked(self) -> bool:
        """Whether a gateway's reply ring is full."""
        return bool(self._kept)

    def stop(self) -> None:
        """End the loop; safe in any thread, like the three below."""
        self._running = False
        self._link.wake()

    def crash(self) -> None:
        self.crashed = True
        self.stop()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._link.wake()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """While the block runs nothing is read or written, after the turn at hand."""
        with self._turn:
            yield

    def _pause_s(self) -> float:
        if not self._requests or self._paused or all(connection in self._kept for connection, _ in self._requests):
            return 1.0
        return max(0.0, self._next_step_at - time.monotonic())

    def _take(self, event: Received | Closed) -> None:
        if isinstance(event, Closed):
            self._kept.pop(event.connection, None)
            self._requests = {key: r for key, r in self._requests.items() if key[0] != event.connection}
        else:
            self._receive(event.connection, event.message)

    def _receive(self, connection: int, message: ToEngine) -> None:
        self.heard[type(message).__name__] += 1
        match message:
            case Submit():
                self._submit(connection, message)
            case Abort(id=id_):
                self.aborts.append(id_)
                request = self._requests.pop((connection, id_), None)
                if request is not None:
                    self._send(connection, Step((), (request.finished("aborted"),)))
            case Ensure(id=id_, adapter=adapter):
                self._send(connection, Ensured(id_, "no such adapter" if adapter in self.options.missing else ""))
            case AskStats(id=id_):
                self._send(connection, self._stats(id_))
            case AskAdapters(id=id_, offset=offset, limit=limit):
                some = tuple(self.adapters[offset : offset + limit])
                self._send(connection, Adapters(id_, len(self.adapters), some))
            case AskHeld(id=id_, after=after):
                some_held = sorted(one for one in self.held if one > after)[:MAX_HELD_SHOWN]
                self._send(connection, Held(id_, tuple(some_held)))
            case AskPages(id=id_):
                self.map_asks += 1
                self._send(connection, msgspec.structs.replace(self.pages, id=id_))
            case Forget(id=id_, adapter=adapter):
                self.forgotten.append(adapter)
                self.held.discard(adapter)
                self._send(connection, Forgotten(id_, 0))
            case Keep(id=id_):
                self.keeps.append(message)
                self._send(connection, Kept(id_, ""))

    def _submit(self, connection: int, submit: Submit) -> None:
        self.submits.append(submit)
        request = _Request(submit, unpack_tokens(submit.prompt))
        if submit.adapter in self.options.reversing:
            request.prompt.reverse()
        code = ""
        if submit.adapter in self.options.missing:
            code = "adapter_unavailable"
        elif len(request.prompt) >= self.options.max_model_len:
            code = "context_exceeded"
        if code:
            self._send(connection, Step((), (request.finished("error", code),)))
            return
        self._prompt_tokens += len(request.prompt)
        self._requests[connection, submit.id] = request

    def _step(self) -> None:
        """One engine step: a few tokens for each request whose gateway has room, one message per gateway."""
        reports: dict[int, _Report] = {}
        for key, request in list(self._requests.items()):
            if key[0] not in self._kept:
                reason = self._advance(request, reports.setdefault(key[0], _Report()))
                if reason is not None:
                    del self._requests[key]
                    reports[key[0]].finished.append(request.finished(reason))
        self._steps += bool(reports)
        for connection, report in reports.items():
            self._send(connection, Step(tuple(report.tokens), tuple(report.finished)))
        self._maybe_fail()

    def _advance(self, request: _Request, report: _Report) -> FinishReason | None:
        submit, prompt = request.submit, request.prompt
        for _ in range(self.options.tokens_per_step):
            token = prompt[request.sent % len(prompt)] if prompt else 0
            request.sent += 1
            self._tokens += 1
            asked = submit.sampling.logprobs
            logprob = math.nan if submit.adapter in self.options.broken else LOGPROB
            top = ((token, logprob),) if asked > 0 else ()
            report.tokens.append(Token(submit.id, token, logprob if asked >= 0 else None, top))
            if token in submit.stop_ids:
                return "stop"
            if request.sent >= submit.max_tokens:
                return "length"
        return None

    def _maybe_fail(self) -> None:
        if 0 < self.options.crash_after <= self._tokens:
            self.crash()
        if 0 < self.options.hang_after <= self._tokens:
            while self._running:
                signal.pause() if threading.current_thread() is threading.main_thread() else time.sleep(0.05)

    def _send(self, connection: int, message: FromEngine) -> None:
        """Send, or keep in order until the gateway has room."""
        if connection in self._kept or not self._link.send(connection, message):
            self._kept.setdefault(connection, deque()).append(message)

    def _send_kept(self) -> None:
        for connection, messages in list(self._kept.items()):
            while messages and self._link.writable(connection) and self._link.send(connection, messages[0]):
                messages.popleft()
            if not messages:
                del self._kept[connection]

    def _stats(self, id_: int) -> Stats:
        counts: dict[str, Any] = dict.fromkeys(Stats.__struct_fields__[: -len(Stats.__struct_defaults__)], 0)
        counts |= {"id": id_, "running": len(self._requests), "waiting": self.waiting, "steps": self._steps}
        counts |= {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens}
        return Stats(**counts)


def listen(path: Path) -> socket.socket:
    """A listening socket of the right kind at ``path``, replacing one that is there."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)
    listener.listen(128)
    return listener


@contextmanager
def running_engine(path: Path, options: Options | None = None) -> Iterator[FakeEngine]:
    """A fake engine in a thread of this process, listening at ``path``."""
    engine = FakeEngine(listen(path), options or Options())
    thread = threading.Thread(target=engine.run, name="fake-engine")
    thread.start()
    try:
        yield engine
    finally:
        if thread.is_alive():
            engine.stop()
        thread.join()


def main() -> None:
    """The process; ends with SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--step-delay-ms", type=float, default=0.0)
    parser.add_argument("--crash-after", type=int, default=0)
    parser.add_argument("--hang-after", type=int, default=0)
    parser.add_argument("--missing", action="append", default=[])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--socket", type=Path)
    given = parser.parse_args()
    options = Options(
        tokens_per_step=given.tokens_per_step,
        step_delay_s=given.step_delay_ms / 1000,
        crash_after=given.crash_after,
        hang_after=given.hang_after,
        missing=frozenset(given.missing),
        max_model_len=given.max_model_len,
        generation=int(os.environ.get("STENCILPRESS_GENERATION", "1")),
    )
    if model_dir := os.environ.get("STENCILPRESS_MODEL_DIR"):
        spec = load_spec(Path(model_dir))
        options = replace(
            options,
            base_id=spec.base_id,
            spec_fingerprint=spec.fingerprint(),
            vocab_size=spec.vocab_size,
            eos_ids=spec.eos_ids,
        )
    if fd := os.environ.get("STENCILPRESS_LIFELINE_FD"):
        lifeline.hold(int(fd))
    listener = listen(given.socket) if given.socket else socket.socket(fileno=int(os.environ["STENCILPRESS_ENGINE_FD"]))
    fd, limit_s = (os.environ.get(f"STENCILPRESS_{name}", "-1") for name in ("HEARTBEAT_FD", "HANG_LIMIT_S"))
    engine = FakeEngine(listener, options, Heartbeat(int(fd), float(limit_s)))
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    engine.run()
    if engine.crashed:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
