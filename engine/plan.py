"""The plan of one step: what policy tells the device, and what comes back. Immutable and torch-free.

A step has some for each of hundreds of requests, so they are structs that are quick to make and no concern of the
garbage collector: they are in no cycles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from stencilpress.engine.messages import Sampling

FAILED = -1
"""Stands for a token where the device could not draw one."""

PENDING = -1
"""Stands for a token that the step before draws: the device knows it, policy does not yet."""

Page = int
RequestKey = tuple[int, int]
"""(connection number, request id): unique in an engine's life."""


class Draw(msgspec.Struct, frozen=True, gc=False):
    """The draw that follows a chunk. ``history`` are all ids so far, ``prompt_len`` of them the prompt.

    ``position`` is the index of the output token drawn now; with ``sampling.seed`` it fixes the draw.
    """

    sampling: Sampling
    history: tuple[int, ...] | list[int]
    prompt_len: int
    position: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The part of one request that runs in this step: ``tokens`` at positions ``start`` and on.

    ``pages`` is the request's whole KV page table, long enough for ``start + len(tokens)`` positions.
    A decode is a chunk of one token, perhaps :data:`PENDING`. ``draw`` is None while a prompt is not yet complete.
    ``slot`` is the request's row in per-sequence device state, stable while it runs.
    """

    key: RequestKey
    slot: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[Page, ...]
    draw: Draw | None


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Chunks that share one adapter (None: the base alone), neighbours in the batch."""

    adapter: str | None
    chunks: tuple[Chunk, ...]


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """What one forward computes. Segments come in order; within one, decodes precede prefills."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for segment in self.segments for chunk in segment.chunks)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """What the device drew for one chunk.

    ``token`` is :data:`FAILED` when the row's logits were not finite: that request ends with ``internal``, the
    others of the step go on.
    """

    key: RequestKey
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Residency asks the loader: bring this adapter's image from disk into host memory and check it."""

    digest: str


@dataclass(frozen=True, slots=True)
class PlaceOrder:
    """Residency asks the loader: copy an image into these pool pages, with its slice table; one that is still being
    fetched as it comes. That fetch is answered first, and if it fails, so does the placement."""

    digest: str
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The loader's answer to a fetch. ``error`` is empty on success; ``pages`` is what placing takes.

    ``absent``: its files are not there.
    """

    digest: str
    host_bytes: int
    pages: int
    error: str = ""
    absent: bool = False
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Sized:
    """The loader's first word on a fetch: how many pages a placement takes. It may be ordered from now on."""

    digest: str
    pages: int
    error: str = field(default="", init=False)


@dataclass(frozen=True, slots=True)
class Placed:
    """The loader's answer to a placement."""

    digest: str
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Residency tells the loader that a tier no longer holds an adapter; nothing is answered."""

    digest: str
    tier: Literal["host", "hbm"]


LoadOrder = FetchOrder | PlaceOrder | DropOrder
LoadResult = Sized | Fetched | Placed
