"""One connection of a gateway to one engine generation, and the streams on it. :class:`EngineClient` opens them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from stencilpress.engine.messages import (
    Abort,
    Adapters,
    Answer,
    AskAdapters,
    AskHeld,
    AskPages,
    AskStats,
    Ensure,
    Ensured,
    Finished,
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
    Token,
    Welcome,
)
from stencilpress.engine.ring import Channel, ProtocolError

READ_BUDGET_BYTES = 64 << 10
"""Reply bytes handled before other tasks of the loop get a turn."""
WOKEN_AT_ONCE = 4
"""Streams that go on with a step's tokens before the loop looks at its sockets again: a new request takes five turns of
the loop up to its first token, and must not wait in each of them until dozens of others have written theirs."""
WOKEN_WHEN_BEHIND = 16
"""The same where steps come before all have gone on with the one before: turns are a tenth of the work, and there is no
time left for them."""
CATCHING_UP_READS = 100
"""For so many reads after that the larger number stays: whether a step meets anybody in line is chance then."""

Batch = tuple[list[Token], Finished | None]
A = TypeVar("A", Ensured, Stats, Adapters, Held, Pages, Kept, Forgotten)
Question = Ensure | AskStats | AskAdapters | AskHeld | AskPages | Keep | Forget


class EngineError(Exception):
    """The engine cannot take this call."""


class EngineUnavailableError(EngineError):
    """No engine is connected, or it went away before it took or answered the call."""


class EngineBusyError(EngineError):
    """The request ring stayed full for the whole time limit."""


@dataclass(slots=True, eq=False)
class _Inbox:
    """What has come for one request and was not taken yet; at most its ``max_tokens`` tokens."""

    id: int
    tenant: int
    prompt_tokens: int
    taken: int = 0
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None
    waiter: asyncio.Future[None] | None = None
    aborted: bool = False
    called: bool = False
    """It stands in the line of those who are woken next."""

    def wake(self) -> None:
        self.called = False
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def take(self) -> Batch:
        tokens, self.tokens = self.tokens, []
        self.taken += len(tokens)
        return tokens, self.finished


class Stream:
    """The answer to one request, for one consumer: ``async for tokens, finished in stream``.

    A batch holds all tokens that came since the last one. The last batch, and only it, has ``finished`` set.
    Leaving early, by :meth:`aclose`, by cancelling the task that waits for a batch or by dropping the stream,
    aborts the request. After a cancelled wait the stream can still be read to its end, for the engine's last word.
    """

    def __init__(self, connection: Connection, inbox: _Inbox) -> None:
        self._connection = connection
        self._inbox = inbox
        self._over = False

    @property
    def id(self) -> int:
        """The request's id on its connection."""
        return self._inbox.id

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Batch:
        if self._over:
            raise StopAsyncIteration
        inbox = self._inbox
        try:
            while not inbox.tokens and inbox.finished is None:
                inbox.waiter = self._connection.loop.create_future()
                await inbox.waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            inbox.waiter = None
        self._over = inbox.finished is not None
        return inbox.take()

    def abort(self) -> None:
        """Ask the engine to stop; the stream goes on until its terminal message."""
        if not self._inbox.aborted and not self._over:
            self._inbox.aborted = True
            self._connection.abort(self._inbox.id)

    async def aclose(self) -> None:
        """End the stream here; a request that still runs is aborted."""
        if not self._over:
            self._over = True
            self._connection.abandon(self._inbox.id)

    def __del__(self) -> None:
        if not self._over and not self._connection.loop.is_closed():
            self._connection.loop.call_soon_threadsafe(self._connection.abandon, self._inbox.id)


class Connection:
    """One engine generation: the channel, and who waits for what on it."""

    def __init__(self, channel: Channel[FromEngine], welcome: Welcome) -> None:
        self.loop = asyncio.get_running_loop()
        self.welcome = welcome
        self.ended: asyncio.Future[str] = self.loop.create_future()
        self._inboxes: dict[int, _Inbox] = {}
        self._of_tenants: Counter[int] = Counter()
        self._channel = channel
        self._encode = msgspec.msgpack.Encoder().encode
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._outbox: dict[asyncio.Future[None], bytes] = {}
        self._aborts: deque[bytes] = deque()
        self._calls: deque[_Inbox] = deque()
        self._catching_up = 0
        """Reads left since a step has met streams that still stood in line with a token of the one before."""
        self._publishes = False
        self._reads_on = False
        self._wakes_on = False
        self._waits_for_socket = False
        self.loop.add_reader(channel.sock, self._on_readable)

    @property
    def open_requests(self) -> int:
        """Requests that have no terminal message yet and that somebody reads."""
        return len(self._inboxes)

    def open_requests_of(self, tenant: int) -> int:
        """Those of one tenant."""
        return self._of_tenants[tenant]

    async def submit(self, request: Submit, limit_s: float) -> Stream:
        """Post a request and open its stream."""
        inbox = _Inbox(request.id, request.tenant, len(request.prompt) // 4)
        self._inboxes[request.id] = inbox
        self._of_tenants[request.tenant] += 1
        try:
            await self._post(request, limit_s)
        except BaseException:
            self._close(request.id)
            raise
        self._publish()  # at once: the engine takes it in while the rest of this turn goes on
        return Stream(self, inbox)

    async def ask(self, question: Question, kind: type[A], limit_s: float) -> A:
        """Post a question and wait for its answer, however long the engine takes."""
        future: asyncio.Future[Answer] = self.loop.create_future()
        self._answers[question.id] = future
        try:
            await self._post(question, limit_s)
            answer = await future
        finally:
            self._answers.pop(question.id, None)
        if not isinstance(answer, kind):
            raise EngineError(f"the engine answered {type(question).__name__} with {type(answer).__name__}")
        return answer

    def abort(self, request_id: int) -> None:
        """Abort a request, ahead of all that waits for room; its stream gets its terminal message as usual."""
        if request_id in self._inboxes:
            self._send_abort(request_id)

    def abandon(self, request_id: int) -> None:
        """Abort a request whose stream nobody reads any more; what still comes for it is dropped."""
        inbox = self._close(request_id)
        if inbox is not None and not inbox.aborted:
            self._send_abort(request_id)

    def lose(self, reason: str) -> None:
        """End the connection and everything on it; each open stream gets its terminal message."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.loop.remove_reader(self._channel.sock)
        self.loop.remove_writer(self._channel.sock)
        self._channel.close()
        waiting: list[asyncio.Future[Any]] = [*self._outbox, *self._answers.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineUnavailableError(f"the engine is gone: {reason}"))
        for inbox in self._inboxes.values():
            done = inbox.taken + len(inbox.tokens)
            inbox.finished = Finished(inbox.id, "error", inbox.prompt_tokens, done, code="engine_lost", message=reason)
            inbox.wake()
        self._inboxes.clear()
        self._of_tenants.clear()

    def _close(self, request_id: int) -> _Inbox | None:
        """A request is open no more; None if it was not."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None:
            self._of_tenants[inbox.tenant] -= 1
            if not self._of_tenants[inbox.tenant]:
                del self._of_tenants[inbox.tenant]
        return inbox

    async def _post(self, message: Submit | Question, limit_s: float) -> None:
        """Write a message, waiting in line while the ring is full."""
        payload = self._encode(message)
        self._channel.check_size(payload)
        if not self._outbox and self._channel.write(payload):
            self._publish_soon()
            return
        sent: asyncio.Future[None] = self.loop.create_future()
        self._outbox[sent] = payload
        try:
            async with asyncio.timeout(limit_s):
                await sent
        except BaseException as error:
            if self._outbox.pop(sent, None) is None:
                self._send_abort(message.id)  # it went out in the very moment in which we gave up
            if isinstance(error, TimeoutError):
                raise EngineBusyError(f"the engine took no request for {limit_s:g} s") from None
            raise

    def _on_readable(self) -> None:
        if self.ended.done():
            return
        try:
            self._catching_up = max(self._catching_up - 1, 0)
            is_open = self._channel.receive()
            for message in self._channel.messages(READ_BUDGET_BYTES):
                self._dispatch(message)
            if not self._wakes_on:
                self._wake_some()
        except (ProtocolError, OSError) as error:
            self.lose(str(error))
            return
        if self._channel.unread:
            self._read_on_soon()
        elif not is_open:
            self.lose("the connection ended")
            return
        self._flush()
        self._publish_soon()

    def _read_on_soon(self) -> None:
        if not self._reads_on:
            self._reads_on = True
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._reads_on = False
        self._on_readable()

    def _dispatch(self, message: FromEngine) -> None:
        if not isinstance(message, Step):
            answer = self._answers.get(message.id)
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        inboxes = self._inboxes
        for token in message.tokens:
            inbox = inboxes.get(token.id)
            if inbox is not None:
                inbox.tokens.append(token)
                if inbox.called:
                    self._catching_up = CATCHING_UP_READS
                elif inbox.waiter is not None:
                    self._call(inbox)
        for finished in message.finished:
            inbox = self._close(finished.id)
            if inbox is not None:
                inbox.finished = finished
                if not inbox.called:
                    self._call(inbox)

    def _call(self, inbox: _Inbox) -> None:
        """Have a stream go on: with its first token at once, else in line."""
        if inbox.taken:
            inbox.called = True
            self._calls.append(inbox)
        else:
            inbox.wake()

    def _wake_some(self) -> None:
        """The next in line go on; the others after whatever has come meanwhile."""
        self._wakes_on = False
        calls = self._calls
        for _ in range(min(len(calls), WOKEN_WHEN_BEHIND if self._catching_up else WOKEN_AT_ONCE)):
            calls.popleft().wake()
        if calls:
            self._wakes_on = True
            self.loop.call_soon(self._wake_some)

    def _send_abort(self, request_id: int) -> None:
        if self.ended.done():
            return
        payload = self._encode(Abort(request_id))
        if self._aborts or not self._channel.write(payload, urgent=True):
            self._aborts.append(payload)
        self._publish_soon()

    def _flush(self) -> None:
        """Move what waits into the ring, aborts first."""
        while self._aborts and self._channel.write(self._aborts[0], urgent=True):
            self._aborts.popleft()
        while self._outbox:
            sent = next(iter(self._outbox))
            if not sent.done():
                if not self._channel.write(self._outbox[sent]):
                    return
                sent.set_result(None)
            del self._outbox[sent]

    def _publish_soon(self) -> None:
        """Announce positions at the end of this turn of the loop: one packet for all that is written in it."""
        if not self._publishes:
            self._publishes = True
            self.loop.call_soon(self._publish)

    def _publish(self) -> None:
        self._publishes = False
        if self.ended.done():
            return
        try:
            told = self._channel.publish()
        except OSError as error:
            self.lose(str(error))
            return
        if told == self._waits_for_socket:
            self._waits_for_socket = not told
            if told:
                self.loop.remove_writer(self._channel.sock)
            else:
                self.loop.add_writer(self._channel.sock, self._publish)
