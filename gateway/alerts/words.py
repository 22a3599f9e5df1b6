"""Alerts in words, the same in notifications, the admin API and the console. Pure."""

from __future__ import annotations

from stencilpress.gateway.alerts.incidents import Incident, Subject
from stencilpress.gateway.alerts.rules import DEFINITIONS, Kind, Unit

ITEM_NAMES = {
    Kind.QUOTA_NEAR: "period",
    Kind.QUOTA_ALMOST_SPENT: "period",
    Kind.ENGINE_DOWN: "engine",
    Kind.ADAPTER_CORRUPT: "version",
    Kind.CANARY_ROLLED_BACK: "alias",
}
"""What a subject's ``item`` is called in labels."""

TITLES = {
    Kind.HIT_RATE_FALLING: "Hit rate is falling",
    Kind.HIT_RATE_LOW: "Hit rate is low",
    Kind.COLD_START_SLOW: "Cold starts are slow",
    Kind.FIRST_TOKEN_SLOW: "First tokens are over their objective",
    Kind.ERRORS_HIGH: "Too many requests fail",
    Kind.QUOTA_NEAR: "Quota is running out",
    Kind.QUOTA_ALMOST_SPENT: "Quota is almost spent",
    Kind.ENGINE_DOWN: "Engine is down",
    Kind.DISK_SHARE_LOW: "Disk is filling up",
    Kind.DISK_BYTES_LOW: "Disk is almost full",
    Kind.ADAPTER_CORRUPT: "Version cannot be loaded",
    Kind.CANARY_ROLLED_BACK: "Canary was rolled back",
}

_GIB = 1 << 30


def alert_name(kind: Kind) -> str:
    """The label ``alertname``: ``StencilpressFirstTokenSlow``."""
    return "Stencilpress" + "".join(part.capitalize() for part in kind.split("_"))


def quantity(value: float, unit: Unit) -> str:
    """A value for people: ``12.5 %``, ``850 ms``, ``2.4 s``, ``1.5 GiB``."""
    match unit:
        case Unit.SHARE:
            return f"{100 * value:.3g} %"
        case Unit.MS:
            return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.3g} s"
        case Unit.BYTES:
            return f"{value / _GIB:.3g} GiB"
        case Unit.EVENT:
            return ""


def summary(incident: Incident, tenant: str | None) -> str:
    """One line: what is wrong with what."""
    where = place(incident.subject, tenant)
    title = TITLES[incident.subject.kind]
    return f"{title}: {where}" if where else title


def description(incident: Incident) -> str:
    """What was seen, the threshold, and what there is to say beside."""
    definition = DEFINITIONS[incident.subject.kind]
    if definition.unit is Unit.EVENT:
        return incident.note or definition.summary
    seen, line = (quantity(value, definition.unit) for value in (incident.value, incident.threshold))
    text = f"{definition.summary} is {seen}, {'below' if definition.falls else 'above'} {line}"
    return f"{text} ({incident.note})" if incident.note else text


def place(subject: Subject, tenant: str | None) -> str:
    """What it is about: ``acme/pirate@3``, ``acme, this month``, ``engine 2``; empty for the whole installation."""
    where = "/".join(part for part in (tenant or "", subject.adapter) if part)
    match ITEM_NAMES.get(subject.kind):
        case "version" | "alias":
            return f"{where}@{subject.item}"
        case "period":
            return f"{where}, {'today' if subject.item == 'day' else 'this month'}"
        case "engine":
            return f"engine {subject.item}"
    return where
