"""Every page of the console, for what holds on all of them: accessibility, and how they look."""

from __future__ import annotations

from stencilpress.gateway.access import Role

PAGES = {
    "sign-in": (None, "/console/sign-in"),
    "dashboard": (Role.OPERATOR, "/console/"),
    "tenants": (Role.OPERATOR, "/console/tenants"),
    "adapters-of-all": (Role.OPERATOR, "/console/adapters"),
    "memory": (Role.OPERATOR, "/console/memory"),
    "alerts": (Role.OPERATOR, "/console/alerts"),
    "alert-rules": (Role.OPERATOR, "/console/alerts?view=rules"),
    "audit": (Role.OPERATOR, "/console/audit"),
    "settings": (Role.OPERATOR, "/console/t/demo/settings"),
    "tenant-dashboard": (Role.ADMIN, "/console/t/demo/"),
    "chat": (Role.ADMIN, "/console/t/demo/chat"),
    "adapters": (Role.ADMIN, "/console/t/demo/adapters"),
    "adapter": (Role.ADMIN, "/console/t/demo/adapters/terse"),
    "version": (Role.ADMIN, "/console/t/demo/adapters/terse/versions/1"),
    "aliases": (Role.ADMIN, "/console/t/demo/adapters/terse/aliases"),
    "canary": (Role.ADMIN, "/console/t/demo/adapters/terse/aliases/prod/canary"),
    "smoke-prompts": (Role.ADMIN, "/console/t/demo/adapters/terse/smoke"),
    "adapter-settings": (Role.ADMIN, "/console/t/demo/adapters/terse/settings"),
    "upload": (Role.ADMIN, "/console/t/demo/upload"),
    "usage": (Role.ADMIN, "/console/t/demo/usage"),
    "keys": (Role.ADMIN, "/console/t/demo/keys"),
    "members": (Role.ADMIN, "/console/t/demo/members"),
    "tenant-alerts": (Role.ADMIN, "/console/t/demo/alerts"),
    "tenant-alert-rules": (Role.ADMIN, "/console/t/demo/alerts?view=rules"),
    "tenant-webhook": (Role.ADMIN, "/console/t/demo/alerts?view=webhook"),
    "tenant-audit": (Role.ADMIN, "/console/t/demo/audit"),
    "account": (Role.ADMIN, "/console/account"),
}
"""By name: who looks at it, and its path. Adapter ``terse`` is in every test server."""
