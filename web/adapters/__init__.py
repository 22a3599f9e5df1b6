"""The console's pages about adapters: lists, uploads, aliases and canaries, versions and their differences."""

from __future__ import annotations

from stencilpress.web.adapters import aliases, canary, detail, listing, sharing, smoke, uploads, versions

ROUTES = (
    *listing.ROUTES,
    *uploads.ROUTES,
    *detail.ROUTES,
    *aliases.ROUTES,
    *canary.ROUTES,
    *smoke.ROUTES,
    *sharing.ROUTES,
    *versions.ROUTES,
)
