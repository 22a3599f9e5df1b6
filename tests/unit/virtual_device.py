"""A device whose memory is a dict and a loader with delays, for the real policy.

The device computes each token from the *contents of the pages* that a plan names, so a page reused too early, a lost
token or a wrong adapter changes the text.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stencilpress.engine.plan import (
    FAILED,
    PENDING,
    Chunk,
    DropOrder,
    Fetched,
    FetchOrder,
    LoadOrder,
    LoadResult,
    Page,
    Placed,
    PlaceOrder,
    RequestKey,
    Sampled,
    Sized,
    StepPlan,
)

VOCAB = 97


def next_token(adapter: str | None, history: Sequence[int]) -> int:
    """The model: a token that depends on the adapter and on every token so far."""
    return zlib.crc32(repr((adapter, list(history))).encode()) % VOCAB


def expected_text(adapter: str | None, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """What a request gets when it runs alone."""
    text: list[int] = []
    while len(text) < max_tokens:
        text.append(next_token(adapter, [*prompt, *text]))
        if text[-1] in stop_ids:
            break
    return text


@dataclass
class Device:
    """Pool memory as the device sees it, and the adapters that it can use. ``fails`` has one draw in fifty fail."""

    page_tokens: int
    memory: dict[Page, dict[int, tuple[str | None, int]] | str] = field(default_factory=dict)
    drawn: dict[RequestKey, int] = field(default_factory=dict)
    adapters: dict[str, tuple[Page, ...]] = field(default_factory=dict)
    fails: random.Random | None = None

    def text(self, adapter: str | None, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
        """What a request must get."""
        return expected_text(adapter, prompt, max_tokens, stop_ids)

    def run(self, plan: StepPlan, adapters: dict[str, tuple[Page, ...]] | None = None) -> list[Sampled]:
        """``adapters`` are those of the time when the step was launched."""
        if adapters is None:
            adapters = self.adapters
        keys = [chunk.key for segment in plan.segments for chunk in segment.chunks]
        slots = [chunk.slot for segment in plan.segments for chunk in segment.chunks]
        self._check_tables([chunk for segment in plan.segments for chunk in segment.chunks])
        assert len(set(keys)) == len(keys)
        assert len(set(slots)) == len(slots)
        assert len({segment.adapter for segment in plan.segments}) == len(plan.segments)
        for adapter in (segment.adapter for segment in plan.segments if segment.adapter is not None):
            assert all(self.memory[page] == adapter for page in adapters[adapter]), "an adapter in use was overwritten"
        return [sampled for segment in plan.segments for sampled in self._run_segment(segment.adapter, segment.chunks)]

    def _check_tables(self, chunks: Sequence[Chunk]) -> None:
        """Requests may share pages that they read, never one that somebody writes in this step or later."""
        uses = Counter(page for chunk in chunks for page in chunk.pages)
        for chunk in chunks:
            assert len(set(chunk.pages)) == len(chunk.pages)
            written = chunk.pages[chunk.start // self.page_tokens :]
            assert all(uses[page] == 1 for page in written), "a request writes a page that another one uses"

    def _run_segment(self, adapter: str | None, chunks: Sequence[Chunk]) -> Iterator[Sampled]:
        lengths = [len(chunk.tokens) for chunk in chunks]
        assert chunks
        assert lengths == sorted(lengths, key=lambda length: length > 1), "a prefill precedes a decode"
        for chunk in chunks:
            self._write(adapter, chunk)
            if chunk.draw is not None:
                history = self._read(adapter, chunk, chunk.start + len(chunk.tokens))
                known = list(chunk.draw.history)  # of one that is gone, the pending token stays unknown
                assert history[: len(known)] == known
                assert len(history) - len(known) <= 1
                assert chunk.draw.position == len(history) - chunk.draw.prompt_len
                self.drawn[chunk.key] = next_token(adapter, history)
                failed = self.fails is not None and self.fails.random() < 0.02
                yield Sampled(chunk.key, FAILED if failed else self.drawn[chunk.key])

    def _write(self, adapter: str | None, chunk: Chunk) -> None:
        assert len(chunk.tokens) > 0
        assert chunk.start + len(chunk.tokens) <= len(chunk.pages) * self.page_tokens
        for position, token in enumerate(chunk.tokens, chunk.start):
            page = chunk.pages[position // self.page_tokens]
            content = self.memory.get(page)
            if isinstance(content, str) or content is None or position % self.page_tokens == 0:
                content = self.memory[page] = {}
            content[position] = (adapter, self.drawn[chunk.key] if token == PENDING else token)

    def _read(self, adapter: str | None, chunk: Chunk, length: int) -> list[int]:
        history = []
        for position in range(length):
            content = self.memory[chunk.pages[position // self.page_tokens]]
            assert not isinstance(content, str), "a KV page was overwritten by an adapter"
            owner, token = content[position]
            assert owner == adapter
            history.append(token)
        return history


class QuickDevice(Device):
    """A device for long runs that are about who runs and when: every token is 1, and memory is not looked at."""

    def text(self, _adapter: str | None, _prompt: Sequence[int], max_tokens: int, _stops: Sequence[int]) -> list[int]:
        return [1] * max_tokens

    def run(self, plan: StepPlan, _adapters: dict[str, tuple[Page, ...]] | None = None) -> list[Sampled]:
        chunks = (chunk for segment in plan.segments for chunk in segment.chunks)
        return [Sampled(chunk.key, 1) for chunk in chunks if chunk.draw is not None]


@dataclass
class Loader:
    """Carries out orders in sequence, at most ``speed`` a step. ``broken`` digests fail to be read.

    ``tells``: how large an adapter is is told a step before it has been read, so that its placement may be ordered.
    """

    device: Device
    needs: dict[str, int]
    broken: set[str] = field(default_factory=set)
    jammed: set[str] = field(default_factory=set)
    tells: bool = False
    told: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    hosted: set[str] = field(default_factory=set)
    orders: deque[LoadOrder] = field(default_factory=deque)
    fetches: list[str] = field(default_factory=list)

    def work(self, speed: int) -> list[LoadResult]:
        results: list[LoadResult] = []
        while speed > 0 and self.orders:
            order = self.orders.popleft()
            if isinstance(order, DropOrder):
                self._drop(order)
                continue
            if self.tells and isinstance(order, FetchOrder) and order.digest not in self.told:
                self.told.add(order.digest)
                self.orders.appendleft(order)
                return [*results, Sized(order.digest, self.needs[order.digest])]
            speed -= 1
            results.append(self._fetch(order) if isinstance(order, FetchOrder) else self._place(order))
        return results

    def _drop(self, order: DropOrder) -> None:
        if order.tier == "host":
            self.hosted.remove(order.digest)
        else:
            del self.device.adapters[order.digest]

    def _fetch(self, order: FetchOrder) -> Fetched:
        assert order.digest not in self.hosted
        self.told.discard(order.digest)
        self.fetches.append(order.digest)
        if order.digest in self.broken:
            self.unread.add(order.digest)
            return Fetched(order.digest, 0, 0, "no such file", absent=len(self.fetches) % 2 == 0)
        self.unread.discard(order.digest)
        self.hosted.add(order.digest)
        return Fetched(order.digest, 1000, self.needs[order.digest])

    def _place(self, order: PlaceOrder) -> Placed:
        assert len(order.pages) == self.needs[order.digest]
        if order.digest in self.unread:
            return Placed(order.digest, "the read that it follows has failed")
        assert order.digest in self.hosted
        if order.digest in self.jammed:
            return Placed(order.digest, "the copy failed")
        for page in order.pages:
            self.device.memory[page] = order.digest
        self.device.adapters[order.digest] = order.pages
        return Placed(order.digest)
