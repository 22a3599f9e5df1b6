"""What the gateways are to be told: one message for each and every step, not one a token."""

from __future__ import annotations

from dataclasses import dataclass, field

from stencilpress.engine.messages import Finished, Step, Token


@dataclass(slots=True)
class _Outgoing:
    tokens: list[Token] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class Replies:
    """Tokens and terminal messages by connection, until they are taken."""

    def __init__(self) -> None:
        self._outgoing: dict[int, _Outgoing] = {}

    def token(self, connection: int, token: Token) -> None:
        self._of(connection).tokens.append(token)

    def finished(self, connection: int, finished: Finished) -> None:
        self._of(connection).finished.append(finished)

    def forget(self, connection: int) -> None:
        """Nobody is there to be told any more."""
        self._outgoing.pop(connection, None)

    def take(self) -> dict[int, Step]:
        """All since the last call."""
        outgoing, self._outgoing = self._outgoing, {}
        return {connection: Step(tuple(told.tokens), tuple(told.finished)) for connection, told in outgoing.items()}

    def _of(self, connection: int) -> _Outgoing:
        return self._outgoing.setdefault(connection, _Outgoing())
