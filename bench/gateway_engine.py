"""A fake engine for the gateway's bench: the real ring protocol, tokens by the clock or as fast as they are taken.

``python -m bench.gateway_engine SOCKET MODEL_DIR --interval-ms 20``. A request gets its first token at once, the next
ones every interval; with 0 each turn of the loop gives every request one more. Every token is a word of plain text.
"""

from __future__ import annotations

import argparse
import heapq
import signal
import time
from pathlib import Path

from stencilpress.engine.link import Closed, Link, Received
from stencilpress.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AskStats,
    Ensure,
    Ensured,
    Finished,
    FromEngine,
    Stats,
    Step,
    Submit,
    ToEngine,
    Token,
    Welcome,
)
from stencilpress.engine.spec import load_spec
from tests.fakes.engine import listen

GENERATION = 1


class _Request:
    __slots__ = ("id", "left", "made", "prompt_tokens", "tokens")

    def __init__(self, submit: Submit, tokens: list[Token]) -> None:
        self.id = submit.id
        self.left = submit.max_tokens
        self.made = 0
        self.prompt_tokens = len(submit.prompt) // 4
        self.tokens = tokens


class PacedEngine:
    """The loop of one process. ``words`` are the token ids that it says over and over."""

    def __init__(self, link: Link, words: list[int], interval_s: float) -> None:
        self._link = link
        self._words = words
        self._interval_s = interval_s
        self._requests: dict[tuple[int, int], _Request] = {}
        self._due: list[tuple[float, tuple[int, int]]] = []
        self._kept: dict[int, list[FromEngine]] = {}
        self._steps = 0
        self.running = True

    def run(self) -> None:
        while self.running:
            for event in self._link.poll(self._pause_s()):
                if isinstance(event, Closed):
                    self._requests = {key: one for key, one in self._requests.items() if key[0] != event.connection}
                    self._kept.pop(event.connection, None)
                else:
                    self._take(event)
            self._send_kept()
            self._step(time.monotonic())

    def _pause_s(self) -> float | None:
        if not self._due or all(key[0] in self._kept for _, key in self._due):
            return None
        return max(0.0, self._due[0][0] - time.monotonic())

    def _take(self, event: Received) -> None:
        connection, message = event.connection, event.message
        if isinstance(message, Submit):
            key = (connection, message.id)
            self._requests[key] = _Request(message, [Token(message.id, word) for word in self._words])
            heapq.heappush(self._due, (time.monotonic(), key))
        elif isinstance(message, Abort):
            request = self._requests.pop((connection, message.id), None)
            if request is not None:
                self._send(connection, Step((), (self._end(request, "aborted"),)))
        else:
            self._answer(connection, message)

    def _answer(self, connection: int, message: ToEngine) -> None:
        if isinstance(message, Ensure):
            self._send(connection, Ensured(message.id, ""))
        elif isinstance(message, AskStats):
            counts = dict.fromkeys(Stats.__struct_fields__, 0) | {"id": message.id, "steps": self._steps}
            self._send(connection, Stats(**counts))

    def _step(self, now: float) -> None:
        """One more token for every request that is due, in one message for each gateway."""
        tokens: dict[int, list[Token]] = {}
        finished: dict[int, list[Finished]] = {}
        again: list[tuple[float, tuple[int, int]]] = []
        while self._due and self._due[0][0] <= now:
            due, key = heapq.heappop(self._due)
            request = self._requests.get(key)
            if request is None:
                continue
            if key[0] in self._kept:
                again.append((due, key))
                continue
            tokens.setdefault(key[0], []).append(request.tokens[request.made % len(self._words)])
            request.made += 1
            if request.made == request.left:
                del self._requests[key]
                finished.setdefault(key[0], []).append(self._end(request, "length"))
            else:
                again.append((due + self._interval_s, key))
        for entry in again:
            heapq.heappush(self._due, entry)
        self._steps += bool(tokens)
        for connection, made in tokens.items():
            self._send(connection, Step(tuple(made), tuple(finished.get(connection, ()))))

    def _end(self, request: _Request, reason: str) -> Finished:
        return Finished(request.id, reason, request.prompt_tokens, request.made)  # type: ignore[arg-type]

    def _send(self, connection: int, message: FromEngine) -> None:
        if connection in self._kept or not self._link.send(connection, message):
            self._kept.setdefault(connection, []).append(message)

    def _send_kept(self) -> None:
        for connection, messages in list(self._kept.items()):
            while messages and self._link.writable(connection) and self._link.send(connection, messages[0]):
                messages.pop(0)
            if not messages:
                del self._kept[connection]


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--words", type=int, nargs="+", required=True)
    given = parser.parse_args()
    spec = load_spec(given.model_dir)
    welcome = Welcome(
        PROTOCOL_VERSION, GENERATION, spec.base_id, spec.fingerprint(), spec.vocab_size, 8192, 64, spec.eos_ids
    )
    link = Link(listen(given.socket), welcome)
    engine = PacedEngine(link, given.words, given.interval_ms / 1000)

    def stop(*_: object) -> None:
        engine.running = False
        link.wake()

    signal.signal(signal.SIGTERM, stop)
    engine.run()
    link.close()


if __name__ == "__main__":
    main()
