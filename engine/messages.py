"""What crosses the boundary between a gateway and an engine. Token ids and digests, never text.

Each message is one frame of a ring (engine/ring.py): msgpack of a tagged array. Unknown tags and wrong
types raise ``msgspec.ValidationError``; the receiver drops the connection that sent them.

A gateway numbers its requests itself; an id means something on its own connection only. Every
:class:`Submit` is answered by exactly one :class:`Finished`, whatever happens in between.
"""

from __future__ import annotations

import array
import sys
from typing import Literal

import msgspec

PROTOCOL_VERSION = 5

MAX_ADAPTERS_SHOWN = 256
MAX_HELD_SHOWN = 4096
MAX_KEPT = 1024
"""Adapters that one gateway may have pinned, and as many preloaded."""

FinishReason = Literal["stop", "length", "aborted", "error"]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn. The gateway has checked every range.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``logprobs`` -1 mean off. ``seed`` is always set (the
    gateway draws one when the client gave none): the draw for output position p depends on ``(seed, p)``
    alone, so neighbours in the batch and preemption do not change a text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = -1
    logit_bias: dict[int, float] = {}

    @property
    def heeds_history(self) -> bool:
        """Whether a draw depends on the tokens before it, other than through the model."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Generate. ``prompt`` is little-endian int32 (:func:`pack_tokens`); ``adapter`` is "" for the base.

    ``stop_ids`` end the text (the token is counted and delivered, and ``Finished.reason`` is ``stop``).
    ``tenant`` is an opaque handle, ``weight`` its share, ``salt`` keys its prefix cache. Of one tenant's requests
    those of higher ``priority`` go first. One that has not begun ``max_wait_ms`` after it came is refused with
    ``deadline``; 0 waits for ever.
    """

    id: int
    prompt: bytes
    adapter: str
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    tenant: int = 0
    weight: float = 1.0
    salt: bytes = b""
    priority: int = 0
    max_wait_ms: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop a request. It is answered by ``Finished(reason="aborted")`` unless it had ended already."""

    id: int


class Ensure(msgspec.Struct, frozen=True, array_like=True, tag="ensure"):
    """Bring an adapter into host memory and check it, without a request. Answered by :class:`Ensured`."""

    id: int
    adapter: str


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag="ask_stats"):
    """Answered by :class:`Stats`."""

    id: int


class AskAdapters(msgspec.Struct, frozen=True, array_like=True, tag="ask_adapters"):
    """What was seen of adapters, the one used last first: at most ``limit`` (and :data:`MAX_ADAPTERS_SHOWN`) after
    ``offset`` others. Answered by :class:`Adapters`."""

    id: int
    offset: int = 0
    limit: int = 64


class AskHeld(msgspec.Struct, frozen=True, array_like=True, tag="ask_held"):
    """Which adapters take memory, or may be brought in for nobody. Answered by :class:`Held` with the first ones, in
    the order of their digests, that come after ``after``."""

    id: int
    after: str = ""


class AskPages(msgspec.Struct, frozen=True, array_like=True, tag="ask_pages"):
    """Who holds which page of the pool. Answered by :class:`Pages`."""

    id: int


class Keep(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """All adapters that this gateway wants to be at hand without a request; it replaces what was said before.

    Those of ``pinned`` are brought into the pool and stay, as far as half of the adapters' part of it goes; those of
    ``preloaded`` are brought in once, when nobody waits for a load, and give way like others. A gateway says it again
    when it has connected again; what it said ends with its connection. Answered by :class:`Kept`.
    """

    id: int
    pinned: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """An adapter's version is deleted: free all that it takes, now or when the requests that run on it have ended.

    Answered by :class:`Forgotten`.
    """

    id: int
    adapter: str


ToEngine = Submit | Abort | Ensure | AskStats | AskAdapters | AskHeld | AskPages | Keep | Forget


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token of request ``id``. ``top`` holds the most likely ids with their logprobs."""

    id: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The terminal message of a request. ``code`` and ``message`` are set when ``reason`` is ``error``.

    Codes: ``adapter_unavailable`` (unknown, corrupt, unreadable, or too large for the pool), ``context_exceeded``,
    ``capacity`` (can never fit the pool), ``overloaded`` (queue full), ``deadline`` (not begun in time),
    ``internal``, ``engine_lost`` (made by the client when the connection ends).

    ``queue_ms`` is the time from its arrival to its first step, of which it waited ``cold_start_ms`` for its adapter
    to be loaded.
    """

    id: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    code: str = ""
    message: str = ""
    queue_ms: float = 0.0
    cold_start_ms: float = 0.0


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All that one engine step produced for one gateway: one message a step, not one a token."""

    tokens: tuple[Token, ...]
    finished: tuple[Finished, ...]


class Ensured(msgspec.Struct, frozen=True, array_like=True, tag="ensured"):
    """``error`` is empty when the adapter is in host memory and sound."""

    id: int
    error: str


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Gauges and counters of the engine at one moment.

    ``pages_kv`` are in use by requests, ``pages_cached`` kept for others to come, whose prompts took ``cached_tokens``
    from them so far.
    """

    id: int
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_kv: int
    pages_adapter: int
    adapters_hbm: int
    adapters_host: int
    steps: int
    prompt_tokens: int
    completion_tokens: int
    preemptions: int
    adapter_loads: int
    adapter_evictions: int
    pages_cached: int = 0
    cached_tokens: int = 0
    adapter_host_bytes: int = 0
    adapter_failures: int = 0
    max_loras: int = 0
    """Distinct adapters in one step; 0 from an engine that does not say."""
    adapter_hits: int = 0
    adapter_misses: int = 0
    """Requests whose adapter was in the pool when they began; that it was loaded for."""
    adapters_per_step: dict[int, int] = {}
    """Steps so far by how many distinct adapters they ran; at most ``max_loras``."""
    requests_per_step: dict[int, int] = {}
    """Steps so far by how many requests they ran; at most the engine's seats."""


class AdapterSeen(msgspec.Struct, frozen=True, array_like=True):
    """One adapter of :class:`Adapters`.

    ``tier`` is ``disk``, ``fetching``, ``host``, ``loading`` or ``hbm``; ``tenant`` used it last. ``waiting`` and
    ``active`` are requests now. ``misses`` are the requests that it was loaded for, ``hits`` the others; ``reads`` from
    disk and ``copies`` into the pool took ``read_s`` and ``copy_s`` in all. ``error`` tells why the last load failed.
    """

    digest: str
    tenant: int
    tier: str
    pages: int
    host_bytes: int
    pinned: bool
    waiting: int
    active: int
    hits: int
    misses: int
    evictions: int
    reads: int
    read_s: float
    copies: int
    copy_s: float
    error: str = ""


class Adapters(msgspec.Struct, frozen=True, array_like=True, tag="adapters"):
    """``total`` adapters are remembered; these are some of them."""

    id: int
    total: int
    adapters: tuple[AdapterSeen, ...]


class Held(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """Digests in order; those are all if there are fewer than :data:`MAX_HELD_SHOWN`."""

    id: int
    adapters: tuple[str, ...]


class PageOwner(msgspec.Struct, frozen=True, array_like=True):
    """``kind`` is ``free``, ``quarantined``, ``cached``, ``kv`` (``name``: the tenant) or ``adapter`` (its digest)."""

    kind: str
    name: str = ""


class Pages(msgspec.Struct, frozen=True, array_like=True, tag="pages"):
    """The pool's pages in order: ``runs`` is pairs of little-endian uint32, an index of ``owners`` and how many pages
    (:func:`unpack_tokens` reads it)."""

    id: int
    total: int
    owners: tuple[PageOwner, ...]
    runs: bytes


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """``error`` is empty when the engine will do what it was told; how far it has come, :class:`Adapters` shows."""

    id: int
    error: str


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """``pages`` are those that running requests still hold of it, with what they share of its prefixes."""

    id: int
    pages: int


Answer = Ensured | Stats | Adapters | Held | Pages | Kept | Forgotten
FromEngine = Step | Ensured | Stats | Adapters | Held | Pages | Kept | Forgotten


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First packet of a gateway, sent with the two ring descriptors (requests, replies)."""

    version: int
    pid: int
    request_bytes: int
    reply_bytes: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """First packet of the engine: its generation and the limits that intake and validation need."""

    version: int
    generation: int
    base_id: str
    spec_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_lora_rank: int
    eos_ids: tuple[int, ...]


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids as little-endian int32, the densest form that needs no parsing."""
    packed = array.array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of :func:`pack_tokens`. Raises ``ValueError`` if the length is no multiple of four."""
    tokens = array.array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
