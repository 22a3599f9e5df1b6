"""The dashboards: of all tenants, and of one. Everything is out of roll-ups; a script follows with the same figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import series
from stencilpress.gateway.api.admin.series_views import SeriesView, TopView, UsageTotals
from stencilpress.gateway.names import ANY_BASE
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX
from stencilpress.web.formats import milliseconds, number, percent
from stencilpress.web.page import page, render, tenant_of
from stencilpress.web.panels import changes, charts_of
from stencilpress.web.span import RANGES, Shown, shown_span

ORDERS = {
    "tokens": "Tokens",
    "ttft_p99": "First token p99",
    "cold_starts": "Cold starts",
    "hit_rate": "Hit rate",
}
POINTS = 120
SERIES_FRESH_S = 15
"""How often an open page asks again; roll-ups are some seconds behind."""
TOP_ROWS = 20


@dataclass(frozen=True, slots=True)
class Question:
    """What the page is asked to show."""

    span: Shown
    adapter: str
    compare: bool
    by: str

    @classmethod
    def of(cls, request: web.Request) -> Question:
        query = request.query
        by = query.get("by", "tokens")
        return cls(shown_span(request), query.get("adapter", ""), query.get("compare") == "1", by if by in ORDERS else "tokens")

    def link(self, **changed: str) -> str:
        """The query of this page with some parts changed; an empty part is left out."""
        time = {"range": self.span.label} if self.span.label else dict(_pairs(self.span.permalink))
        if "range" in changed:
            time = {}
        parts = {**time, "adapter": self.adapter, "compare": "1" if self.compare else "", "by": self.by, **changed}
        return urlencode({name: value for name, value in parts.items() if value and (name, value) != ("by", "tokens")})

    @property
    def permalink(self) -> str:
        rest = {"adapter": self.adapter, "compare": "1" if self.compare else ""}
        return "&".join(filter(None, (self.span.permalink, urlencode({k: v for k, v in rest.items() if v}))))
