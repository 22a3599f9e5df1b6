"""``stencilpress alias``: names that point at versions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stencilpress.commands import Place, json_option, operator_here, place_options, show, show_one, tell
from stencilpress.version_commands import ref_command, smoke, tenant_option, with_tenant

if TYPE_CHECKING:
    from stencilpress.gateway.catalog.canaries import Comparison
    from stencilpress.gateway.catalog.records import Alias, AliasTarget, Expected, SmokeRun, Tenant
    from stencilpress.gateway.catalog.session import Database

_expect_option = click.option("--expect", type=click.IntRange(0), help="Only if it points at this version; 0: at none.")
_reason_option = click.option("--reason", default="", help="Why, for the history.")


@click.group()
def alias() -> None:
    """Names that point at versions."""


_alias_command = partial(ref_command, alias, "NAME@ALIAS")


def _parts(ref: str) -> tuple[str, str]:
    name, separator, alias_name = ref.partition("@")
    if not separator:
        raise click.UsageError(f"expected NAME@ALIAS such as helper@prod, got {ref!r}")
    return name, alias_name


@_alias_command("show")
def alias_show(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Show where an alias points."""
    from stencilpress.gateway.api.admin.adapter_views import alias_view
    from stencilpress.gateway.catalog.adapters import get_adapter

    name, alias_name = _parts(ref)
    adapter = with_tenant(place, tenant_name, lambda db, owner: get_adapter(db, owner.id, name))
    if alias_name not in adapter.aliases:
        raise click.ClickException(f"alias: {ref} does not exist")
    show_one(alias_view(adapter, alias_name), as_json)


@alias.command("move")
@place_options
@click.argument("ref", metavar="NAME@ALIAS")
@click.argument("number", metavar="VERSION", type=click.IntRange(1))
@tenant_option
@_expect_option
@click.option("--canary", type=click.IntRange(1), help="A second version for some of the users.")
@click.option("--percent", type=click.IntRange(1, 100), help="How many of them, in per cent.")
@click.option("--max-error-share", type=float, help="Take the canary back if more of its requests fail: 0.05.")
@click.option("--max-ttft-ratio", type=float, help="Or if its p95 of the first token is so many times VERSION's: 1.5.")
@click.option("--min-requests", type=int, default=50, show_default=True, help="Of the canary; fewer decide nothing.")
@click.option("--window-s", type=int, default=600, show_default=True, help="Only requests of so many seconds count.")
@_reason_option
@json_option
def alias_move(
    place: Place,
    ref: str,
    number: int,
    tenant_name: str,
    expect: int | None,
    canary: int | None,
    percent: int | None,
    reason: str,
    as_json: bool,
    **limits: Any,
) -> None:
    """Point an alias at a VERSION, with a canary or without.

    A version that `prod` has not served must pass the smoke prompts; they run on the running server's engine.
    """
    from stencilpress.gateway.catalog.records import AliasTarget, Canary, CanaryGuard, Expected

    if (canary is None) != (percent is None):
        raise click.UsageError("--canary and --percent go together")
    guarded = any(limits[name] is not None for name in ("max_error_share", "max_ttft_ratio"))
    if guarded and canary is None:
        raise click.UsageError("--max-error-share and --max-ttft-ratio need --canary")
    guard = CanaryGuard(**limits) if guarded else None
    second = Canary(canary, percent, guard) if canary is not None and percent is not None else None
    target = AliasTarget(number, second)
    moved = move(place, ref, tenant_name, target, Expected(version=expect), reason)
    _tell_alias(f"{ref} is {moved.adapter}@{moved.target.version}", moved, as_json)


def move(place: Place, ref: str, tenant_name: str, target: AliasTarget, expected: Expected, reason: str = "") -> Alias:
    """Point an alias at a version, past its smoke prompts. Raises an ``ApiError``."""
    from stencilpress.gateway.lifecycle.gatekeeper import move_past_gate

    name, alias_name = _parts(ref)

    async def work(db: Database, owner: Tenant) -> Alias:
        async def run(number: int) -> SmokeRun:
            return await smoke(place, db, owner, name, number)

        return await move_past_gate(
            db, owner.id, name, alias_name, target, run, expected=expected, reason=reason, actor=operator_here()
        )

    return with_tenant(place, tenant_name, work)


@_alias_command("canary")
def alias_canary(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Show how an alias's canary does beside its version, and what its guard says."""
    from datetime import UTC, datetime

    from stencilpress.gateway.api.admin.canary import CanaryReport
    from stencilpress.gateway.catalog.canaries import compare_canary

    name, alias_name = _parts(ref)

    async def work(db: Database, owner: Tenant) -> Comparison:
        return await compare_canary(db, owner.id, name, alias_name, datetime.now(UTC))

    show_one(CanaryReport.of(with_tenant(place, tenant_name, work)), as_json)


@alias.command("rollback")
@place_options
@click.argument("ref", metavar="NAME@ALIAS")
@tenant_option
@_expect_option
@_reason_option
@json_option
def alias_rollback(place: Place, ref: str, tenant_name: str, expect: int | None, reason: str, as_json: bool) -> None:
    """Take the last move of an alias back; repeated, the one before it."""
    from stencilpress.gateway.catalog.aliases import roll_back
    from stencilpress.gateway.catalog.records import Expected

    name, alias_name = _parts(ref)
    options: dict[str, Any] = {"expected": Expected(version=expect), "reason": reason, "actor": operator_here()}
    moved = with_tenant(place, tenant_name, lambda db, owner: roll_back(db, owner.id, name, alias_name, **options))
    _tell_alias(f"{ref} is {moved.adapter}@{moved.target.version}", moved, as_json)


def _tell_alias(text: str, moved: Alias, as_json: bool) -> None:
    from stencilpress.gateway.api.admin.adapter_views import AliasView

    tell(text, AliasView.of(moved), as_json)


@alias.command("remove")
@place_options
@click.argument("ref", metavar="NAME@ALIAS")
@tenant_option
@_expect_option
def alias_remove(place: Place, ref: str, tenant_name: str, expect: int | None) -> None:
    """Take an alias away; requests that name it get a 404."""
    from stencilpress.gateway.catalog.aliases import remove_alias
    from stencilpress.gateway.catalog.records import Expected

    name, alias_name = _parts(ref)
    options: dict[str, Any] = {"expected": Expected(version=expect), "actor": operator_here()}
    with_tenant(place, tenant_name, lambda db, owner: remove_alias(db, owner.id, name, alias_name, **options))
    click.echo(f"removed {ref}")


@alias.command("history")
@place_options
@click.argument("ref", metavar="NAME@ALIAS")
@tenant_option
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Newest moves to list.")
@json_option
def alias_history(place: Place, ref: str, tenant_name: str, limit: int, as_json: bool) -> None:
    """List the moves of an alias, newest first."""
    from stencilpress.gateway.api.admin.adapter_views import AliasMoveView
    from stencilpress.gateway.catalog.aliases import list_moves

    name, alias_name = _parts(ref)
    moves = with_tenant(place, tenant_name, lambda db, owner: list_moves(db, owner.id, name, alias_name, limit=limit))
    columns = ("at", "kind", "version", "canary", "actor", "reason")
    show([AliasMoveView.of(one) for one in moves], as_json, columns)
