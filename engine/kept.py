"""Adapters that should be at hand though nobody asks for them now: what operators keep, and what was used of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from stencilpress.engine.messages import MAX_KEPT


class Kept:
    """What each gateway wants kept, and the ``wishes`` that follow: adapters to bring in when nobody waits for one.

    ``pinned`` is in the order in which gateways named them: where there is no room for all, the first ones have it.
    """

    def __init__(self) -> None:
        self.pinned: dict[str, None] = {}
        self.wishes: deque[str] = deque()
        self._sets: dict[int, tuple[Sequence[str], Sequence[str]]] = {}

    def say(self, gateway: int, pinned: Sequence[str], preloaded: Sequence[str]) -> str:
        """Replace what a gateway wants. Returns why not, or an empty string; nothing is changed then."""
        if max(len(pinned), len(preloaded)) > MAX_KEPT:
            return f"at most {MAX_KEPT} adapters may be pinned, and as many preloaded"
        if pinned or preloaded:
            self._sets[gateway] = (pinned, preloaded)
        else:
            self._sets.pop(gateway, None)
        self.pinned = dict.fromkeys(chain.from_iterable(pinned for pinned, _ in self._sets.values()))
        self.wishes = deque(dict.fromkeys((*self.pinned, *chain.from_iterable(p for _, p in self._sets.values()))))
        return ""

    def wish(self, digest: str) -> None:
        """Have one more brought in."""
        self.wishes.append(digest)

    def unwish(self, digest: str) -> None:
        """One is no more, and need not be brought in unless some gateway still wants it pinned."""
        if digest not in self.pinned and digest in self.wishes:
            self.wishes.remove(digest)
