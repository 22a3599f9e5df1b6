"""The unified pool's page ids: one free list for KV cache and adapters, and who owns each page."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence

from stencilpress.engine.plan import Page, RequestKey


class Common(enum.Enum):
    """The owner of pages that several requests may read."""

    CACHED = "prefix cache"


Owner = RequestKey | str | Common
"""A request's key owns KV pages of its own, an adapter's digest the pages of its slices."""


class PoolError(RuntimeError):
    """The pool's books do not balance: a bug in whoever holds pages."""


class Pool:
    """Hands out the ids of ``total`` equal pages. Every operation is O(1) per page.

    Pages released while a step is in flight may still be read by the device: they are quarantined until
    that step retires. ``free + kv + cached + adapter + quarantined = total`` always.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.kv = 0
        self.cached = 0
        self.adapter = 0
        self.quarantined = 0
        self._free: list[Page] = list(range(total - 1, -1, -1))
        self._owners: list[Owner | None] = [None] * total
        self._begun = 0
        self._retired = 0
        self._limbo: deque[tuple[int, Sequence[Page]]] = deque()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, owner: Owner) -> tuple[Page, ...] | None:
        """Take ``count`` pages, or None (and nothing is taken) when fewer are free."""
        left = len(self._free) - count
        if left < 0:
            return None
        pages = tuple(self._free[left:])
        del self._free[left:]
        for page in pages:
            self._owners[page] = owner
        self._count(owner, count)
        return pages

    @property
    def begun(self) -> int:
        """The newest step that went to the device."""
        return self._begun

    def release(self, pages: Sequence[Page], last_read: int | None = None) -> None:
        """Give pages back, at once or when step ``last_read`` has retired, the last that may read them.

        By default that is the newest step. Raises :class:`PoolError` for an unowned page.
        """
        for page in pages:
            owner = self._owners[page]
            if owner is None:
                raise PoolError(f"page {page} is released but nobody owns it")
            self._owners[page] = None
            self._count(owner, -1)
        last_read = self._begun if last_read is None else last_read
        if last_read > self._retired:
            self._limbo.append((last_read, pages))
            self.quarantined += len(pages)
        else:
            self._free.extend(pages)

    def hand_over(self, page: Page, owner: Owner) -> None:
        """An owned page changes hands; nobody need wait for a step. Raises :class:`PoolError` for an unowned one."""
        before = self._owners[page]
        if before is None:
            raise PoolError(f"page {page} changes hands but nobody owns it")
        self._owners[page] = owner
        self._count(before, -1)
        self._count(owner, 1)

    def owners(self) -> Sequence[Owner | None]:
        """Of each page; None if it is free or in quarantine. A live view: do not keep it."""
        return self._owners

    def resting(self) -> frozenset[Page]:
        """The pages in quarantine."""
        return frozenset(page for _, pages in self._limbo for page in pages)

    def begin(self, step: int) -> None:
        """A step that may read any page owned now goes to the device. Numbers grow by step, from 1."""
        self._begun = step

    def retire(self, step: int) -> None:
        """The device is done with ``step`` and all before it: what they kept in quarantine is free."""
        self._retired = step
        while self._limbo and self._limbo[0][0] <= step:
            _, pages = self._limbo.popleft()
            self.quarantined -= len(pages)
            self._free.extend(pages)

    def check(self, holdings: Iterable[tuple[Owner, Sequence[Page]]] | None = None) -> None:
        """Raise :class:`PoolError` unless every page has exactly one place and the counters agree.

        ``holdings``, when given, is what the holders believe they own; it must match the records.
        """
        idle = [*self._free, *(page for _, pages in self._limbo for page in pages)]
        if len(set(idle)) != len(idle):
            raise PoolError("a page is free twice")
        if any(self._owners[page] is not None for page in idle):
            raise PoolError("a free page has an owner")
        owned = [owner for owner in self._owners if owner is not None]
        adapter = sum(isinstance(owner, str) for owner in owned)
        cached = owned.count(Common.CACHED)
        counted = (len(owned) - adapter - cached, cached, adapter)
        if counted != (self.kv, self.cached, self.adapter):
            raise PoolError(f"counted {counted} kv, cached and adapter pages, not {self.kv, self.cached, self.adapter}")
        if self.free + sum(counted) + self.quarantined != self.total:
            books = f"{self.free} free, {counted} kv, cached and adapter, {self.quarantined} quarantined"
            raise PoolError(f"{books} pages are not {self.total}")
        if holdings is not None:
            self._check_holdings(holdings)

    def _check_holdings(self, holdings: Iterable[tuple[Owner, Sequence[Page]]]) -> None:
        held = 0
        for owner, pages in holdings:
            held += len(pages)
            if len(set(pages)) != len(pages) or any(self._owners[page] != owner for page in pages):
                raise PoolError(f"{owner!r} holds pages that are not its own: {pages}")
        owned = self.kv + self.cached + self.adapter
        if held != owned:
            raise PoolError(f"{owned - held} pages are owned but nobody holds them")

    def _count(self, owner: Owner, count: int) -> None:
        if isinstance(owner, str):
            self.adapter += count
        elif owner is Common.CACHED:
            self.cached += count
        else:
            self.kv += count
