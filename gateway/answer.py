"""One choice of an answer: the engine's tokens become text, stop strings end it.

SSE, plain responses and WebSocket all read an :class:`Answer`, so a text is the same on each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from stencilpress.engine.client import Stream
from stencilpress.engine.messages import Finished, Token
from stencilpress.gateway.detokenizer import StopFilter, StopStrings, TokenTable
from stencilpress.gateway.errors import EngineLostError, UnavailableError, from_finished

FinishReason = Literal["stop", "length", "cancelled"]
"""``cancelled`` follows :meth:`Answer.cancel` and nothing else."""

Again = Callable[[], Awaitable[Stream | None]]

ABORT_LIMIT_S = 10.0
"""How long an aborted request may take to report its token counts."""


class TextRules(msgspec.Struct, frozen=True):
    """What turns tokens into the text of a request; shared by its choices.

    ``stop_ids`` end an answer in the engine and are never part of its text.
    """

    table: TokenTable
    stop_ids: frozenset[int]
    stops: StopStrings | None
    logprobs: bool


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of the text with its logprobs; ``offset`` is where it begins, in characters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one batch of tokens adds. ``tokens`` is empty unless logprobs were asked for.

    One is made for every token of every stream; a frozen dataclass would cost ten times as much.
    """

    text: str
    tokens: Sequence[ShownToken] = ()
    finish_reason: FinishReason | None = None
    token_count: int = 0
    """Tokens that went into the answer with it and since the delta before, those without a text included."""


class Answer:
    """The text of one request to the engine, for one reader. Whoever leaves before its end calls :meth:`abort`."""

    def __init__(self, stream: Stream, index: int, rules: TextRules, again: Again | None = None) -> None:
        """``again`` submits the request anew if its engine is lost before the first token; asked once."""
        self.index = index
        self._stream = stream
        self._again = again
        self._rules = rules
        self._detokenizer = rules.table.stream()
        self._filter = StopFilter(rules.stops) if rules.stops is not None else None
        self._received_tokens = 0
        self._counted = 0
        """Tokens of the answer that no delta has told of yet."""
        self.answer_tokens = 0
        """Tokens that went into the answer: all up to its end, which a stop string may put before the engine's."""
        self._finished: Finished | None = None
        self._ended = False
        self._cancelled = False
        self._waiting: deque[tuple[int, ShownToken]] = deque()
        """Tokens whose text is not out yet, with where it ends."""
        self._made_chars = 0
        self._shown_chars = 0

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta:
        """Text as it comes; the last delta has the finish reason.

        Raises the :class:`~stencilpress.gateway.errors.ApiError` that the engine's refusal or end amounts to.
        """
        while not self._ended:
            tokens, finished = await anext(self._stream)
            if finished is not None and await self._begun_anew(finished):
                continue
            self._received_tokens += len(tokens)
            self._finished = finished
            delta = self._delta(tokens, finished)
            if delta.finish_reason is not None:
                self._ended = True
                if finished is None:
                    self.abort()
            if delta.text or delta.tokens or self._ended:
                return delta
        raise StopAsyncIteration

    async def _begun_anew(self, finished: Finished) -> bool:
        """Whether a request that ended with its engine runs on another: nobody has seen a token of it."""
        again, self._again, unwanted = self._again, None, self._cancelled
        if again is None or unwanted or finished.code != "engine_lost" or finished.completion_tokens:
            return False
        stream = await again()
        if stream is None:
            return False
        self._stream = stream
        if self._cancelled:
            stream.abort()
        return True

    def cancel(self) -> None:
        """Stop at the reader's wish: the deltas end with the reason ``cancelled``, unless they end before."""
        self._cancelled = True
        self.abort()

    def abort(self) -> None:
        """Have the engine stop, if it has not; what it has made until then can be had from :meth:`settle`."""
        self._stream.abort()

    async def settle(self) -> Finished:
        """The engine's own count of the tokens, once the deltas have ended. Raises :class:`EngineLostError`."""
        if self._finished is not None:
            return self._finished
        try:
            async with asyncio.timeout(ABORT_LIMIT_S):
                async for _, finished in self._stream:
                    self._finished = finished
        except TimeoutError:
            raise EngineLostError("The engine does not answer; try again.") from None
        if self._finished is None:
            raise EngineLostError("The engine stopped while it was working on your request; try again.")
        return self._finished

    @property
    def finished(self) -> Finished | None:
        """The engine's last word, once it is known."""
        return self._finished

    @property
    def cancelled(self) -> bool:
        """Whether it ended by :meth:`cancel`."""
        return self._cancelled and self._finished is not None and self._finished.reason == "aborted"

    @property
    def completion_tokens(self) -> int:
        """The engine's count if the request has ended, else what has come so far."""
        return self._received_tokens if self._finished is None else self._finished.completion_tokens

    def _delta(self, tokens: list[Token], finished: Finished | None) -> Delta:
        text = self._take(tokens)
        reason: FinishReason | None = None
        if self._filter is not None and self._filter.stopped:
            reason = "stop"
        elif finished is not None:
            text += self._flush()
            reason = self._reason(finished)
        shown = self._shown(text, last=reason is not None) if self._rules.logprobs else ()
        count = self._counted
        if text or shown or reason is not None:
            self.answer_tokens += count
            self._counted = 0
        return Delta(text, shown, reason, count)

    def _take(self, tokens: list[Token]) -> str:
        """Text of a batch, up to a stop string. A stop id has none."""
        push, stop_ids, stop_filter = self._detokenizer.push, self._rules.stop_ids, self._filter
        if stop_filter is None and not self._rules.logprobs:
            self._counted += len(tokens)
            if len(tokens) == 1:  # nearly always
                only = tokens[0].token
                return push(only) if only not in stop_ids else ""
            return "".join([push(token.token) for token in tokens if token.token not in stop_ids])
        texts = []
        for token in tokens:
            self._counted += 1
            if token.token in stop_ids:
                break
            text = push(token.token)
            if self._rules.logprobs:
                self._note(token, text)
            texts.append(stop_filter.push(text) if stop_filter is not None else text)
            if stop_filter is not None and stop_filter.stopped:
                break
        return "".join(texts)

    def _flush(self) -> str:
        """What was held back, at the end of the tokens."""
        text = self._detokenizer.finish()
        if self._filter is None:
            return text
        text = self._filter.push(text)
        return text if self._filter.stopped else text + self._filter.finish()

    def _reason(self, finished: Finished) -> FinishReason:
        if self._filter is not None and self._filter.stopped:
            return "stop"
        match finished.reason:
            case "stop" | "length":
                return finished.reason
            case "aborted" if self._cancelled:
                return "cancelled"
            case "aborted":
                raise UnavailableError("The server stopped working on your request; try again.")
            case "error":
                raise from_finished(finished)

    def _note(self, token: Token, text: str) -> None:
        shown = ShownToken(token.token, token.logprob or 0.0, token.top, self._made_chars)
        self._made_chars += len(text)
        self._waiting.append((self._made_chars, shown))

    def _shown(self, text: str, *, last: bool) -> list[ShownToken]:
        """Tokens whose text is out now; at the end those that begin in it, so not the tokens of a stop string."""
        self._shown_chars += len(text)
        shown = []
        while self._waiting:
            end, token = self._waiting[0]
            if end > self._shown_chars and not (last and token.offset < self._shown_chars):
                break
            self._waiting.popleft()
            shown.append(token)
        return shown
