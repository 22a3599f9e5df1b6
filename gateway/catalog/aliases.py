"""Aliases: moved by compare-and-set, with a canary beside the version, a history, and a way back.

A move takes the tenant's row first, as uploads do, so moves of one tenant have an order and of two that expect
the same state one wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.models import (
    AdapterRow,
    AliasMoveRow,
    AliasRow,
    CanaryRow,
    SmokeRunRow,
    SmokeSuiteRow,
    VersionRow,
)
from stencilpress.gateway.catalog.records import Alias, AliasMove, AliasTarget, Canary, CanaryGuard, Expected
from stencilpress.gateway.catalog.rows import find_adapter, locked_adapter
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import (
    AliasMovedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    SmokeRequiredError,
)
from stencilpress.gateway.names import DEFAULT_ALIAS, check_alias_name

MAX_HISTORY = 200
MAX_ALIASES = 50
"""Of one adapter: each is read with it."""
UNCHECKED = Expected()
GUARD_RANGES: Mapping[str, tuple[float, float]] = {
    "max_error_share": (0, 1),
    "max_ttft_ratio": (1, 100),
    "min_requests": (1, 1_000_000),
    "window_s": (60, 86_400),
}


async def move_alias(
    db: Database,
    tenant_id: int,
    name: str,
    alias: str,
    target: AliasTarget,
    *,
    expected: Expected = UNCHECKED,
    reason: str = "",
    actor: Actor = SYSTEM,
) -> Alias:
    """Point an alias at a version, or at two; requests that start from now on follow it.

    Raises :class:`InvalidRequestError` for the alias, :class:`NotFoundError` for an adapter or version,
    :class:`AliasMovedError` unless it is where it was expected, :class:`SmokeRequiredError` if ``prod`` would get
    a version whose smoke prompts have not passed, :class:`ConflictError` for a disabled tenant.
    """
    check_alias_name(alias)
    _check_canary(target)
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = await session.get(AliasRow, (adapter.id, alias))
        before = await _state(session, row)
        _check_expected(name, alias, row, expected)
        for number in numbers_of(target):
            await _check_version(session, adapter, number)
        if alias == DEFAULT_ALIAS:
            await require_smoke(session, adapter.id, set(numbers_of(target)) - set(numbers_of(before)))
        if before == target and row is not None:
            return Alias(name, alias, target, row.move_id, row.updated_at, changed=False)
        if row is None:
            await _check_room(session, adapter.id)
        parent = row.move_id if row is not None else None
        audit(session, actor, "alias.move", _subject(adapter, alias), _facts(before), _facts(target))
        return await _apply(session, adapter, alias, target, _Cause("move", parent, actor, reason))


async def roll_back(
    db: Database,
    tenant_id: int,
    name: str,
    alias: str,
    *,
    expected: Expected = UNCHECKED,
    reason: str = "",
    actor: Actor = SYSTEM,
) -> Alias:
    """Take back the last move of an alias; repeated, the one before it. Smoke prompts are not asked for.

    States whose versions are gone meanwhile are passed over. Raises as :func:`move_alias`, and
    :class:`ConflictError` when there is nothing to go back to.
    """
    check_alias_name(alias)
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = await session.get(AliasRow, (adapter.id, alias))
        if row is None:
            raise NotFoundError(f"alias: {name}@{alias} does not exist", param="alias")
        _check_expected(name, alias, row, expected)
        earlier = await _earlier(session, row)
        target = _target_of(earlier) if earlier is not None else None
        if earlier is None or target is None:
            raise ConflictError(f"alias: {name}@{alias} has no earlier state to go back to", param="alias")
        before = _facts(await _state(session, row))
        audit(session, actor, "alias.rollback", _subject(adapter, alias), before, _facts(target))
        return await _apply(session, adapter, alias, target, _Cause("rollback", earlier.parent_id, actor, reason))


async def rollback_target(db: Database, tenant_id: int, name: str, alias: str) -> AliasTarget | None:
    """Where :func:`roll_back` would go now; None if there is nothing. Raises :class:`NotFoundError`."""
    async with db.read() as session:
        adapter = await find_adapter(session, tenant_id, name)
        row = await session.get(AliasRow, (adapter.id, alias))
        earlier = await _earlier(session, row) if row is not None else None
        return _target_of(earlier) if earlier is not None else None


async def withdraw_canary(
    db: Database, tenant_id: int, name: str, alias: str, *, move_id: int, reason: str, actor: Actor = SYSTEM
) -> Alias:
    """Take an alias's canary away and leave its version, if ``move_id`` is still the last move: a rollback.

    Raises as :func:`move_alias`, and :class:`ConflictError` if there is no canary.
    """
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = await session.get(AliasRow, (adapter.id, alias))
        _check_expected(name, alias, row, Expected(move_id=move_id))
        before = await _state(session, row)
        if row is None or before is None or before.canary is None:
            raise ConflictError(f"alias: {name}@{alias} has no canary", param="alias")
        target = AliasTarget(before.version)
        parent = await _move(session, row, row.move_id)
        while parent is not None and _target_of(parent) != target:
            parent = await _parent(session, parent, row)
        audit(session, actor, "alias.rollback", _subject(adapter, alias), _facts(before), _facts(target))
        cause = _Cause("rollback", parent.parent_id if parent is not None else None, actor, reason)
        return await _apply(session, adapter, alias, target, cause)


async def remove_alias(
    db: Database, tenant_id: int, name: str, alias: str, *, expected: Expected = UNCHECKED, actor: Actor = SYSTEM
) -> None:
    """Take an alias away; requests that name it then get the 404 of a model that does not exist."""
    check_alias_name(alias)
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = await session.get(AliasRow, (adapter.id, alias))
        if row is None:
            raise NotFoundError(f"alias: {name}@{alias} does not exist", param="alias")
        _check_expected(name, alias, row, expected)
        audit(session, actor, "alias.remove", _subject(adapter, alias), _facts(await _state(session, row)))
        await _set_canary(session, adapter.id, alias, None)
        await session.delete(row)
        session.add(_move_row(adapter.id, alias, None, _Cause("remove", row.move_id, actor)))


async def list_moves(
    db: Database, tenant_id: int, name: str, alias: str | None = None, *, limit: int = 50
) -> tuple[AliasMove, ...]:
    """The history of an adapter's aliases, newest first. Raises :class:`NotFoundError`."""
    async with db.read() as session:
        adapter = await find_adapter(session, tenant_id, name)
        query = select(AliasMoveRow).where(AliasMoveRow.adapter_id == adapter.id)
        if alias is not None:
            query = query.where(AliasMoveRow.alias == alias)
        rows = await session.scalars(query.order_by(AliasMoveRow.id.desc()).limit(min(limit, MAX_HISTORY)))
        return tuple(
            AliasMove(row.id, row.alias, row.kind, _target_of(row), row.actor, row.reason, row.at) for row in rows
        )


async def point_first(session: AsyncSession, adapter: AdapterRow, number: int, actor: Actor) -> bool:
    """Point ``prod`` at a version that was just added, unless smoke prompts stand in front of it."""
    if await session.get(SmokeSuiteRow, adapter.id) is not None:
        return False
    row = await session.get(AliasRow, (adapter.id, DEFAULT_ALIAS))
    before, target = await _state(session, row), AliasTarget(number)
    if before != target:
        parent = row.move_id if row is not None else None
        audit(session, actor, "alias.move", _subject(adapter, DEFAULT_ALIAS), _facts(before), _facts(target))
        await _apply(session, adapter, DEFAULT_ALIAS, target, _Cause("move", parent, actor))
    return True


def numbers_of(target: AliasTarget | None) -> tuple[int, ...]:
    """The versions of a target, the canary's last."""
    if target is None:
        return ()
    return (target.version,) if target.canary is None else (target.version, target.canary.version)


async def require_smoke(session: AsyncSession, adapter_id: int, numbers: set[int]) -> None:
    """Raises :class:`SmokeRequiredError` unless the last run of the suite as it is now has passed for each version."""
    suite = await session.get(SmokeSuiteRow, adapter_id)
    if suite is None:
        return
    for number in sorted(numbers):
        query = select(SmokeRunRow.passed).where(
            SmokeRunRow.adapter_id == adapter_id,
            SmokeRunRow.version == number,
            SmokeRunRow.suite_revision == suite.revision,
        )
        if not await session.scalar(query.order_by(SmokeRunRow.id.desc()).limit(1)):
            raise SmokeRequiredError(number)


@dataclass(frozen=True, slots=True)
class _Cause:
    """How a state came about; ``parent`` is the move to which a rollback goes."""

    kind: str
    parent: int | None
    actor: Actor
    reason: str = ""


async def _earlier(session: AsyncSession, row: AliasRow) -> AliasMoveRow | None:
    """The move before an alias's last one whose versions are still there."""
    earlier = await _parent(session, await _move(session, row, row.move_id), row)
    while earlier is not None and not await _stands(session, row.adapter_id, _target_of(earlier)):
        earlier = await _parent(session, earlier, row)
    return earlier


async def _check_room(session: AsyncSession, adapter_id: int) -> None:
    """Raises :class:`ConflictError`."""
    count = await session.scalar(select(func.count()).where(AliasRow.adapter_id == adapter_id))
    if (count or 0) >= MAX_ALIASES:
        raise ConflictError(f"alias: an adapter has at most {MAX_ALIASES}; remove one first", param="alias")


async def _apply(session: AsyncSession, adapter: AdapterRow, alias: str, target: AliasTarget, move: _Cause) -> Alias:
    made = _move_row(adapter.id, alias, target, move)
    session.add(made)
    await session.flush()
    await _set_canary(session, adapter.id, alias, None)
    row = AliasRow(adapter_id=adapter.id, name=alias, version=target.version, updated_at=made.at, move_id=made.id)
    await session.merge(row)
    await session.flush()
    await _set_canary(session, adapter.id, alias, target.canary)
    return Alias(adapter.name, alias, target, made.id, made.at)


def _move_row(adapter_id: int, alias: str, target: AliasTarget | None, move: _Cause) -> AliasMoveRow:
    canary = target.canary if target is not None else None
    return AliasMoveRow(
        adapter_id=adapter_id,
        alias=alias,
        kind=move.kind,
        version=target.version if target is not None else 0,
        canary_version=canary.version if canary is not None else None,
        canary_percent=canary.percent if canary is not None else None,
        canary_guard=_stored_guard(canary),
        parent_id=move.parent or None,
        actor=move.actor.name[:100],
        reason=move.reason[:500],
        at=datetime.now(UTC),
    )


def _subject(adapter: AdapterRow, alias: str) -> Target:
    return Target("alias", f"{adapter.name}@{alias}", adapter.tenant_id)


def _facts(target: AliasTarget | None) -> dict[str, Any] | None:
    """What an audit entry shows of an alias's state."""
    if target is None:
        return None
    canary = target.canary
    if canary is None:
        return {"version": target.version, "canary": None}
    guard = {} if canary.guard is None else {"guard": _stored_guard(canary)}
    return {"version": target.version, "canary": {"version": canary.version, "percent": canary.percent, **guard}}


async def _move(session: AsyncSession, alias: AliasRow, move_id: int | None) -> AliasMoveRow | None:
    """A move of this alias; an alias that was imported names one that stayed behind."""
    move = await session.get(AliasMoveRow, move_id) if move_id else None
    return move if move is not None and (move.adapter_id, move.alias) == (alias.adapter_id, alias.name) else None


async def _parent(session: AsyncSession, move: AliasMoveRow | None, alias: AliasRow) -> AliasMoveRow | None:
    return await _move(session, alias, move.parent_id) if move is not None else None


async def _set_canary(session: AsyncSession, adapter_id: int, alias: str, canary: Canary | None) -> None:
    if canary is None:
        await session.execute(delete(CanaryRow).where(CanaryRow.adapter_id == adapter_id, CanaryRow.alias == alias))
    else:
        row = CanaryRow(adapter_id=adapter_id, alias=alias, version=canary.version, percent=canary.percent)
        row.guard = _stored_guard(canary)
        session.add(row)
        await session.flush()


async def _state(session: AsyncSession, row: AliasRow | None) -> AliasTarget | None:
    if row is None:
        return None
    canary = await session.get(CanaryRow, (row.adapter_id, row.name))
    if canary is None:
        return AliasTarget(row.version)
    return AliasTarget(row.version, Canary(canary.version, canary.percent, guard_of(canary.guard)))


def _target_of(move: AliasMoveRow) -> AliasTarget | None:
    if not move.version:
        return None
    canary = None
    if move.canary_version is not None and move.canary_percent is not None:
        canary = Canary(move.canary_version, move.canary_percent, guard_of(move.canary_guard))
    return AliasTarget(move.version, canary)


async def _stands(session: AsyncSession, adapter_id: int, target: AliasTarget | None) -> bool:
    if target is None:
        return False
    for number in numbers_of(target):
        version = await session.get(VersionRow, (adapter_id, number))
        if version is None or version.deleted_at is not None:
            return False
    return True


async def _check_version(session: AsyncSession, adapter: AdapterRow, number: int) -> None:
    version = await session.get(VersionRow, (adapter.id, number)) if 0 < number < 2**31 else None
    if version is None or version.deleted_at is not None:
        raise NotFoundError(f"version: {adapter.name}@{number} does not exist", param="version")


def guard_of(stored: dict[str, Any] | None) -> CanaryGuard | None:
    """A canary's guard as a row holds it."""
    return None if stored is None else msgspec.convert(stored, CanaryGuard, strict=False)


def _stored_guard(canary: Canary | None) -> dict[str, Any] | None:
    if canary is None or canary.guard is None:
        return None
    stored: dict[str, Any] = msgspec.to_builtins(canary.guard)
    return stored


def _check_canary(target: AliasTarget) -> None:
    canary = target.canary
    if canary is None:
        return
    if not 1 <= canary.percent <= 100:
        raise InvalidRequestError(
            f"canary.percent: must be between 1 and 100, got {canary.percent}", param="canary.percent"
        )
    if canary.version == target.version:
        raise InvalidRequestError("canary.version: is the alias's own version", param="canary.version")
    if canary.guard is not None:
        _check_guard(canary.guard)


def _check_guard(guard: CanaryGuard) -> None:
    if guard.max_error_share is None and guard.max_ttft_ratio is None:
        raise InvalidRequestError("canary.guard: sets no limit", param="canary.guard")
    for name, (low, high) in GUARD_RANGES.items():
        value = getattr(guard, name)
        if value is not None and not low <= value <= high:
            text = f"must be between {low:g} and {high:g}, got {value:g}"
            raise InvalidRequestError(f"canary.guard.{name}: {text}", param=f"canary.guard.{name}")


def _check_expected(name: str, alias: str, row: AliasRow | None, expected: Expected) -> None:
    version, move_id = (row.version, row.move_id) if row is not None else (0, -1)
    same = expected.version in (None, version) and expected.move_id in (None, move_id)
    if not same:
        where = f"points at version {version}" if row is not None else "does not exist"
        raise AliasMovedError(f"alias: {name}@{alias} {where}: it is not where you expected it", param="alias")
