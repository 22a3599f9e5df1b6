"""Canaries and their guards: the verdict, and the move that takes a bad one back. On both databases."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stencilpress.gateway.access import SYSTEM
from stencilpress.gateway.alerts.incidents import Subject
from stencilpress.gateway.alerts.rules import Kind
from stencilpress.gateway.catalog.adapters import add_version, get_adapter
from stencilpress.gateway.catalog.aliases import list_moves, move_alias, roll_back
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.canaries import compare_canary, compare_guarded, read_rolled_back
from stencilpress.gateway.catalog.lifecycle import share_adapter
from stencilpress.gateway.catalog.records import AliasTarget, Canary, CanaryGuard, NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, disable_tenant
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.errors import InvalidRequestError, NotFoundError
from stencilpress.gateway.lifecycle.canary import Judgement, Side, judge
from stencilpress.gateway.lifecycle.canary_guard import guard_canaries, verdict_of
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.usage.histogram import bucket_of
from stencilpress.gateway.usage.record import UsageRow
from tests.usage import usage_row

BASE = BaseNames.of(("Acme/Small",))
GUARD = CanaryGuard(max_error_share=0.1, max_ttft_ratio=1.5, min_requests=20)
GUARDED = AliasTarget(1, Canary(2, 10, GUARD))


def side(requests: int, failures: int = 0, ttft_ms: float = 100.0) -> Side:
    return Side(requests, failures, {bucket_of(ttft_ms): requests - failures})


@pytest.mark.parametrize(
    ("guard", "current", "canary", "wanted"),
    [
        (None, side(100), side(100, 100), Judgement.UNGUARDED),
        (GUARD, side(100), side(19, 19), Judgement.UNDECIDED),
        (GUARD, side(100), side(20, 2), Judgement.GOOD),
        (GUARD, side(100), side(20, 3), Judgement.BAD),
        (GUARD, side(0), side(20, 3), Judgement.BAD),
        (GUARD, side(100, 15), side(20, 3), Judgement.GOOD),  # as bad on both sides
        (GUARD, side(19, 19), side(20, 3), Judgement.BAD),  # of which too few say nothing
        (GUARD, side(100), side(20, ttft_ms=140), Judgement.GOOD),
        (GUARD, side(100), side(20, ttft_ms=200), Judgement.BAD),
        (GUARD, side(10), side(20, ttft_ms=900), Judgement.GOOD),  # nothing to compare with
        (CanaryGuard(max_error_share=0.1), side(100), side(50, ttft_ms=900), Judgement.GOOD),
        (CanaryGuard(max_ttft_ratio=1.5), side(100), side(50, 50), Judgement.GOOD),
    ],
)
def test_the_verdict(guard: CanaryGuard | None, current: Side, canary: Side, wanted: Judgement) -> None:
    assert judge(guard, current, canary).judgement is wanted


def test_a_bad_verdict_says_why() -> None:
    verdict = judge(GUARD, side(200, 2), side(50, 10, ttft_ms=400))
    assert verdict.reason == (
        "20 % of 50 requests failed, more than 10 % (1 % of the current version's); "
        "p95 of the first token is 386 ms, 3.8 times the current version's 102 ms"
    )


@pytest.mark.parametrize(
    ("guard", "param"),
    [
        (CanaryGuard(), "canary.guard"),
        (CanaryGuard(max_error_share=1.1), "canary.guard.max_error_share"),
        (CanaryGuard(max_ttft_ratio=0.9), "canary.guard.max_ttft_ratio"),
        (CanaryGuard(max_error_share=0.1, min_requests=0), "canary.guard.min_requests"),
        (CanaryGuard(max_error_share=0.1, window_s=59), "canary.guard.window_s"),
    ],
)
async def test_a_guard_that_cannot_be_is_refused(db: Database, tenant: Tenant, guard: CanaryGuard, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 10, guard)))
    assert refused.value.param == param


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    """With helper@1 (prod) to helper@3."""
    tenant = await create_tenant(db, "acme")
    for number in range(1, 4):
        new = NewVersion(f"{number:064x}", BASE.id, False, (8,), ("q_proj",), 1000, ("adapter_config.json",))
        await add_version(db, tenant.id, "helper", new, BASE)
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1))
    return tenant


def requests(tenant: Tenant, version: int, count: int, **given: Any) -> list[UsageRow]:
    """Requests of now, ``failed`` of them."""
    now, failed = datetime.now(UTC), given.get("failed", 0)
    return [
        usage_row(
            now,
            tenant_id=tenant.id,
            adapter=given.get("adapter", "helper"),
            version=version,
            status="failed" if n < failed else "completed",
            completion_tokens=20,
            ttft_ms=None if n < failed else given.get("ttft_ms", 100.0),
        )
        for n in range(count)
    ]


async def served(db: Database, *rows: list[UsageRow]) -> None:
    await insert_usage(db, [row for some in rows for row in some])
    while await roll_up(db):
        pass


async def target(db: Database, tenant: Tenant) -> AliasTarget:
    adapter = await get_adapter(db, tenant.id, "helper")
    return AliasTarget(adapter.aliases["prod"], adapter.canaries.get("prod"))


async def test_a_bad_canary_is_taken_back_once(db: Database, database_url: str, tenant: Tenant) -> None:
    """By one of four gateways that look at once."""
    await move_alias(db, tenant.id, "helper", "prod", GUARDED)
    assert await target(db, tenant) == GUARDED
    await served(db, requests(tenant, 1, 100), requests(tenant, 2, 30, failed=9))
    others = [Database(database_url) for _ in range(4)]
    done = await asyncio.gather(*(guard_canaries(one) for one in others))
    await asyncio.gather(*(one.close() for one in others))
    assert sum(map(len, done)) == 1
    assert await guard_canaries(db) == []
    assert await target(db, tenant) == AliasTarget(1)
    moves = await list_moves(db, tenant.id, "helper", "prod")
    assert [(move.kind, move.actor) for move in moves][:2] == [("rollback", "system"), ("move", "system")]
    assert moves[0].reason == "canary 2: 30 % of 30 requests failed, more than 10 % (0 % of the current version's)"
    entry = (await list_audit(db))[0]
    assert (entry.action, entry.actor, entry.target) == ("alias.rollback", "system", "alias:helper@prod")
    told = await read_rolled_back(db, datetime.now(UTC))
    subject = Subject(Kind.CANARY_ROLLED_BACK, tenant.id, "helper", "prod")
    assert {one: measured.note for one, measured in told.items()} == {subject: moves[0].reason}
    assert await read_rolled_back(db, datetime.now(UTC) + timedelta(hours=2)) == {}


async def test_a_slow_canary_is_taken_back_however_it_was_raised(db: Database, tenant: Tenant) -> None:
    """Not to the state before the last move, in which it was a canary too; a rollback then goes on behind."""
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3))
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1))
    for percent in (5, 50):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, percent, GUARD)))
    await served(db, requests(tenant, 1, 50), requests(tenant, 2, 50, ttft_ms=400.0))
    (taken_back,) = await guard_canaries(db)
    assert taken_back.canary == Canary(2, 50, GUARD)
    assert await target(db, tenant) == AliasTarget(1)
    assert (await roll_back(db, tenant.id, "helper", "prod")).target == AliasTarget(3)


async def test_a_good_canary_and_one_that_few_have_asked_stay(db: Database, tenant: Tenant) -> None:
    await move_alias(db, tenant.id, "helper", "prod", GUARDED)
    await served(db, requests(tenant, 1, 50), requests(tenant, 2, 19, failed=19))
    assert await guard_canaries(db) == []
    assert [verdict_of(one).judgement for one in await compare_guarded(db, datetime.now(UTC))] == [Judgement.UNDECIDED]
    await move_alias(db, tenant.id, "helper", "beta", GUARDED)
    await served(db, requests(tenant, 2, 400))
    assert await guard_canaries(db) == []
    verdicts = {one.running.alias: verdict_of(one) for one in await compare_guarded(db, datetime.now(UTC))}
    assert {alias: one.judgement for alias, one in verdicts.items()} == {
        "prod": Judgement.GOOD,
        "beta": Judgement.GOOD,
    }


async def test_what_was_moved_meanwhile_or_is_disabled_stays(
    db: Database, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await move_alias(db, tenant.id, "helper", "prod", GUARDED)
    await served(db, requests(tenant, 1, 50), requests(tenant, 2, 50, failed=50))
    found = await compare_guarded(db, datetime.now(UTC))
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3, Canary(2, 10, GUARD)))

    async def stale(*_: object) -> Any:
        return found

    with monkeypatch.context() as patched:
        patched.setattr("stencilpress.gateway.lifecycle.canary_guard.compare_guarded", stale)
        assert await guard_canaries(db) == []
    assert (await target(db, tenant)).version == 3
    await disable_tenant(db, "acme", actor=SYSTEM)
    assert await guard_canaries(db) == []


async def test_guests_requests_count_and_other_adapters_and_times_do_not(db: Database, tenant: Tenant) -> None:
    guest, stranger = await create_tenant(db, "guest"), await create_tenant(db, "stranger")
    await share_adapter(db, tenant.id, "helper", "guest")
    await move_alias(db, tenant.id, "helper", "prod", GUARDED)
    await served(db, requests(guest, 2, 30, failed=3), requests(stranger, 2, 9), requests(tenant, 2, 7, adapter="poet"))
    now = datetime.now(UTC)
    one = await compare_canary(db, tenant.id, "helper", "prod", now)
    assert (one.canary.requests, one.canary.failures, one.current.requests) == (30, 3, 0)
    assert one.canary.completion_tokens == 600
    later = await compare_canary(db, tenant.id, "helper", "prod", now + timedelta(seconds=GUARD.window_s + 60))
    assert later.canary.requests == 0
    for adapter, alias in (("helper", "beta"), ("nobody", "prod")):
        with pytest.raises(NotFoundError):
            await compare_canary(db, tenant.id, adapter, alias, now)


async def test_a_guard_comes_back_with_its_canary(db: Database, tenant: Tenant) -> None:
    await move_alias(db, tenant.id, "helper", "prod", GUARDED)
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    assert (await roll_back(db, tenant.id, "helper", "prod")).target == GUARDED
    assert await target(db, tenant) == GUARDED
    assert [move.target for move in await list_moves(db, tenant.id, "helper", "prod")][:3] == [
        GUARDED,
        AliasTarget(2),
        GUARDED,
    ]
