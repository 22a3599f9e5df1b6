"""Passwords: what is taken for one, and their Argon2id hashes, made in few threads so that memory stays bounded."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from stencilpress.gateway.errors import InvalidRequestError, OverloadedError

MIN_CHARS = 12
MAX_CHARS = 256
MEMORY_KIB = 19 << 10
PASSES = 2
LANES = 1
"""The second of the equal settings in OWASP's Password Storage Cheat Sheet: 19 MiB, 2 passes, 1 lane."""
THREADS = 2
"""Hashes that are computed at once: 38 MiB."""
MAX_WAITING = 32
"""Hashes that may wait for a thread, about half a second; more are refused."""

T = TypeVar("T")


def check_password(password: str, email: str = "") -> str:
    """The password as it is hashed: of what looks alike, one form. Raises :class:`InvalidRequestError`."""
    kept = _normal(password)
    if not MIN_CHARS <= len(kept) <= MAX_CHARS:
        raise InvalidRequestError(f"password: must have {MIN_CHARS} to {MAX_CHARS} characters", param="password")
    if len(set(kept)) < MIN_CHARS // 3 or kept.casefold() == email.casefold():
        raise InvalidRequestError("password: is too easy to guess", param="password")
    return kept


class Passwords:
    """Hashes and verifies. One per process; close it at the end."""

    def __init__(self) -> None:
        self._hasher = PasswordHasher(time_cost=PASSES, memory_cost=MEMORY_KIB, parallelism=LANES)
        self._threads = ThreadPoolExecutor(THREADS, "argon2")
        self._waiting = 0
        self._nobodys = ""

    async def hash(self, password: str) -> str:
        """Raises :class:`OverloadedError`."""
        return await self._run(lambda: self._hasher.hash(password))

    async def verify(self, kept: str | None, password: str) -> bool:
        """Whether the password is the hashed one. Without a hash it takes as long and is False.

        Raises :class:`OverloadedError`.
        """
        if not self._nobodys:
            self._nobodys = await self.hash("nobody's")
        return await self._run(lambda: self._matches(kept or self._nobodys, _normal(password))) and kept is not None

    def is_outdated(self, kept: str) -> bool:
        """Whether a hash was made with other parameters than today's."""
        return self._hasher.check_needs_rehash(kept)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _matches(self, kept: str, password: str) -> bool:
        try:
            return self._hasher.verify(kept, password)
        except (VerificationError, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= MAX_WAITING:
            raise OverloadedError("Too many people sign in at this moment; try again shortly.")
        self._waiting += 1
        job = self._threads.submit(work)
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(job)

    def _done(self) -> None:
        self._waiting -= 1


def _normal(password: str) -> str:
    return unicodedata.normalize("NFKC", password)
