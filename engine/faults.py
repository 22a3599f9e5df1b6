"""Adapters that could not be loaded, and when it is worth another try."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

BACKOFF_S = (1.0, 30.0)
"""After a failed load: the first pause before another try, doubled up to the second."""
MAX_FAILURES = 1024
"""Failed digests remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class _Failure:
    error: str
    pause_s: float
    until_s: float


class Faults:
    """The last failure of each adapter that has not been loaded since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, _Failure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def current(self, digest: str) -> str:
        """Why an adapter cannot be had, while its pause lasts; else empty."""
        failure = self._failures.get(digest)
        return failure.error if failure is not None and self._clock() < failure.until_s else ""

    def add(self, digest: str, error: str) -> None:
        """A load has failed: pause twice as long as the last time."""
        before = self._failures.pop(digest, None)
        pause_s = min(before.pause_s * 2, BACKOFF_S[1]) if before else BACKOFF_S[0]
        self._failures[digest] = _Failure(error, pause_s, self._clock() + pause_s)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def clear(self, digest: str) -> None:
        """A load was good."""
        self._failures.pop(digest, None)
