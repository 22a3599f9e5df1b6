"""What a key or a person may do: roles, permissions, scopes; and who an audit entry names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from stencilpress.gateway.errors import InvalidRequestError, PermissionDeniedError
from stencilpress.gateway.names import ANY_BASE, is_name

ADMIN_PREFIX = "/admin/api/v1"
MAX_SCOPES = 256
SCOPE_ROUTES = (
    "/v1/chat/completions",
    "/v1/chat/ws",
    "/v1/completions",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/tokenize",
    "/detokenize",
    ADMIN_PREFIX,
)
"""What a key's ``routes`` may name; each stands for itself and everything below it."""


class Role(StrEnum):
    """Of a key or a person. Only an operator's reaches beyond its own tenant."""

    OPERATOR = "operator"
    ADMIN = "admin"
    VIEWER = "viewer"
    CALLER = "caller"


class Permission(StrEnum):
    CALL = "call"
    """Inference."""
    READ = "read"
    """See the tenant's part of the catalog."""
    WRITE = "write"
    """Change what a tenant decides itself: keys, adapters, aliases."""
    OPERATE = "operate"
    """Change what is decided for tenants: their existence and their limits."""


PERMISSIONS: Mapping[Role, frozenset[Permission]] = {
    Role.OPERATOR: frozenset(Permission),
    Role.ADMIN: frozenset({Permission.CALL, Permission.READ, Permission.WRITE}),
    Role.VIEWER: frozenset({Permission.READ}),
    Role.CALLER: frozenset({Permission.CALL}),
}


@dataclass(frozen=True, slots=True)
class Scopes:
    """What a key is confined to; None is everything its role may.

    ``models`` names adapters of the tenant, all versions and aliases of each, and ``base`` for the base alone.
    ``routes`` are among :data:`SCOPE_ROUTES`.
    """

    models: tuple[str, ...] | None = None
    routes: tuple[str, ...] | None = None

    def allows_model(self, adapter: str) -> bool:
        """``adapter`` is "" for the base."""
        return self.models is None or (adapter or ANY_BASE) in self.models

    def allows_route(self, path: str) -> bool:
        """``path`` is a route's pattern, such as ``/v1/models/{model}``."""
        return self.routes is None or any(path == own or path.startswith(f"{own}/") for own in self.routes)

    def covers(self, other: Scopes) -> bool:
        """Whether ``other`` allows nothing that this does not."""
        return _covers(self.models, other.models) and _covers(self.routes, other.routes)


EVERYTHING = Scopes()


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change, with what right, and from where.

    ``tenant_id`` is the key's or the person's; None in the operator's shell.
    """

    name: str
    """``key:<public id>``, ``user:<e-mail address>``, ``cli:<user>``, ``system``, or ``anonymous``."""
    role: Role
    tenant_id: int | None = None
    scopes: Scopes = EVERYTHING
    source: str = ""
    """The address that the request came from, or the host of the shell."""
    request_id: str = ""


SYSTEM = Actor("system", Role.OPERATOR)
"""What the server does by itself, such as enrolling the demo."""


def check_permission(role: Role, needed: Permission) -> None:
    """Raises :class:`PermissionDeniedError`."""
    if needed not in PERMISSIONS[role]:
        raise PermissionDeniedError(f"The role '{role}' may not do this; it needs '{needed}'.")


def check_scopes(models: Iterable[str] | None, routes: Iterable[str] | None) -> Scopes:
    """Scopes without repetition. Raises :class:`InvalidRequestError` for a name that can never match."""
    scopes = Scopes(_distinct(models, "models"), _distinct(routes, "routes"))
    for name in scopes.models or ():
        if not is_name(name):
            raise InvalidRequestError(
                f"models: {name[:64]!r} is no adapter's name; versions and aliases follow their adapter", param="models"
            )
    unknown = [route for route in scopes.routes or () if route not in SCOPE_ROUTES]
    if unknown:
        raise InvalidRequestError(
            f"routes: {unknown[0][:64]!r} is not one of {', '.join(SCOPE_ROUTES)}", param="routes"
        )
    return scopes


def check_grant(actor: Actor, role: Role, scopes: Scopes) -> None:
    """A key never exceeds the one that makes or changes it. Raises :class:`PermissionDeniedError`."""
    if not PERMISSIONS[role] <= PERMISSIONS[actor.role]:
        raise PermissionDeniedError(f"The role '{actor.role}' cannot grant '{role}'.", param="role")
    if not actor.scopes.covers(scopes):
        raise PermissionDeniedError("A key cannot grant more than its own models and routes.", param="scopes")


def _covers(mine: tuple[str, ...] | None, other: tuple[str, ...] | None) -> bool:
    return mine is None or (other is not None and set(other) <= set(mine))


def _distinct(names: Iterable[str] | None, field: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    distinct = tuple(dict.fromkeys(names))
    if len(distinct) > MAX_SCOPES:
        raise InvalidRequestError(f"{field}: {len(distinct)} entries are more than {MAX_SCOPES}", param=field)
    return distinct
