"""Alerts: what fires and has fired, the rules, and where it is told."""

from __future__ import annotations

from typing import Annotated, Literal

from aiohttp import web
from msgspec import UNSET, Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.alerts.addresses import check_url
from stencilpress.gateway.alerts.incidents import State
from stencilpress.gateway.alerts.prometheus import MEDIA_TYPE, rules_file
from stencilpress.gateway.alerts.rules import DEFINITIONS, Kind, Place, Rules, Scope, find_kind
from stencilpress.gateway.alerts.trial import try_webhook
from stencilpress.gateway.alerts.watch import operator_webhook
from stencilpress.gateway.api.admin.alert_views import (
    AlertView,
    NewWebhook,
    OperatorWebhookView,
    RuleSetting,
    RuleView,
    Trial,
    WebhookView,
)
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.catalog import alert_outbox, alerts
from stencilpress.gateway.catalog.alert_outbox import OPERATOR, Webhook
from stencilpress.gateway.change_limit import TRIAL_COST
from stencilpress.gateway.errors import NotFoundError

Which = Literal["open", "pending", "firing", "resolved", "all"]
STATES: dict[Which, tuple[State, ...]] = {
    "open": (State.PENDING, State.FIRING),
    "pending": (State.PENDING,),
    "firing": (State.FIRING,),
    "resolved": (State.RESOLVED,),
    "all": (),
}


class AlertQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: Annotated[Which, Meta(description="`open` is pending or firing.")] = "open"
    kind: Annotated[Kind | None, Meta(description="Only this kind.")] = None


@operation("GET", "/alerts", Permission.OPERATE)
async def list_alerts(call: Call, query: AlertQuery) -> Page[AlertView]:
    """Alerts of all tenants and of the installation, newest first."""
    return await _page(call, query, None)


@operation("GET", "/tenants/{tenant}/alerts", Permission.READ)
async def list_tenant_alerts(call: Call, query: AlertQuery) -> Page[AlertView]:
    """A tenant's alerts, newest first."""
    return await _page(call, query, call.tenant.id)


@operation("POST", "/alerts/{alert}/acknowledge", Permission.OPERATE)
async def acknowledge_alert(call: Call) -> AlertView:
    """Say that somebody has seen a firing alert."""
    return AlertView.of(await alerts.acknowledge(call.services.db, _alert_id(call), actor=call.actor))


@operation("POST", "/tenants/{tenant}/alerts/{alert}/acknowledge", Permission.WRITE)
async def acknowledge_tenant_alert(call: Call) -> AlertView:
    """Say that somebody has seen a firing alert of a tenant."""
    db, tenant_id = call.services.db, call.tenant.id
    return AlertView.of(await alerts.acknowledge(db, _alert_id(call), tenant_id=tenant_id, actor=call.actor))


@operation("GET", "/alert-rules", Permission.OPERATE)
async def list_alert_rules(call: Call) -> Page[RuleView]:
    """The rules as they hold where no tenant has set its own."""
    rules = await alerts.read_rules(call.services.db)
    return Page([RuleView.of(rules, kind, Place()) for kind in Kind], None)


@operation("PUT", "/alert-rules/{kind}", Permission.OPERATE)
async def set_alert_rule(call: Call, body: RuleSetting) -> RuleView:
    """Change a rule for all; tenants' own changes go before."""
    return await _set(call, body, Place())


@operation("DELETE", "/alert-rules/{kind}", Permission.OPERATE)
async def reset_alert_rule(call: Call) -> RuleView:
    """Let the built-in rule hold again."""
    return await _reset(call, Place())


@operation("GET", "/tenants/{tenant}/alert-rules", Permission.READ)
async def list_tenant_alert_rules(call: Call) -> Page[RuleView]:
    """The rules as they hold for a tenant, then those that are changed for one of its adapters."""
    return Page(tenant_rules(await alerts.read_rules(call.services.db, call.tenant.id), call.tenant.id), None)


@operation("PUT", "/tenants/{tenant}/alert-rules/{kind}", Permission.WRITE)
async def set_tenant_alert_rule(call: Call, body: RuleSetting) -> RuleView:
    """Change a rule for a tenant and its adapters."""
    return await _set(call, body, Place(call.tenant.id))


@operation("DELETE", "/tenants/{tenant}/alert-rules/{kind}", Permission.WRITE)
async def reset_tenant_alert_rule(call: Call) -> RuleView:
    """Let the rule of all hold again for a tenant."""
    return await _reset(call, Place(call.tenant.id))


@operation("PUT", "/tenants/{tenant}/adapters/{adapter}/alert-rules/{kind}", Permission.WRITE)
async def set_adapter_alert_rule(call: Call, body: RuleSetting) -> RuleView:
    """Change a rule for one adapter, such as its objective for first tokens."""
    return await _set(call, body, Place(call.tenant.id, call.path("adapter")))


@operation("DELETE", "/tenants/{tenant}/adapters/{adapter}/alert-rules/{kind}", Permission.WRITE)
async def reset_adapter_alert_rule(call: Call) -> RuleView:
    """Let the tenant's rule hold again for one adapter."""
    return await _reset(call, Place(call.tenant.id, call.path("adapter")))


@operation("GET", "/tenants/{tenant}/alert-webhook", Permission.WRITE)
async def get_alert_webhook(call: Call) -> WebhookView:
    """Where a tenant's alerts are sent, with the last notifications."""
    db, tenant_id = call.services.db, call.tenant.id
    hook = await alert_outbox.find_webhook(db, tenant_id)
    return WebhookView.of(hook, await alert_outbox.list_deliveries(db, tenant_id))


@operation("PUT", "/tenants/{tenant}/alert-webhook", Permission.WRITE)
async def set_alert_webhook(call: Call, body: NewWebhook) -> WebhookView:
    """Send a tenant's alerts to a webhook, which gets what Alertmanager would send."""
    db, tenant_id = call.services.db, call.tenant.id
    check_url(body.url, private=call.services.settings.alert_private_webhooks)
    secret = None if body.secret is UNSET else body.secret or ""
    hook = await alert_outbox.set_webhook(db, tenant_id, body.url, secret, actor=call.actor)
    return WebhookView.of(hook, await alert_outbox.list_deliveries(db, tenant_id))


@operation("DELETE", "/tenants/{tenant}/alert-webhook", Permission.WRITE, status=204)
async def remove_alert_webhook(call: Call) -> web.Response:
    """Send a tenant's alerts nowhere, nor what still waits."""
    await alert_outbox.remove_webhook(call.services.db, call.tenant.id, actor=call.actor)
    return web.Response(status=204)


@operation("POST", "/tenants/{tenant}/alert-webhook/test", Permission.WRITE)
async def try_alert_webhook(call: Call) -> Trial:
    """Send a test notification now and say how it fared."""
    hook = await alert_outbox.get_webhook(call.services.db, call.tenant.id)
    call.services.change_limit.admit(call.tenant.id, call.actor.role, TRIAL_COST)
    return await _try(call, hook, f"tenant/{call.tenant.name}", trusted=False)


@operation("GET", "/alert-webhook", Permission.OPERATE)
async def get_operator_webhook(call: Call) -> OperatorWebhookView:
    """Where all alerts are sent by the server's settings, with the last notifications."""
    deliveries = await alert_outbox.list_deliveries(call.services.db, OPERATOR)
    return OperatorWebhookView.of(operator_webhook(call.services.settings), deliveries)


@operation("POST", "/alert-webhook/test", Permission.OPERATE)
async def try_operator_webhook(call: Call) -> Trial:
    """Send a test notification to the webhook of the settings and say how it fared."""
    hook = operator_webhook(call.services.settings)
    if hook is None:
        raise NotFoundError("webhook: STENCILPRESS_ALERT_WEBHOOK_URL is not set", param="webhook")
    return await _try(call, hook, "operator", trusted=True)


@operation("GET", "/alerts/prometheus-rules", Permission.OPERATE, produces=MEDIA_TYPE)
async def get_prometheus_rules(call: Call) -> web.Response:
    """The rules for all, as a rules file of Prometheus over the metrics of `/metrics`."""
    text = rules_file(await alerts.read_rules(call.services.db))
    headers = {"Content-Disposition": 'attachment; filename="stencilpress.rules.yml"', "Cache-Control": "no-store"}
    return web.Response(text=text, content_type=MEDIA_TYPE, charset="utf-8", headers=headers)


def tenant_rules(rules: Rules, tenant_id: int) -> list[RuleView]:
    """What holds for a tenant, then what is set for its adapters."""
    kinds = [kind for kind, one in DEFINITIONS.items() if one.scope is not Scope.INSTALLATION]
    views = [RuleView.of(rules, kind, Place(tenant_id)) for kind in kinds]
    for kind in kinds:
        own = [place for place in rules.changed_places(kind) if place.tenant_id == tenant_id and place.adapter]
        views += [RuleView.of(rules, kind, place) for place in sorted(own, key=lambda place: place.adapter)]
    return views


async def _page(call: Call, query: AlertQuery, tenant_id: int | None) -> Page[AlertView]:
    found = await alerts.list_alerts(
        call.services.db,
        tenant_id=tenant_id,
        states=STATES[query.state],
        kind=query.kind,
        before_id=decode_cursor(query.after, int),
        limit=query.limit + 1,
    )
    return paged(found, query.limit, lambda one: one.id, AlertView.of)


async def _set(call: Call, body: RuleSetting, place: Place) -> RuleView:
    kind = find_kind(call.path("kind"))
    await alerts.set_rule(call.services.db, kind, place, body.change, actor=call.actor)
    return await _view(call, kind, place)


async def _reset(call: Call, place: Place) -> RuleView:
    kind = find_kind(call.path("kind"))
    await alerts.reset_rule(call.services.db, kind, place, actor=call.actor)
    return await _view(call, kind, place)


async def _view(call: Call, kind: Kind, place: Place) -> RuleView:
    return RuleView.of(await alerts.read_rules(call.services.db, place.tenant_id), kind, place)


async def _try(call: Call, hook: Webhook, receiver: str, *, trusted: bool) -> Trial:
    private = call.services.settings.alert_private_webhooks
    error = await try_webhook(hook, receiver, private=private, trusted=trusted)
    return Trial(delivered=not error, error=error)


def _alert_id(call: Call) -> int:
    """Raises :class:`NotFoundError`: what is no number is an alert that does not exist."""
    text = call.path("alert")
    if not text.isdecimal() or not text.isascii() or len(text) > 18:
        raise NotFoundError(f"alert: {text[:64]!r} does not exist", param="alert")
    return int(text)


OPERATIONS = (
    list_alerts,
    list_tenant_alerts,
    acknowledge_alert,
    acknowledge_tenant_alert,
    get_prometheus_rules,
    list_alert_rules,
    set_alert_rule,
    reset_alert_rule,
    list_tenant_alert_rules,
    set_tenant_alert_rule,
    reset_tenant_alert_rule,
    set_adapter_alert_rule,
    reset_adapter_alert_rule,
    get_alert_webhook,
    set_alert_webhook,
    remove_alert_webhook,
    try_alert_webhook,
    get_operator_webhook,
    try_operator_webhook,
)
