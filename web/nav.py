"""Which pages the menu offers: those that exist, of all tenants to an operator, and of the tenant at hand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stencilpress.gateway.access import Role
from stencilpress.web.visitor import Visitor

OF_ALL = (
    ("dashboard", "Dashboard", "/console/"),
    ("tenants", "Tenants", "/console/tenants"),
    ("adapters", "Adapters", "/console/adapters"),
    ("memory", "Memory", "/console/memory"),
    ("alerts", "Alerts", "/console/alerts"),
    ("audit", "Audit", "/console/audit"),
)
OF_TENANT = (
    ("dashboard", "Dashboard", "/console/t/{tenant}/"),
    ("chat", "Chat", "/console/t/{tenant}/chat"),
    ("adapters", "Adapters", "/console/t/{tenant}/adapters"),
    ("usage", "Usage", "/console/t/{tenant}/usage"),
    ("keys", "Keys", "/console/t/{tenant}/keys"),
    ("members", "Members", "/console/t/{tenant}/members"),
    ("settings", "Settings", "/console/t/{tenant}/settings"),
    ("alerts", "Alerts", "/console/t/{tenant}/alerts"),
    ("audit", "Audit", "/console/t/{tenant}/audit"),
)
FIRST = ("/console/t/{tenant}/", "/console/t/{tenant}/adapters", "/console/t/{tenant}/members")
"""Where a tenant's people begin, the first that exists."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the menu. ``group`` is "" for pages of all tenants, else the tenant's name."""

    section: str
    label: str
    href: str
    current: bool
    group: str


def menu(visitor: Visitor | None, section: str, tenant: str | None, paths: Collection[str]) -> list[Entry]:
    """The entries for who looks at ``section`` of a tenant, or of all; ``paths`` are the routes that exist."""
    if visitor is None:
        return []
    shown = tenant or ("" if visitor.role is Role.OPERATOR else visitor.tenant)
    entries: list[Entry] = []
    if visitor.role is Role.OPERATOR:
        entries += [_entry(one, "", section if tenant is None else "") for one in OF_ALL if one[2] in paths]
    if shown:
        entries += [_entry(one, shown, section if tenant else "") for one in OF_TENANT if one[2] in paths]
    return [entry for entry in entries if entry.section != "chat" or visitor.role is not Role.VIEWER]


def _entry(page: tuple[str, str, str], group: str, current: str) -> Entry:
    section, label, path = page
    return Entry(section, label, path.replace("{tenant}", group), section == current, group)
