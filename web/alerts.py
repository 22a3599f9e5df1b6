"""Alerts: what fires, what has fired, the rules, and where it is told; of all tenants, or of one."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from multidict import MultiDictProxy

from stencilpress.gateway.access import Permission
from stencilpress.gateway.alerts.rules import DEFINITIONS, Kind, Severity, Unit, find_kind
from stencilpress.gateway.alerts.words import TITLES, quantity
from stencilpress.gateway.api.admin import alerts
from stencilpress.gateway.api.admin.alert_views import AlertView, NewWebhook, RuleSetting, RuleView, Trial
from stencilpress.gateway.api.admin.operation import Operation, Page
from stencilpress.gateway.errors import ApiError, InvalidRequestError, NotFoundError
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX, of_tenant
from stencilpress.web.firing import FIRING
from stencilpress.web.forms import Shown, errors_of, read_form, shown_again, to_struct
from stencilpress.web.page import page, redirect, render, tenant_of
from stencilpress.web.visitor import may_of

ALL = f"{PREFIX}/alerts"
OF_TENANT = f"{PREFIX}/t/{{tenant}}/alerts"
View = Literal["now", "history", "rules", "webhook"]
VIEWS: dict[View, str] = {"now": "Now", "history": "History", "rules": "Rules", "webhook": "Webhook"}
MOST_OPEN = 200
SCALES = {Unit.SHARE: 100.0, Unit.MS: 1.0, Unit.BYTES: 1 / (1 << 30), Unit.EVENT: 1.0}
"""From what rules hold to what people type: per cent, milliseconds, gibibytes."""
UNITS = {Unit.SHARE: "%", Unit.MS: "ms", Unit.BYTES: "GiB", Unit.EVENT: ""}


@page(Permission.OPERATE)
async def show_all(request: web.Request) -> web.StreamResponse:
    return await _show(request)


@page(Permission.READ)
async def show_of_tenant(request: web.Request) -> web.StreamResponse:
    return await _show(request)


@page(Permission.OPERATE)
async def acknowledge(request: web.Request) -> web.StreamResponse:
    return await _acknowledge(request, alerts.acknowledge_alert)


@page(Permission.WRITE)
async def acknowledge_of_tenant(request: web.Request) -> web.StreamResponse:
    return await _acknowledge(request, alerts.acknowledge_tenant_alert)


@page(Permission.OPERATE)
async def change_rule(request: web.Request) -> web.StreamResponse:
    return await _change_rule(request)


@page(Permission.WRITE)
async def change_rule_of_tenant(request: web.Request) -> web.StreamResponse:
    return await _change_rule(request)


@page(Permission.WRITE)
async def set_webhook(request: web.Request) -> web.StreamResponse:
    form, name = await read_form(request), tenant_of(request).name
    try:
        secret = {"secret": None} if "unsigned" in form else {}
        await ask(request, alerts.set_alert_webhook, tenant=name, body=_webhook(form, secret))
    except ApiError as error:
        return await _show(request, "webhook", error, shown_again(form))
    return redirect(request, _at(name, "webhook"), "The webhook has been saved.")


@page(Permission.WRITE)
async def remove_webhook(request: web.Request) -> web.StreamResponse:
    name = tenant_of(request).name
    await ask(request, alerts.remove_alert_webhook, tenant=name)
    return redirect(request, _at(name, "webhook"), "Alerts are sent nowhere now.")


@page(Permission.WRITE)
async def try_webhook(request: web.Request) -> web.StreamResponse:
    name = tenant_of(request).name
    return _tried(request, await ask(request, alerts.try_alert_webhook, tenant=name), name)


@page(Permission.OPERATE)
async def try_operator_webhook(request: web.Request) -> web.StreamResponse:
    return _tried(request, await ask(request, alerts.try_operator_webhook), None)


def _tried(request: web.Request, trial: Trial, tenant: str | None) -> web.Response:
    if trial.delivered:
        return redirect(request, _at(tenant, "webhook"), "The webhook has taken the test.")
    return redirect(request, _at(tenant, "webhook"), f"The webhook has not taken the test: {trial.error}.", "bad")


async def _show(
    request: web.Request, view: View | None = None, error: ApiError | None = None, form: Shown | None = None
) -> web.Response:
    tenant = tenant_of(request).name if "tenant" in request.match_info else None
    views = [one for one in VIEWS if one != "webhook" or may_of(request).write]
    asked: View = next((one for one in views if one == request.query.get("view")), "now")
    chosen = view or asked
    return render(
        request,
        f"alerts/{chosen}.html",
        title="Alerts",
        section="alerts",
        tenant=tenant,
        status=200 if error is None else error.status,
        at=_at(tenant),
        view=chosen,
        views=[(one, VIEWS[one]) for one in views],
        errors=errors_of(error),
        form=form or Shown(),
        **await _READERS[chosen](request, tenant),
    )


async def _now(request: web.Request, tenant: str | None) -> dict[str, Any]:
    query = {"state": "open", "limit": MOST_OPEN}
    found: list[AlertView] = (await ask(request, _listing(tenant), tenant=tenant, query=query)).data
    worst = list(reversed(Severity))
    found.sort(key=lambda one: (one.acknowledged_at is not None, worst.index(one.severity), -one.id))
    firing = [one for one in found if one.state == "firing"]
    return {"firing": firing, "pending": [one for one in found if one.state == "pending"]}


async def _history(request: web.Request, tenant: str | None) -> dict[str, Any]:
    query = {"state": "resolved", "after": request.query.get("after", "")}
    found: Page[AlertView] = await ask(request, _listing(tenant), tenant=tenant, query=query)
    more = None if found.next is None else f"{_at(tenant, 'history')}&{urlencode({'after': found.next})}"
    return {"alerts": found.data, "next": more}


async def _rules(request: web.Request, tenant: str | None) -> dict[str, Any]:
    operation = alerts.list_alert_rules if tenant is None else alerts.list_tenant_alert_rules
    rules: list[RuleView] = (await ask(request, operation, tenant=tenant)).data
    return {
        "rules": [(rule, _shown_rule(rule)) for rule in rules],
        "of_adapters": [(kind.value, TITLES[kind]) for kind, one in DEFINITIONS.items() if one.scope == "adapter"],
        "severities": [("", "Inherited"), *((one.value, one.value.capitalize()) for one in Severity)],
        "edited": f"{request.match_info.get('kind', '')}/{request.get(_ADAPTER, '')}",
        "units": UNITS,
        "none_set": Shown(),
    }


async def _webhooks(request: web.Request, tenant: str | None) -> dict[str, Any]:
    if tenant is None:
        return {"hook": await ask(request, alerts.get_operator_webhook)}
    return {"hook": await ask(request, alerts.get_alert_webhook, tenant=tenant)}


_READERS = {"now": _now, "history": _history, "rules": _rules, "webhook": _webhooks}
_ADAPTER = web.RequestKey("rule_adapter", str)


async def _acknowledge(request: web.Request, operation: Operation) -> web.Response:
    tenant = tenant_of(request).name if "tenant" in request.match_info else None
    await ask(request, operation, tenant=tenant, alert=request.match_info["alert"])
    await request.app[FIRING].refresh()
    return redirect(request, _at(tenant), "The alert has been acknowledged.")


async def _change_rule(request: web.Request) -> web.Response:
    """Set a rule, or with the button ``reset`` let the wider one hold."""
    form = await read_form(request)
    tenant = tenant_of(request).name if "tenant" in request.match_info else None
    request[_ADAPTER] = adapter = form.get("adapter", "").strip() if tenant is not None else ""
    put, delete = _rule_operations(tenant, adapter)
    kind = find_kind(request.match_info["kind"])
    parts: dict[str, Any] = {"kind": kind.value, **({"adapter": adapter} if adapter else {})}
    title = TITLES[kind]
    if "reset" in form:
        await ask(request, delete, tenant=tenant, **parts)
        return redirect(request, _at(tenant, "rules"), f"“{title}” is as the wider rule has it.")
    try:
        await ask(request, put, tenant=tenant, body=_setting(form, kind), **parts)
    except NotFoundError:
        error = InvalidRequestError(f"adapter: {adapter[:64]!r} does not exist", param="adapter")
        return await _show(request, "rules", error, shown_again(form))
    except ApiError as error:
        return await _show(request, "rules", error, shown_again(form))
    return redirect(request, _at(tenant, "rules"), f"“{title}” has been changed.")


def _rule_operations(tenant: str | None, adapter: str) -> tuple[Operation, Operation]:
    if tenant is None:
        return alerts.set_alert_rule, alerts.reset_alert_rule
    if adapter:
        return alerts.set_adapter_alert_rule, alerts.reset_adapter_alert_rule
    return alerts.set_tenant_alert_rule, alerts.reset_tenant_alert_rule


def _setting(form: MultiDictProxy[str], kind: Kind) -> RuleSetting:
    """What a form changes of a rule, in the rule's own unit. Raises :class:`FormError`."""
    setting = to_struct(form, RuleSetting)
    if setting.threshold is None:
        return setting
    return msgspec.structs.replace(setting, threshold=setting.threshold / SCALES[DEFINITIONS[kind].unit])


def _shown_rule(rule: RuleView) -> dict[str, Any]:
    """A rule in words, and what its form holds: only what is set exactly there."""
    changed = dict(rule.changed or {})
    scale = SCALES[rule.unit]
    if "threshold" in changed:
        changed["threshold"] = f"{changed['threshold'] * scale:.6g}"
    if "enabled" in changed:
        changed["enabled"] = "true" if changed["enabled"] else "false"
    line = quantity(rule.threshold, rule.unit).replace(" ", "\u00a0")
    return {
        "line": f"{'below' if rule.falls else 'above'} {line}" if line else "",
        "for": "at once" if not rule.for_s else f"{rule.for_s / 60:.3g} min" if rule.for_s >= 60 else f"{rule.for_s} s",
        "usual": f"{rule.threshold * scale:.6g}",
        "changed": Shown(changed),
    }


def _webhook(form: MultiDictProxy[str], secret: dict[str, None]) -> NewWebhook:
    """An empty secret leaves the one that is set."""
    if secret or form.get("secret", "").strip():
        return to_struct(form, NewWebhook, **secret)
    return NewWebhook(url=form.get("url", "").strip())


def _listing(tenant: str | None) -> Operation:
    return alerts.list_alerts if tenant is None else alerts.list_tenant_alerts


def _at(tenant: str | None, view: View | None = None) -> str:
    path = ALL if tenant is None else of_tenant(OF_TENANT, tenant)
    return path if view is None else f"{path}?view={view}"


ROUTES = (
    web.get(ALL, show_all),
    web.post(f"{ALL}/{{alert}}/acknowledge", acknowledge),
    web.post(f"{ALL}/rules/{{kind}}", change_rule),
    web.post(f"{ALL}/webhook/test", try_operator_webhook),
    web.get(OF_TENANT, show_of_tenant),
    web.post(f"{OF_TENANT}/{{alert}}/acknowledge", acknowledge_of_tenant),
    web.post(f"{OF_TENANT}/rules/{{kind}}", change_rule_of_tenant),
    web.post(f"{OF_TENANT}/webhook", set_webhook),
    web.post(f"{OF_TENANT}/webhook/test", try_webhook),
    web.post(f"{OF_TENANT}/webhook/remove", remove_webhook),
)
