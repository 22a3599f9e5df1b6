"""``GET /v1/chat/ws``: chat over a WebSocket, in the words of OpenAI's Realtime API where they fit.

A connection carries several responses at once, told apart by ``response_id``. Cookies play no part in
``/v1/chat/ws``: a connection is worth what its key is worth, so a page of another site can do nothing with it, and
``Origin`` is not looked at. The console serves the same by its sessions, and does look (``web/chat_socket.py``).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from stencilpress.gateway.answer import Delta, FinishReason
from stencilpress.gateway.api.chat import read_chat
from stencilpress.gateway.api.generate import Generation, OpenAnswers, answers, plan_generation
from stencilpress.gateway.api.schemas import ChatRequest
from stencilpress.gateway.api.wire import chat_endpoint
from stencilpress.gateway.errors import (
    ApiError,
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from stencilpress.gateway.keys import Principal
from stencilpress.gateway.middleware import authenticate_token, bearer_token, to_api_error
from stencilpress.gateway.observation import CURRENT, Observation
from stencilpress.gateway.services import SERVICES, Services
from stencilpress.gateway.slow_clients import write_in_time
from stencilpress.gateway.stream import encode_text

AUTHENTICATE_LIMIT_S = 10.0
HEARTBEAT_S = 20.0
"""A ping this often; a client that does not answer within half of it is disconnected."""
WATCH_S = 2.0
"""How often it is looked at whether whoever opened a connection still may use it."""
MAX_RESPONSES = 16
"""Responses in progress on one connection."""

_ENDS = frozenset({WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR})

_encode = msgspec.json.Encoder().encode


class Authenticate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="session.authenticate"):
    """The first event of a connection without an ``Authorization`` header."""

    api_key: str
    event_id: str | None = None


class CreateResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="response.create"):
    """``response`` is the body of a chat completion."""

    response: msgspec.Raw
    event_id: str | None = None


class CancelResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="response.cancel"):
    response_id: str
    event_id: str | None = None


Who = Callable[[], Awaitable[Principal]]
"""Says who asks, anew for each response: a key may have been revoked since, a session may have ended. Raises
:class:`AuthenticationError`, :class:`PermissionDeniedError`."""

_decode = msgspec.json.Decoder(Authenticate | CreateResponse | CancelResponse).decode


async def chat(request: web.Request) -> web.StreamResponse:
    """Authenticate by header before the upgrade or by the first event after it, then serve until either side ends."""
    if "Authorization" not in request.headers:
        return await serve_chat(request, None)
    who = partial(authenticate_token, request, bearer_token(request))
    await who()
    return await serve_chat(request, who)


async def serve_chat(request: web.Request, who: Who | None) -> web.StreamResponse:
    """Upgrade the connection and serve it for ``who``; None waits for a key in the first event."""
    services = request.app[SERVICES]
    ws = web.WebSocketResponse(
        heartbeat=HEARTBEAT_S,
        autoping=False,
        compress=False,
        max_msg_size=services.settings.max_body_bytes,
        timeout=1.0,
    )
    await ws.prepare(request)
    services.websockets.add(ws)
    with services.metrics.websockets_open.track_inprogress():
        connection = ChatConnection(request, ws, services)
        if await connection.open(who):
            await connection.serve()
    await ws.close()
    return ws


@dataclass(slots=True)
class _Response:
    """One response in progress. ``answers`` is set once the engine has the request."""

    id: str
    event_id: str | None
    metadata: dict[str, str] | None = None
    model: str = ""
    answers: OpenAnswers | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)
    reasons: set[FinishReason] = field(default_factory=set)

    def describe(self, status: str, **more: Any) -> dict[str, Any]:
        facts = {"id": self.id, "object": "realtime.response", "status": status}
        return {**facts, "model": self.model, "metadata": self.metadata, **more}


class ChatConnection:
    """One socket: reads events, runs the responses they ask for, writes theirs."""

    def __init__(self, request: web.Request, ws: web.WebSocketResponse, services: Services) -> None:
        self._request = request
        self._ws = ws
        self._services = services
        self._who: Who = _nobody
        self._endpoint = chat_endpoint(services.tokenizer.table)
        self._responses: dict[str, _Response] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, who: Who | None) -> bool:
        """Learn who asks, by a key if that is not known already. False if the connection has been refused."""
        try:
            self._who = who or await self._first_event()
        except ApiError as error:
            await self._send_error(error, None)
            await self._ws.close(code=WSCloseCode.POLICY_VIOLATION)
            return False
        session = {"id": f"sess_{secrets.token_hex(12)}", "object": "chat.session"}
        await self._send({"type": "session.created", "session": session})
        return True

    async def serve(self) -> None:
        """Handle events until the connection ends, then abort what still runs."""
        self._tasks.add(asyncio.create_task(self._watch()))
        try:
            while (message := await self._next()).type not in _ENDS:
                await self._on_message(message.type, message.data)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _watch(self) -> None:
        """End the connection, and what runs on it, when the key or the session ends."""
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(WATCH_S)
                try:
                    await self._who()
                except UnavailableError:
                    continue  # nobody can say: what runs may go on
                except ApiError as error:
                    await self._send_error(error, None)
                    await self._ws.close(code=WSCloseCode.POLICY_VIOLATION)
                    return

    async def _first_event(self) -> Who:
        try:
            async with asyncio.timeout(AUTHENTICATE_LIMIT_S):
                message = await self._next()
            event = _read_event(message.type, message.data)
        except TimeoutError:
            event = None
        if not isinstance(event, Authenticate):
            raise AuthenticationError("Send an Authorization header, or session.authenticate as the first event.")
        who = partial(authenticate_token, self._request, event.api_key)
        await who()
        return who

    async def _next(self) -> WSMessage:
        """The next message; pings are answered. Other tasks get a turn per frame, since one packet holds thousands."""
        while True:
            message = await self._ws.receive()
            await asyncio.sleep(0)
            if message.type is WSMsgType.PING:
                await self._send_frame(message.data, WSMsgType.PONG)
            elif message.type is not WSMsgType.PONG:
                return message

    async def _on_message(self, kind: WSMsgType, data: Any) -> None:
        event_id: str | None = None
        try:
            event = _read_event(kind, data)
            event_id = event.event_id
            match event:
                case CreateResponse():
                    self._create(event)
                case CancelResponse():
                    self._cancel(event)
                case Authenticate():
                    raise InvalidRequestError("This connection is authenticated already.", code="invalid_event")
        except ApiError as error:
            await self._send_error(error, event_id)

    def _create(self, event: CreateResponse) -> None:
        if len(self._responses) >= MAX_RESPONSES:
            raise InvalidRequestError(
                f"{MAX_RESPONSES} responses are in progress on this connection; wait for one to end.",
                code="too_many_responses",
            )
        response = _Response(f"resp_{secrets.token_hex(12)}", event.event_id)
        self._responses[response.id] = response
        task = asyncio.create_task(self._run(response, event.response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, event: CancelResponse) -> None:
        response = self._responses.get(event.response_id)
        if response is None or response.answers is None:
            raise NotFoundError("No such response is in progress.", param="response_id")
        for answer in response.answers.each:
            answer.cancel()

    async def _run(self, response: _Response, body: msgspec.Raw) -> None:
        """One response from its body to ``response.done``; a refused body ends it with an ``error`` event."""
        observed, outcome = Observation(CURRENT.get().request_id), "closed"
        CURRENT.set(observed)  # of this task alone
        tracing = self._services.tracing
        span = tracing.begin("WS response.create", self._request.headers, observed) if tracing else None
        try:
            await self._answer(response, body, observed.arrived_at)
            outcome = _status(response.reasons)
        except ConnectionError:
            pass  # the client is gone, which the reader notices too
        except Exception as error:  # noqa: BLE001 - the outermost frame of a task: whatever it is, the client is told
            outcome = "failed"
            with suppress(ConnectionError):
                await self._send_failure(response, to_api_error(error, self._request))
        finally:
            del self._responses[response.id]
            if tracing and span:
                tracing.end(span, observed)
            observed.log("WS", "response.create", outcome)

    async def _answer(self, response: _Response, body: msgspec.Raw, arrived_at: float) -> None:
        services = self._services
        caller = await self._who()
        asked, route, prompt = await read_chat(services, caller, body)
        generation = await plan_generation(services, caller, route, _streamed(asked), [prompt], "messages")
        response.model, response.metadata = generation.model, asked.metadata
        async with answers(services, generation, response.id, arrived_at) as opened:
            response.answers = opened
            await self._send({"type": "response.created", "response": response.describe("in_progress")})
            await self._stream(response, opened, generation)

    async def _stream(self, response: _Response, opened: OpenAnswers, generation: Generation) -> None:
        heads = [_delta_head(response.id, index) for index in range(len(opened.each))]

        async def send(index: int, delta: Delta) -> None:
            opened.charge.meter.deliver(delta.token_count)
            response.texts.setdefault(index, []).append(delta.text)
            if delta.tokens:
                logprobs = _encode(self._endpoint.chunks.logprobs(delta.tokens)["content"])
                await self._send_bytes(heads[index] + encode_text(delta.text) + b',"logprobs":' + logprobs + b"}")
            elif delta.text:
                await self._send_bytes(heads[index] + encode_text(delta.text) + b"}")
            if delta.finish_reason is not None:
                response.reasons.add(delta.finish_reason)
                await self._send(_text_done(response, index, delta.finish_reason))

        await opened.follow(send)
        usage = await opened.usage(generation.choices_per_prompt)
        done = response.describe(_status(response.reasons), usage=usage)
        await self._send({"type": "response.done", "response": done})

    async def _send_failure(self, response: _Response, error: ApiError) -> None:
        if response.answers is None or not response.model:
            await self._send_error(error, response.event_id)
            return
        failed = response.describe("failed", status_details={"type": "failed", "error": error.fields()}, usage=None)
        await self._send({"type": "response.done", "response": failed})

    async def _send_error(self, error: ApiError, event_id: str | None) -> None:
        await self._send({"type": "error", "error": {**error.fields(), "event_id": event_id}})

    async def _send(self, event: dict[str, Any]) -> None:
        await self._send_bytes(_encode(event))

    async def _send_bytes(self, event: bytes) -> None:
        await self._send_frame(event, WSMsgType.TEXT)

    async def _send_frame(self, data: bytes, kind: WSMsgType) -> None:
        """Write one frame; a client that does not read is cut off, as on a stream."""
        limit_s, metrics = self._services.settings.write_limit_s, self._services.metrics
        await write_in_time(self._request, self._ws.send_frame(data, kind), limit_s, metrics)


async def _nobody() -> Principal:
    raise AuthenticationError("This connection is not authenticated yet.")


def _read_event(kind: WSMsgType, data: Any) -> Authenticate | CreateResponse | CancelResponse:
    if kind is not WSMsgType.TEXT:
        raise InvalidRequestError("Events are text messages that hold one JSON object.", code="invalid_event")
    try:
        event: Authenticate | CreateResponse | CancelResponse = _decode(data)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequestError(
            "Not an event: expected session.authenticate, response.create or response.cancel with its fields.",
            code="invalid_event",
        ) from None
    return event


def _streamed(asked: ChatRequest) -> ChatRequest:
    if asked.stream is False:
        raise InvalidRequestError("Responses on this connection are always streamed.", param="stream")
    return asked


def _delta_head(response_id: str, index: int) -> bytes:
    head = {"type": "response.output_text.delta", "response_id": response_id, "output_index": index}
    return _encode({**head, "content_index": 0})[:-1] + b',"delta":'


def _text_done(response: _Response, index: int, reason: FinishReason) -> dict[str, Any]:
    head = {"type": "response.output_text.done", "response_id": response.id, "output_index": index}
    return {**head, "content_index": 0, "text": "".join(response.texts[index]), "finish_reason": reason}


def _status(reasons: set[FinishReason]) -> Literal["completed", "incomplete", "cancelled"]:
    if "cancelled" in reasons:
        return "cancelled"
    return "incomplete" if "length" in reasons else "completed"
