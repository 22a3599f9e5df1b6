"""The gate before ``prod``: runs the smoke prompts that stand before a move, for the admin API and the command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from stencilpress.gateway.access import SYSTEM, Actor, Role
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.aliases import UNCHECKED, move_alias, numbers_of
from stencilpress.gateway.catalog.lifecycle import count_runs, get_suite, record_run
from stencilpress.gateway.catalog.records import Alias, AliasTarget, Expected, SmokeRun, Tenant, find_version_of
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import ConflictError, RateLimitError, SmokeFailedError, SmokeRequiredError
from stencilpress.gateway.lifecycle.smoke import Engine, SmokePrompt, run_suite
from stencilpress.gateway.tokenizer import ModelTokenizer

RUNS_PER_HOUR = 60
"""Of one tenant's suites. They are neither billed nor counted in its quota."""


async def move_past_gate(
    db: Database,
    tenant_id: int,
    name: str,
    alias: str,
    target: AliasTarget,
    smoke: Callable[[int], Awaitable[SmokeRun]],
    *,
    expected: Expected = UNCHECKED,
    reason: str = "",
    actor: Actor = SYSTEM,
) -> Alias:
    """Move an alias; where versions must pass the smoke prompts first, ``smoke`` runs them.

    Raises :class:`SmokeFailedError` for a version that does not pass, and what ``move_alias`` and ``smoke`` raise.
    """
    for _ in numbers_of(target):
        try:
            return await move_alias(db, tenant_id, name, alias, target, expected=expected, reason=reason, actor=actor)
        except SmokeRequiredError as error:
            run = await smoke(error.version)
            if not run.passed:
                raise SmokeFailedError(error.version, run.results) from None
    return await move_alias(db, tenant_id, name, alias, target, expected=expected, reason=reason, actor=actor)


async def _check_rate(db: Database, tenant_id: int, actor: Actor) -> None:
    """Runs cost the tenant nothing, so there is an end to them; an operator's there is not."""
    now = datetime.now(UTC)
    if actor.role is Role.OPERATOR or await count_runs(db, tenant_id, now - timedelta(hours=1)) < RUNS_PER_HOUR:
        return
    text = f"Limit reached: {RUNS_PER_HOUR} runs of smoke prompts in an hour."
    raise RateLimitError(text, dimension="smoke_runs_per_hour", retry_ms=60_000)


async def run_for(
    db: Database,
    engine: Engine,
    tokenizer: ModelTokenizer,
    tenant: Tenant,
    name: str,
    number: int,
    base_id: str,
    *,
    actor: Actor = SYSTEM,
) -> SmokeRun:
    """Ask a version its adapter's smoke prompts on an engine that serves ``base_id``, and keep the outcome.

    Raises :class:`ConflictError` without prompts or for a version of another base, :class:`NotFoundError`,
    :class:`EngineLostError`, :class:`OverloadedError`, and :class:`RateLimitError` where the tenant has had enough.
    """
    await _check_rate(db, tenant.id, actor)
    version = find_version_of(await get_adapter(db, tenant.id, name), number)
    suite = await get_suite(db, tenant.id, name)
    if suite is None:
        raise ConflictError(f"adapter: {name} has no smoke prompts", param="adapter")
    if version.base_id != base_id:
        raise ConflictError(f"version: {version.ref} is for another base than the one served here", param="version")
    prompts = msgspec.convert(suite.prompts, list[SmokePrompt])
    passed, results = await run_suite(engine, tokenizer, tenant, version, prompts)
    kept: list[dict[str, Any]] = msgspec.to_builtins(results)
    return await record_run(db, tenant.id, name, number, suite.revision, kept, passed=passed, actor=actor)
