"""Which pages the menu offers: those that exist, of all tenants to an operator, and of the tenant at hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stencilpress.gateway.access import Role
from stencilpress.web.visitor import Visitor

_Pages = Sequence[tuple[str, str, str]]
OF_ALL: _Pages = (
    ("dashboard", "Dashboard", "/console/"),
    ("tenants", "Tenants", "/console/tenants"),
    ("adapters", "Adapters", "/console/adapters"),
    ("memory", "Memory", "/console/memory"),
    ("alerts", "Alerts", "/console/alerts"),
    ("audit", "Audit", "/console/audit"),
)
OF_TENANT: _Pages = (
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
"""Section, label and the route's pattern. The section is the icon's name too."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the menu. ``badge`` is a number that wants attention, 0 for none."""

    label: str
    href: str
    icon: str
    current: bool
    badge: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that belong together: of all tenants, without a ``label``, or of the one that it names."""

    label: str
    items: Sequence[Item]


def menu(
    visitor: Visitor | None, section: str, tenant: str | None, paths: Collection[str], firing: Mapping[str, int]
) -> list[Group]:
    """What a visitor may go to from ``section`` of a tenant, or of all; ``paths`` are the routes that exist.

    ``firing`` has the number of alerts by tenant, "" of all.
    """
    if visitor is None:
        return []
    groups: list[Group] = []
    if visitor.role is Role.OPERATOR:
        groups.append(_group("", OF_ALL, section if tenant is None else "", paths, firing))
    shown = tenant or ("" if visitor.role is Role.OPERATOR else visitor.tenant)
    if shown:
        pages = [one for one in OF_TENANT if one[0] != "chat" or visitor.role is not Role.VIEWER]
        groups.append(_group(shown, pages, section if tenant else "", paths, firing))
    return [group for group in groups if group.items]


def _group(label: str, pages: _Pages, current: str, paths: Collection[str], firing: Mapping[str, int]) -> Group:
    badges = {"alerts": firing.get(label, 0)}
    items = [
        Item(text, path.replace("{tenant}", label), section, section == current, badges.get(section, 0))
        for section, text, path in pages
        if path in paths
    ]
    return Group(label, items)
