"""From admission to the row in the catalog: a meter per request, written behind in batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from math import ceil, log
from pathlib import Path

import msgspec

from stencilpress.engine.messages import Finished
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.usage.histogram import LEAST_MS, MOST_MS, SCALE, Counts, bucket_of, pack
from stencilpress.gateway.usage.journal import (
    COUNTS_WORD,
    SLOT_WORDS,
    Admission,
    Ending,
    Journal,
    Segment,
    SpoolFullError,
    orphans,
)
from stencilpress.gateway.usage.record import Status, new_key

FLUSH_S = 0.5
BATCH_ROWS = 250
"""Rows of one transaction."""
RETRY_S = 1.0
RECOVER_S = 15.0
"""How often this host's spool is looked through for what killed gateways left."""
LAST_FLUSH_S = 1.0
"""At shutdown; what the catalog does not take by then is recovered at the next start."""

logger = logging.getLogger(__name__)


class Admitted(msgspec.Struct, frozen=True):
    """Who asked for what. ``adapter`` is "" and ``version`` 0 for the base."""

    request_id: str
    tenant_id: int
    key_id: str
    adapter: str
    version: int
    prompt_tokens: int


class Meter:
    """What one request has used so far. Its counts survive this process; :meth:`close` makes its row."""

    __slots__ = (
        "_at",
        "_gap_tokens",
        "_recorder",
        "_segment",
        "_slot",
        "_words",
        "arrived_at",
        "delivered",
        "error",
        "gaps",
        "gaps_ms",
        "prompt_tokens",
        "ttft_ms",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, segment: Segment, slot: int, prompt_tokens: int, arrived_at: float) -> None:
        self._recorder = recorder
        self._segment = segment
        self._slot = slot
        self._words = segment.words
        self._at = SLOT_WORDS * slot + COUNTS_WORD
        self.gaps: Counts = {}
        self.gaps_ms = 0.0
        self._gap_tokens = 0
        self.arrived_at = arrived_at
        self.prompt_tokens = prompt_tokens
        self.delivered = 0
        self.ttft_ms: float | None = None
        self.error = ""

    def deliver(self, tokens: int) -> None:
        """So many more tokens become part of the answer that the client gets."""
        self.delivered += tokens
        self._words[self._at] = self.delivered

    def first(self, now: float) -> None:
        """The first token is here; ``now`` is ``time.perf_counter()``."""
        self.ttft_ms = (now - self.arrived_at) * 1000

    def gap(self, seconds: float, tokens: int) -> None:
        """The next arrival of a choice, with so many tokens, came so long after the one before."""
        ms = seconds * 1000
        bucket = ceil(log(ms) * SCALE) if LEAST_MS < ms < MOST_MS else bucket_of(ms)  # once a token: not worth a call
        gaps = self.gaps
        gaps[bucket] = gaps.get(bucket, 0) + 1
        self.gaps_ms += ms
        self._gap_tokens += tokens

    def billed(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.prompt_tokens + self.delivered

    def bill(self, status: Status) -> int:
        """Tokens to charge for a request that ends so: none for a failure before the first token."""
        return self.billed() if self.delivered or status is not Status.FAILED else 0

    def close(self, status: Status, received: int, finished: list[Finished]) -> None:
        """End the request. ``received`` counts all tokens that the engine made for it."""
        billed_prompt = self.bill(status) - self.delivered
        self._words[self._at + 1] = received
        now_ns = time.time_ns()
        self._segment.end(
            self._slot,
            Ending(
                finished_us=now_ns // 1000,
                status=status,
                prompt_tokens=billed_prompt,
                cached_tokens=min(sum(one.cached_tokens for one in finished), billed_prompt),
                ttft_ms=self.ttft_ms,
                inter_token_ms=self.gaps_ms / self._gap_tokens if self._gap_tokens else None,
                queue_ms=max((one.queue_ms for one in finished), default=0.0),
                cold_start_ms=max((one.cold_start_ms for one in finished), default=0.0),
                duration_ms=(time.perf_counter() - self.arrived_at) * 1000,
                error_code=self.error,
            ),
        )
        self._recorder.ended(self._segment, self._slot, pack(self.gaps) if self.gaps else None)


class Recorder:
    """The journal of this process and what of it waits for the catalog.

    Its coroutines belong on one loop, that of ``db``; :meth:`open` and the meters may be used on another.
    """

    def __init__(self, db: Database, folder: Path, max_bytes: int) -> None:
        """Raises ``OSError`` if the folder cannot be used."""
        self._db = db
        self._folder = folder
        self._journal = Journal(folder, max_bytes)
        self._ended: deque[tuple[Segment, int, bytes | None]] = deque()
        self._flushing = asyncio.Lock()

    def open(self, who: Admitted, arrived_at: float) -> Meter:
        """Begin a row. Raises :class:`UnavailableError` when the spool is full: what is not recorded is not served."""
        now_ns = time.time_ns()
        admission = Admission(
            new_key(now_ns),
            who.request_id[:64],
            who.tenant_id,
            who.key_id,
            who.adapter,
            who.version,
            now_ns // 1000,
            who.prompt_tokens,
        )
        try:
            segment, slot = self._journal.claim(admission)
        except SpoolFullError as error:
            logger.error("%s", error)
            raise UnavailableError("Usage cannot be recorded now; try again shortly.") from None
        return Meter(self, segment, slot, who.prompt_tokens, arrived_at)

    def ended(self, segment: Segment, slot: int, gaps: bytes | None) -> None:
        """A meter's row can be written."""
        self._ended.append((segment, slot, gaps))

    async def run(self) -> None:
        """Write rows as they come, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except UnavailableError:
                logger.warning("%d usage rows wait for the catalog", len(self._ended))
                await asyncio.sleep(RETRY_S)

    async def recover_for_ever(self) -> None:
        """Write what gateways of this host left behind when they were killed, until cancelled."""
        while True:
            try:
                await self.recover()
            except UnavailableError:
                logger.warning("the spool of a killed gateway waits for the catalog")
            await asyncio.sleep(RECOVER_S)

    async def flush(self) -> None:
        """Write all rows of requests that have ended. Raises :class:`UnavailableError`."""
        async with self._flushing:
            while self._ended:
                batch = [self._ended[i] for i in range(min(len(self._ended), BATCH_ROWS))]
                rows = [segment.row(slot, gaps) for segment, slot, gaps in batch]
                await insert_usage(self._db, [row for row in rows if row is not None])
                for segment, slot, _ in batch:
                    self._ended.popleft()
                    segment.release(slot)

    async def recover(self) -> None:
        """Write the rows of gateways that were killed; their files go. Raises :class:`UnavailableError`."""
        for segment in orphans(self._folder):
            saved = False
            try:
                rows = list(segment.rows())
                for start in range(0, len(rows), BATCH_ROWS):
                    await insert_usage(self._db, rows[start : start + BATCH_ROWS])
                saved = True
                if rows:
                    logger.warning("recovered %d usage rows of a gateway that was killed", len(rows))
            finally:
                segment.close(remove=saved)

    async def last_flush(self) -> None:
        """Write what can be written within a second."""
        try:
            async with asyncio.timeout(LAST_FLUSH_S):
                await self.flush()
        except (TimeoutError, UnavailableError):
            logger.warning("%d usage rows are left for the next start", len(self._ended))

    def close(self) -> None:
        """Let go of the journal; rows that are still in it are recovered at the next start."""
        self._journal.close()
