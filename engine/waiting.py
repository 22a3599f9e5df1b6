"""Requests that wait for a seat: one line per adapter, so that a cold adapter holds up its own line alone."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from stencilpress.engine.accounts import Accounts
from stencilpress.engine.request import Request

COMPACT_AT = 64
"""Stale entries of a line's heap that are put up with before it is built anew."""


class _Line:
    """The requests of one adapter, tenant by tenant.

    ``since`` is the step at which the first of them came, or the last one left for a seat; ``sinces`` are those at
    which each tenant's first one came, or the tenant had a seat with this adapter last. The heap has each tenant's
    first request under a counter that may have grown since, and some that are first no more.
    """

    __slots__ = ("heap", "queues", "since", "sinces")

    def __init__(self, since: int) -> None:
        self.since = since
        self.sinces: dict[int, int] = {}
        self.queues: dict[int, list[Request]] = {}
        self.heap: list[tuple[float, tuple[int, int], int]] = []

    def file(self, request: Request) -> None:
        """Put a tenant's first request into the heap."""
        heappush(self.heap, _entry(request))
        if len(self.heap) > 2 * len(self.queues) + COMPACT_AT:
            self.heap = [_entry(queue[0]) for queue in self.queues.values()]
            heapify(self.heap)

    def head(self) -> Request:
        """The first request of the tenant that has had least. The line must not be empty."""
        while True:
            counter, urgency, tenant = self.heap[0]
            queue = self.queues.get(tenant)
            if queue is None or queue[0].urgency != urgency:
                heappop(self.heap)
            elif queue[0].account.counter > counter:
                heapreplace(self.heap, _entry(queue[0]))
            else:
                return queue[0]


class Waiting:
    """Within a line the tenant goes first that has had least; of its requests the most urgent one.

    A preempted request steps back into its place, not to the end. Nothing here looks at more than one line, so its
    cost does not grow with the number of adapters.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._lines: dict[str | None, _Line] = {}
        """In the order of their ``since``."""
        self._size = 0
        self._longest_steps = 0
        self.favoured: Request | None = None
        """Goes before all others of its line, and of all lines."""

    def __len__(self) -> int:
        return self._size

    def add(self, request: Request, step: int) -> None:
        """Put a request into its adapter's line."""
        line = self._lines.get(request.adapter)
        if line is None:
            line = self._lines[request.adapter] = _Line(step)
        self._accounts.wait(request)
        queue = line.queues.setdefault(request.account.tenant, [])
        line.sinces.setdefault(request.account.tenant, step)
        insort(queue, request, key=_urgency)
        if queue[0] is request:
            line.file(request)
        self._size += 1

    def discard(self, request: Request) -> bool:
        """Take a request out of its line, wherever in it it stands. False if it was in none."""
        account = request.account
        if request.key not in account.waiting:
            return False
        if request is self.favoured:
            self.favoured = None
        line = self._lines[request.adapter]
        queue = line.queues[account.tenant]
        place = bisect_left(queue, request.urgency, key=_urgency)
        del queue[place]
        self._accounts.stop_waiting(request)
        self._size -= 1
        if not queue:
            del line.queues[account.tenant], line.sinces[account.tenant]
            if not line.queues:
                del self._lines[request.adapter]
        elif place == 0:
            line.file(queue[0])
        return True

    def seat(self, request: Request, step: int) -> None:
        """Take a request out of its line for a seat."""
        line = self._lines[request.adapter] = self._lines.pop(request.adapter)
        if request is not self.favoured:
            self._longest_steps = max(self._longest_steps, self._waited(request, step))
        line.since = line.sinces[request.account.tenant] = step
        self.discard(request)

    def left(self, request: Request, step: int) -> None:
        """A request has left its seat: until now its tenant had one with this adapter."""
        line = self._lines.get(request.adapter)
        if line is not None and request.account.tenant in line.sinces:
            line.sinces[request.account.tenant] = step

    def head(self, adapter: str | None) -> Request | None:
        """Whose turn it is in a line; None if nobody waits there."""
        if self.favoured is not None and self.favoured.adapter == adapter:
            return self.favoured
        line = self._lines.get(adapter)
        return line.head() if line is not None else None

    def since(self, adapter: str | None) -> int:
        """The step since which a line that is not empty has not had a seat."""
        return self._lines[adapter].since

    def tenant_since(self, adapter: str | None, tenant: int) -> float:
        """The step since which a tenant that waits in a line has had no seat with its adapter; infinite if it does not
        wait there."""
        line = self._lines.get(adapter)
        return math.inf if line is None else line.sinces.get(tenant, math.inf)

    def take_longest_steps(self) -> int:
        """For how many steps those had waited at most who have got seats since the last call."""
        longest, self._longest_steps = self._longest_steps, 0
        return longest

    def longest(self, step: int, counts: Callable[[str | None], bool]) -> tuple[int, Request] | None:
        """Of each tenant's most urgent request whose adapter counts the one that has waited longest, and how long.
        Looks at all requests."""
        waits = []
        for account in self._accounts.waiting():
            some = (request for request in account.waiting.values() if counts(request.adapter))
            request = min(some, key=_urgency, default=None)
            if request is not None:
                waits.append((self._waited(request, step), request))
        return max(waits, key=lambda wait: wait[0], default=None)

    def _waited(self, request: Request, step: int) -> int:
        """For how many steps it has waited: since it came, or its tenant had a seat with its adapter last."""
        came = (
            request.came_step
            if request.begun_s is None
            else self._lines[request.adapter].sinces[request.account.tenant]
        )
        return step - came

    def stands_since(self, adapter: str | None, step: int) -> bool:
        """Whether a line is not empty and has not had a seat since that step or an earlier one."""
        line = self._lines.get(adapter)
        return line is not None and line.since <= step

    def oldest(self) -> Iterator[str | None]:
        """The adapters of all lines, the one first that has not had a seat for longest. A live view: do not keep it."""
        return iter(self._lines)

    def line(self, adapter: str | None) -> Iterator[Request]:
        """A copy of a line, tenant by tenant."""
        line = self._lines.get(adapter)
        return iter([request for queue in line.queues.values() for request in queue] if line is not None else ())

    def adapters(self) -> Iterator[str]:
        """A copy of the adapters for which somebody waits."""
        return iter([adapter for adapter in self._lines if adapter is not None])


def _entry(request: Request) -> tuple[float, tuple[int, int], int]:
    return request.account.counter, request.urgency, request.account.tenant


def _urgency(request: Request) -> tuple[int, int]:
    return request.urgency
