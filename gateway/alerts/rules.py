"""The rules: what each kind of alert judges, from which value on, for how long, and who may change that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from stencilpress.gateway.errors import InvalidRequestError, NotFoundError

WINDOW_S = 600
"""Rules on traffic look at requests admitted in the last ten minutes: one question for all adapters and rules."""
MAX_FOR_S = 86_400


class Kind(StrEnum):
    """What goes wrong."""

    HIT_RATE_FALLING = "hit_rate_falling"
    HIT_RATE_LOW = "hit_rate_low"
    COLD_START_SLOW = "cold_start_slow"
    FIRST_TOKEN_SLOW = "first_token_slow"  # noqa: S105 - of an answer
    ERRORS_HIGH = "errors_high"
    QUOTA_NEAR = "quota_near"
    QUOTA_ALMOST_SPENT = "quota_almost_spent"
    ENGINE_DOWN = "engine_down"
    DISK_SHARE_LOW = "disk_share_low"
    DISK_BYTES_LOW = "disk_bytes_low"
    ADAPTER_CORRUPT = "adapter_corrupt"
    CANARY_ROLLED_BACK = "canary_rolled_back"


def find_kind(name: str) -> Kind:
    """Raises :class:`NotFoundError`: what is no kind has no rule."""
    if name not in set(Kind):
        raise NotFoundError(f"kind: {name[:64]!r} does not exist", param="kind")
    return Kind(name)


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Unit(StrEnum):
    """What a value and its threshold are measured in. An ``event`` has no threshold to set."""

    SHARE = "share"
    MS = "ms"
    BYTES = "bytes"
    EVENT = "event"


class Scope(StrEnum):
    """Whose rule it is: ``adapter`` is judged for each adapter and may be set for one, a tenant, or all."""

    INSTALLATION = "installation"
    TENANT = "tenant"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for one subject. It is over the line above ``threshold``, or below it for kinds that fall.

    ``for_s``: it fires once it has been over the line for so long; ``clear_s``: it is resolved once it has been back
    behind the clear line for so long. ``min_requests``: fewer in the window decide nothing.
    """

    enabled: bool
    threshold: float
    for_s: int
    clear_s: int
    min_requests: int
    severity: Severity


@dataclass(frozen=True, slots=True)
class Definition:
    """A kind with its built-in rule. ``most`` is the largest threshold that makes sense."""

    kind: Kind
    scope: Scope
    unit: Unit
    falls: bool
    summary: str
    rule: Rule
    most: float = 1.0
    slack: float = 0.1
    """The clear line lies this share of the threshold on the good side, so a value on the line does not flap."""

    @property
    def on_traffic(self) -> bool:
        return self.rule.min_requests > 0

    def breached(self, value: float, rule: Rule) -> bool:
        return value < rule.threshold if self.falls else value > rule.threshold

    def cleared(self, value: float, rule: Rule) -> bool:
        """Behind the clear line. A breach never is."""
        if self.falls:
            return value >= rule.threshold * (1 + self.slack) or value >= self.most
        return value <= rule.threshold * (1 - self.slack)


def _traffic(threshold: float, severity: Severity, min_requests: int = 50) -> Rule:
    return Rule(True, threshold, for_s=300, clear_s=300, min_requests=min_requests, severity=severity)


def _state(threshold: float, severity: Severity, for_s: int = 0, clear_s: int = 60) -> Rule:
    return Rule(True, threshold, for_s=for_s, clear_s=clear_s, min_requests=0, severity=severity)


_DAY_MS = 86_400_000.0
_PIB = float(1 << 50)


def _spending(kind: Kind, share: float, severity: Severity) -> Definition:
    text = "Share of the tokens of the day or the month that is spent"
    return Definition(kind, Scope.TENANT, Unit.SHARE, False, text, _state(share, severity), slack=0.02)


def _event(kind: Kind, scope: Scope, text: str, rule: Rule) -> Definition:
    return Definition(kind, scope, Unit.EVENT, False, text, rule)


_WARNING, _CRITICAL = Severity.WARNING, Severity.CRITICAL

DEFINITIONS: Mapping[Kind, Definition] = {
    one.kind: one
    for one in (
        Definition(
            Kind.HIT_RATE_FALLING,
            Scope.ADAPTER,
            Unit.SHARE,
            False,
            "How much smaller than in the day before the share of requests that found their adapter loaded",
            _traffic(0.2, _WARNING),
        ),
        Definition(
            Kind.HIT_RATE_LOW,
            Scope.ADAPTER,
            Unit.SHARE,
            True,
            "Share of requests that found their adapter loaded",
            _traffic(0.7, _WARNING),
        ),
        Definition(
            Kind.COLD_START_SLOW,
            Scope.ADAPTER,
            Unit.MS,
            False,
            "99th percentile of the time that requests waited for their adapter to be loaded",
            _traffic(10_000.0, _WARNING, min_requests=10),
            _DAY_MS,
        ),
        Definition(
            Kind.FIRST_TOKEN_SLOW,
            Scope.ADAPTER,
            Unit.MS,
            False,
            "99th percentile of the time to the first token",
            _traffic(5_000.0, _WARNING),
            _DAY_MS,
        ),
        Definition(
            Kind.ERRORS_HIGH,
            Scope.ADAPTER,
            Unit.SHARE,
            False,
            "Share of requests that ended in an error",
            _traffic(0.05, _CRITICAL),
        ),
        _spending(Kind.QUOTA_NEAR, 0.8, _WARNING),
        _spending(Kind.QUOTA_ALMOST_SPENT, 0.95, _CRITICAL),
        _event(
            Kind.ENGINE_DOWN, Scope.INSTALLATION, "An engine does not answer", _state(0.5, _CRITICAL, 20, clear_s=20)
        ),
        Definition(
            Kind.DISK_SHARE_LOW,
            Scope.INSTALLATION,
            Unit.SHARE,
            True,
            "Free share of the disk of the data folder",
            _state(0.05, _WARNING, 60),
        ),
        Definition(
            Kind.DISK_BYTES_LOW,
            Scope.INSTALLATION,
            Unit.BYTES,
            True,
            "Free room on the disk of the data folder",
            _state(2.0 * (1 << 30), _CRITICAL),
            _PIB,
        ),
        _event(Kind.ADAPTER_CORRUPT, Scope.ADAPTER, "A version cannot be loaded", _state(0.5, _CRITICAL)),
        _event(
            Kind.CANARY_ROLLED_BACK,
            Scope.ADAPTER,
            "A canary was worse than its guard allows and was taken back",
            _state(0.5, _WARNING, clear_s=0),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class RuleChange:
    """What an override changes; None leaves what the wider scope says."""

    enabled: bool | None = None
    threshold: float | None = None
    for_s: int | None = None
    clear_s: int | None = None
    min_requests: int | None = None
    severity: Severity | None = None

    def over(self, rule: Rule) -> Rule:
        return Rule(**{one.name: _first(getattr(self, one.name), getattr(rule, one.name)) for one in fields(Rule)})


@dataclass(frozen=True, slots=True)
class Place:
    """For whom an override holds: all (no tenant), a tenant (no adapter), or one of its adapters."""

    tenant_id: int | None = None
    adapter: str = ""


class Rules:
    """The built-in rules with all overrides; the narrowest scope decides each field."""

    def __init__(self, overrides: Mapping[tuple[Place, Kind], RuleChange]) -> None:
        self._overrides = overrides

    def of(self, kind: Kind, place: Place) -> Rule:
        """The rule that holds at a place."""
        rule = DEFINITIONS[kind].rule
        for scope in widening(place):
            change = self._overrides.get((scope, kind))
            if change is not None:
                rule = change.over(rule)
        return rule

    def change(self, kind: Kind, place: Place) -> RuleChange | None:
        """What is set exactly there."""
        return self._overrides.get((place, kind))

    def least_requests(self) -> int:
        """Adapters with fewer requests in the window are judged by no rule."""
        given = [change.min_requests for change in self._overrides.values() if change.min_requests is not None]
        return min([*given, *(one.rule.min_requests for one in DEFINITIONS.values() if one.on_traffic)])

    def changed_places(self, kind: Kind) -> Iterable[Place]:
        """Where a kind is set, beside the built-in rule."""
        return (place for place, of in self._overrides if of is kind)


def widening(place: Place) -> Iterable[Place]:
    """The scopes that hold at a place, the widest first."""
    yield Place()
    if place.tenant_id is not None:
        yield Place(place.tenant_id)
        if place.adapter:
            yield place


def check_change(kind: Kind, place: Place, change: RuleChange) -> None:
    """Raises :class:`InvalidRequestError` naming the field that cannot be."""
    definition = DEFINITIONS[kind]
    if place.tenant_id is not None and definition.scope is Scope.INSTALLATION:
        raise InvalidRequestError(f"kind: {kind} is judged for the installation alone", param="kind")
    if place.adapter and definition.scope is not Scope.ADAPTER:
        raise InvalidRequestError(f"kind: {kind} is judged for a whole {definition.scope}", param="kind")
    if change.threshold is not None:
        _check_threshold(definition, change.threshold)
    if change.min_requests is not None and not definition.on_traffic:
        raise InvalidRequestError(f"min_requests: {kind} does not judge requests", param="min_requests")
    for name in ("for_s", "clear_s"):
        value = getattr(change, name)
        if value is not None and not 0 <= value <= MAX_FOR_S:
            raise InvalidRequestError(f"{name}: must be between 0 and {MAX_FOR_S}, got {value}", param=name)
    if change.min_requests is not None and not 1 <= change.min_requests <= 1_000_000:
        text = f"min_requests: must be between 1 and 1000000, got {change.min_requests}"
        raise InvalidRequestError(text, param="min_requests")


def _check_threshold(definition: Definition, threshold: float) -> None:
    if definition.unit is Unit.EVENT:
        raise InvalidRequestError(f"threshold: {definition.kind} has none", param="threshold")
    if not 0 < threshold <= definition.most:
        text = f"threshold: must be above 0 and at most {definition.most:g} {definition.unit}, got {threshold:g}"
        raise InvalidRequestError(text, param="threshold")


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
