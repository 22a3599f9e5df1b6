"""A step while it is planned, and while the device has it."""

from __future__ import annotations

from dataclasses import dataclass

from stencilpress.engine.plan import Chunk, RequestKey, Segment, StepPlan
from stencilpress.engine.request import Request


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the device has, and its requests."""

    plan: StepPlan
    on_board: dict[RequestKey, Request]

    @property
    def heeds_history(self) -> bool:
        """Whether the next draw of somebody on board depends on the token that this step draws."""
        return any(request.sampling.heeds_history for request in self.on_board.values())


class Batch:
    """The step being planned: chunks by adapter, those of one token apart from longer ones."""

    __slots__ = ("_chunks", "budget", "price", "requests")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.price = 0.0
        self.requests: dict[RequestKey, Request] = {}
        self._chunks: dict[str | None, tuple[list[Chunk], list[Chunk]]] = {}

    def add(self, request: Request, count: int) -> None:
        """Plan the request's next ``count`` tokens and charge its tenant for them."""
        self.price += request.charge(count)
        self._of(request)[count > 1].append(request.chunk(count))
        self.requests[request.key] = request
        self.budget -= count

    @property
    def adapters(self) -> int:
        """Distinct ones in the step."""
        return len(self._chunks) - (None in self._chunks)

    def add_decodes(self, requests: list[Request]) -> None:
        """The same for the next token of each of these, which draw it."""
        for request in requests:
            self.price += request.charge(1)
            self._of(request)[0].append(request.decode())
            self.requests[request.key] = request
        self.budget -= len(requests)

    def _of(self, request: Request) -> tuple[list[Chunk], list[Chunk]]:
        pair = self._chunks.get(request.adapter)
        if pair is None:
            pair = self._chunks[request.adapter] = ([], [])
        return pair

    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(adapter, (*ones, *longer)) for adapter, (ones, longer) in self._chunks.items())
