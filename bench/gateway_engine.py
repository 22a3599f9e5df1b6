"""A fake engine for the gateway's bench: the real ring protocol, tokens by the clock or as fast as they are taken.

``python -m bench.gateway_engine SOCKET MODEL_DIR --interval-ms 20``. A request gets its first token at once; then every
step gives each request one, and steps are an interval apart (0: as fast as the gateway takes them).
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

from stencilpress.engine.link import Closed, Link
from stencilpress.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AskStats,
    Ensure,
    Ensured,
    Finished,
    FinishReason,
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
    __slots__ = ("id", "made", "most", "prompt_tokens", "tokens")

    def __init__(self, submit: Submit, words: list[int]) -> None:
        self.id = submit.id
        self.most = submit.max_tokens
        self.made = 0
        self.prompt_tokens = len(submit.prompt) // 4
        self.tokens = [Token(submit.id, word) for word in words]

    def next(self) -> Token:
        token = self.tokens[self.made % len(self.tokens)]
        self.made += 1
        return token

    def end(self, reason: FinishReason) -> Finished:
        return Finished(self.id, reason, self.prompt_tokens, self.made)


class SteppingEngine:
    """The loop of one process. ``words`` are the token ids that every answer says over and over."""

    def __init__(self, link: Link, words: list[int], interval_s: float) -> None:
        self._link = link
        self._words = words
        self._interval_s = interval_s
        self._running: dict[int, dict[int, _Request]] = {}
        """By connection and id."""
        self._kept: dict[int, list[FromEngine]] = {}
        self._next_step_at = 0.0
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            for event in self._link.poll(self._pause_s()):
                if isinstance(event, Closed):
                    self._running.pop(event.connection, None)
                    self._kept.pop(event.connection, None)
                else:
                    self._take(event.connection, event.message)
            self._send_kept()
            if time.monotonic() >= self._next_step_at:
                self._next_step_at = max(self._next_step_at + self._interval_s, time.monotonic())
                for connection, requests in self._running.items():
                    if connection not in self._kept:
                        self._step(connection, list(requests.values()))

    def _pause_s(self) -> float | None:
        if not any(requests for connection, requests in self._running.items() if connection not in self._kept):
            return None
        return max(0.0, self._next_step_at - time.monotonic())

    def _take(self, connection: int, message: ToEngine) -> None:
        requests = self._running.setdefault(connection, {})
        if isinstance(message, Submit):
            requests[message.id] = _Request(message, self._words)
            self._step(connection, [requests[message.id]])
        elif isinstance(message, Abort):
            if message.id in requests:
                self._send(connection, Step((), (requests.pop(message.id).end("aborted"),)))
        elif isinstance(message, Ensure):
            self._send(connection, Ensured(message.id, ""))
        elif isinstance(message, AskStats):
            self._send(connection, Stats(message.id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))

    def _step(self, connection: int, requests: list[_Request]) -> None:
        """One more token for each, in one message."""
        tokens = tuple([request.next() for request in requests])
        finished = tuple([request.end("length") for request in requests if request.made == request.most])
        for one in finished:
            del self._running[connection][one.id]
        if tokens:
            self._send(connection, Step(tokens, finished))

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
    engine = SteppingEngine(link, given.words, given.interval_ms / 1000)

    def stop(*_: object) -> None:
        engine.stopped = True
        link.wake()

    signal.signal(signal.SIGTERM, stop)
    engine.run()
    link.close()


if __name__ == "__main__":
    main()
