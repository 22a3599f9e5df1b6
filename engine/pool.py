"""The unified pool's page ids: one free list for KV cache and adapters, and who owns each page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from stencilpress.engine.plan import Page, RequestKey

Owner = RequestKey | str
"""A request's key owns KV pages; an adapter's digest owns the pages of its slices."""


class PoolError(RuntimeError):
    """The pool's books do not balance: a bug in whoever holds pages."""


class Pool:
    """Hands out the ids of ``total`` equal pages. Every operation is O(1) per page.

    Pages released while a step is in flight may still be read by the device: they are quarantined until
    that step retires. ``free + kv + adapter + quarantined = total`` always.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.kv = 0
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

    def release(self, pages: Sequence[Page]) -> None:
        """Give pages back, at once or after the step in flight. Raises :class:`PoolError` for an unowned one."""
        for page in pages:
            owner = self._owners[page]
            if owner is None:
                raise PoolError(f"page {page} is released but nobody owns it")
            self._owners[page] = None
            self._count(owner, -1)
        if self._begun > self._retired:
            self._limbo.append((self._begun, pages))
            self.quarantined += len(pages)
        else:
            self._free.extend(pages)

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
        if (len(owned) - adapter, adapter) != (self.kv, self.adapter):
            raise PoolError(
                f"counted {len(owned) - adapter} kv and {adapter} adapter pages, not {self.kv}, {self.adapter}"
            )
        if self.free + self.kv + self.adapter + self.quarantined != self.total:
            books = f"{self.free} free, {self.kv} kv, {self.adapter} adapter, {self.quarantined} quarantined"
            raise PoolError(f"{books} pages are not {self.total}")
        if holdings is not None:
            self._check_holdings(holdings)

    def _check_holdings(self, holdings: Iterable[tuple[Owner, Sequence[Page]]]) -> None:
        held = 0
        for owner, pages in holdings:
            held += len(pages)
            if len(set(pages)) != len(pages) or any(self._owners[page] != owner for page in pages):
                raise PoolError(f"{owner!r} holds pages that are not its own: {pages}")
        if held != self.kv + self.adapter:
            raise PoolError(f"{self.kv + self.adapter - held} pages are owned but nobody holds them")

    def _count(self, owner: Owner, count: int) -> None:
        if isinstance(owner, str):
            self.adapter += count
        else:
            self.kv += count
