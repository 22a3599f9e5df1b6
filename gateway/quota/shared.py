"""The shared store: the same counts in Valkey or Redis, for several gateways. One script call is one operation."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.quota.terms import (
    DIMENSIONS,
    Ask,
    Levels,
    Outcome,
    Periods,
    Renewal,
    Seeds,
    StoreUnavailableError,
)

TIMEOUT_S = 0.5
"""For connecting and for an answer; a store in the same network takes less than a millisecond."""
MAX_CALLS = 64
"""Of one round trip; calls that come while it runs go together into the next."""
MAX_RENEWALS = 500
"""Leases of one call: a script holds the whole store up while it runs."""

_Call = tuple[list[str | int], asyncio.Future[list[int]]]


class SharedStore:
    """Keys are ``stencilpress:quota:{<tenant>}:<kind>``: a tenant's are in one slot of a cluster.

    Times are the server's, so gateways need not agree on theirs, except on which day it is.
    """

    def __init__(self, url: str, now_ms: int | None = None) -> None:
        """``now_ms`` replaces the server's clock, for tests. Raises :class:`SettingsError` (URL, missing package)."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import NoScriptError, RedisError
        except ImportError:
            raise SettingsError("STENCILPRESS_QUOTA_STORE needs the extra: pip install 'stencilpress[redis]'") from None
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # a second try may charge twice
            )
        except ValueError as error:
            raise SettingsError(f"STENCILPRESS_QUOTA_STORE: {error}") from None
        self.now_ms = now_ms
        self._failures = (RedisError, OSError, TimeoutError)
        self._unknown_script = NoScriptError
        self._script = files("stencilpress.gateway.quota").joinpath("script.lua").read_text(encoding="utf-8")
        self._digest = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._calls: deque[_Call] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def reserve(self, ask: Ask, seeds: Seeds | None) -> Outcome | None:
        quota, periods = ask.quota, ask.periods
        limits = [quota.concurrent_streams, quota.requests_per_minute, quota.tokens_per_minute]
        limits += [quota.tokens_per_day, quota.tokens_per_month]
        arguments: list[str | int] = [ask.lease_id, ask.tokens, ask.lease_ms, int(quota.shadow)]
        arguments += ["" if limit is None else limit for limit in limits]
        arguments += [*periods.day, *periods.month, *(("", "") if seeds is None else (seeds.day, seeds.month))]
        answer = await self._call("reserve", ask.tenant_id, arguments)
        if not answer:
            return None
        return Outcome(DIMENSIONS[answer[0] - 1] if answer[0] else None, *answer[1:])

    async def settle(self, ask: Ask, used: int, reported: int) -> None:
        await self._call("settle", ask.tenant_id, [ask.lease_id, used, reported])

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        by_tenant = sorted(renewals, key=lambda renewal: renewal.ask.tenant_id)
        for tenant_id, group in groupby(by_tenant, key=lambda renewal: renewal.ask.tenant_id):
            held = list(group)
            for start in range(0, len(held), MAX_RENEWALS):
                part = held[start : start + MAX_RENEWALS]
                arguments: list[str | int] = [part[0].ask.lease_ms]
                for renewal in part:
                    arguments += [renewal.ask.lease_id, renewal.ask.tokens, renewal.used, renewal.reported]
                await self._call("renew", tenant_id, arguments)

    async def levels(self, tenant_id: int, periods: Periods) -> Levels:
        streams, requests, tokens, *budgets = await self._call("levels", tenant_id, [*periods.day, *periods.month])
        return Levels(streams, requests, tokens, *(None if used < 0 else used for used in budgets))

    async def close(self) -> None:
        if self._sending is not None:
            await asyncio.wait([self._sending])
        await self._redis.aclose()

    async def _call(self, operation: str, tenant_id: int, arguments: Sequence[str | int]) -> list[int]:
        keys = [f"stencilpress:quota:{{{tenant_id}}}:{kind}" for kind in ("windows", "expiries", "leases", "budgets")]
        now = "" if self.now_ms is None else self.now_ms
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._calls.append(([len(keys), *keys, operation, now, *arguments], answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return await answer

    async def _send_all(self) -> None:
        """Round trips until nobody waits. When one fails all that wait are told: they need not fail one by one."""
        while self._calls:
            batch = [self._calls.popleft() for _ in range(min(len(self._calls), MAX_CALLS))]
            try:
                answers = await self._round_trip([arguments for arguments, _ in batch])
            except self._failures as error:
                self._fail([*batch, *self._calls], str(error) or type(error).__name__)
                self._calls.clear()
                return
            for (_, future), answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    self._fail([([], future)], str(answer))
                elif not future.done():
                    future.set_result(answer)

    async def _round_trip(self, calls: list[list[str | int]]) -> list[Any]:
        """The answer, or the exception, of each call. A store that began anew is given the script.

        Another gateway may give it the script while it works through these calls: only those that found none are sent
        again, or the others would charge twice.
        """
        answers = await self._send(calls)
        missed = [at for at, answer in enumerate(answers) if isinstance(answer, self._unknown_script)]
        if missed:
            await self._redis.script_load(self._script)
            for at, answer in zip(missed, await self._send([calls[at] for at in missed]), strict=True):
                answers[at] = answer
        return answers

    async def _send(self, calls: list[list[str | int]]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for arguments in calls:
                pipe.execute_command("EVALSHA", self._digest, *arguments)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            return answers

    def _fail(self, calls: list[_Call], reason: str) -> None:
        for _, future in calls:
            if not future.done():
                future.set_exception(StoreUnavailableError(reason))
