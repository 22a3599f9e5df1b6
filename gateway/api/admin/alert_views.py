"""What the admin API shows of alerts and takes for them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stencilpress.gateway.alerts.addresses import MAX_URL_CHARS
from stencilpress.gateway.alerts.incidents import State
from stencilpress.gateway.alerts.rules import (
    DEFINITIONS,
    MAX_FOR_S,
    Kind,
    Place,
    RuleChange,
    Rules,
    Scope,
    Severity,
    Unit,
)
from stencilpress.gateway.alerts.words import TITLES, description, summary
from stencilpress.gateway.catalog.alert_outbox import Delivery, Webhook
from stencilpress.gateway.catalog.alerts import Alert

Duration = Annotated[int, Meta(ge=0, le=MAX_FOR_S)]


class AlertView(msgspec.Struct, frozen=True, kw_only=True):
    """One coming and going of an alert.

    `item` tells several of one place apart: an engine's number, a version, `day` or `month`, an alias. `value` was
    seen last, in the `unit` of the kind. `tenant` is null for what concerns the installation.
    """

    id: int
    kind: Kind
    severity: Severity
    state: State
    tenant: str | None
    adapter: str
    item: str
    summary: str
    description: str
    unit: Unit
    value: float
    threshold: float
    since: datetime
    fired_at: datetime | None
    resolved_at: datetime | None
    acknowledged_at: datetime | None
    acknowledged_by: str

    @classmethod
    def of(cls, one: Alert) -> AlertView:
        incident = one.incident
        subject = incident.subject
        return cls(
            id=one.id,
            kind=subject.kind,
            severity=incident.severity,
            state=incident.state,
            tenant=one.tenant,
            adapter=subject.adapter,
            item=subject.item,
            summary=summary(incident, one.tenant),
            description=description(incident),
            unit=DEFINITIONS[subject.kind].unit,
            value=incident.value,
            threshold=incident.threshold,
            since=incident.since,
            fired_at=incident.fired_at,
            resolved_at=incident.resolved_at,
            acknowledged_at=one.acknowledged_at,
            acknowledged_by=one.acknowledged_by,
        )


class RuleView(msgspec.Struct, frozen=True, kw_only=True):
    """A rule as it holds for an adapter, a tenant, or all, and what is set exactly there.

    It fires once the value has been over the `threshold` (`falls`: below it) for `for_s`, and is resolved once it has
    been well back for `clear_s`. Fewer than `min_requests` in ten minutes decide nothing; 0: it judges no requests.
    """

    kind: Kind
    title: str
    summary: str
    scope: Scope
    unit: Unit
    falls: bool
    adapter: str
    enabled: bool
    threshold: float
    most: float
    for_s: int
    clear_s: int
    min_requests: int
    severity: Severity
    changed: dict[str, Any] | None

    @classmethod
    def of(cls, rules: Rules, kind: Kind, place: Place) -> RuleView:
        definition, rule, change = DEFINITIONS[kind], rules.of(kind, place), rules.change(kind, place)
        given = None if change is None else {n: v for n, v in _fields(change).items() if v is not None}
        return cls(
            kind=kind,
            title=TITLES[kind],
            summary=definition.summary,
            scope=definition.scope,
            unit=definition.unit,
            falls=definition.falls,
            adapter=place.adapter,
            enabled=rule.enabled,
            threshold=rule.threshold,
            most=definition.most,
            for_s=rule.for_s,
            clear_s=rule.clear_s,
            min_requests=rule.min_requests,
            severity=rule.severity,
            changed=given,
        )


class RuleSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of a rule, in place of what was changed before; null inherits from the wider scope."""

    enabled: bool | None = None
    threshold: Annotated[float | None, Meta(description="In the unit of the kind.")] = None
    for_s: Annotated[Duration | None, Meta(description="How long it must be so before it fires.")] = None
    clear_s: Annotated[Duration | None, Meta(description="How long it must be well before it is resolved.")] = None
    min_requests: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None, Meta(description="Fewer in ten minutes decide nothing.")
    ] = None
    severity: Severity | None = None

    @property
    def change(self) -> RuleChange:
        return RuleChange(**_fields(self))


class NewWebhook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts are to be sent. Without `secret` the one that is set stays; null takes it away."""

    url: Annotated[str, Meta(min_length=1, max_length=MAX_URL_CHARS)]
    secret: (
        Annotated[
            Annotated[str, Meta(min_length=16, max_length=200)] | None,
            Meta(description="Signs what is sent, as Standard Webhooks says."),
        ]
        | UnsetType
    ) = UNSET


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True):
    """A notification: `waiting`, `delivered`, or `failed` after a day of attempts."""

    id: str
    state: str
    group: str
    alerts: int
    attempts: int
    created_at: datetime
    done_at: datetime | None
    error: str

    @classmethod
    def of(cls, one: Delivery) -> DeliveryView:
        return cls(
            id=f"msg_{one.id}",
            state=one.state,
            group=str(one.body["groupKey"]),
            alerts=len(one.body["alerts"]) + int(one.body["truncatedAlerts"]),
            attempts=one.attempts,
            created_at=one.created_at,
            done_at=one.done_at,
            error=one.error,
        )


class WebhookView(msgspec.Struct, frozen=True, kw_only=True):
    """Where alerts are sent, and the last notifications. `url` is null where nothing is set; a secret is not shown."""

    url: str | None
    signed: bool
    updated_at: datetime | None
    deliveries: list[DeliveryView]

    @classmethod
    def of(cls, hook: Webhook | None, deliveries: tuple[Delivery, ...]) -> WebhookView:
        shown = [DeliveryView.of(one) for one in deliveries]
        if hook is None:
            return cls(url=None, signed=False, updated_at=None, deliveries=shown)
        changed = hook.updated_at if hook.updated_at.timestamp() else None
        return cls(url=hook.url, signed=bool(hook.secret), updated_at=changed, deliveries=shown)


class OperatorWebhookView(msgspec.Struct, frozen=True, kw_only=True):
    """The webhook of the settings: its host alone, since the rest of an address is often a secret."""

    host: str | None
    signed: bool
    deliveries: list[DeliveryView]

    @classmethod
    def of(cls, hook: Webhook | None, deliveries: tuple[Delivery, ...]) -> OperatorWebhookView:
        return cls(
            host=None if hook is None else urlsplit(hook.url).hostname,
            signed=hook is not None and bool(hook.secret),
            deliveries=[DeliveryView.of(one) for one in deliveries],
        )


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """How a test notification fared: taken with a status of 2xx, or why not."""

    delivered: bool
    error: str


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in RuleSetting.__struct_fields__}
