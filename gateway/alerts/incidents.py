"""How an alert comes and goes: pending, firing, resolved, with hysteresis. A pure state machine of one subject.

``pending`` has been over the line, but not for long enough; ``firing`` stays until it has been behind the clear line
for long enough. Between the two lines nothing changes, so a value that wavers around the threshold makes one incident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import blake2b

from stencilpress.gateway.alerts.rules import DEFINITIONS, Kind, Place, Rule, Severity


class State(StrEnum):
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Subject:
    """What an alert is about. ``item`` tells several of one place apart: an engine's number, a version, ``day``."""

    kind: Kind
    tenant_id: int | None = None
    adapter: str = ""
    item: str = ""

    @property
    def place(self) -> Place:
        return Place(self.tenant_id, self.adapter)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that are the subject's for good, as Alertmanager's fingerprints."""
        text = "\0".join((self.kind, str(self.tenant_id or 0), self.adapter, self.item))
        return blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Measured:
    """A value, and a word on it for people: ``version 3: a file is damaged``."""

    value: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Incident:
    """One coming and going. ``since`` is when the line was crossed; ``good_since`` since when it is behind the clear
    line, while that has not lasted long enough."""

    subject: Subject
    state: State
    since: datetime
    value: float
    threshold: float
    severity: Severity
    note: str = ""
    fired_at: datetime | None = None
    good_since: datetime | None = None
    resolved_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Moves:
    """What one evaluation changes. ``changed`` has all that is to be written, ``dropped`` pendings that came to
    nothing; ``fired`` and ``resolved`` are of ``changed`` and are told to people."""

    changed: Mapping[Subject, Incident] = field(default_factory=dict)
    dropped: frozenset[Subject] = frozenset()
    fired: tuple[Incident, ...] = ()
    resolved: tuple[Incident, ...] = ()


def advance(
    open_: Incident | None, subject: Subject, seen: Measured | None, rule: Rule, now: datetime
) -> Incident | None:
    """The incident after one look at its subject; None if there is none.

    ``seen`` None says that there is nothing to judge (no traffic, no such thing any more): as good as a good value.
    """
    definition = DEFINITIONS[subject.kind]
    breached = rule.enabled and seen is not None and definition.breached(seen.value, rule)
    if open_ is None or open_.state is State.RESOLVED:
        return _begun(subject, seen, rule, now) if breached and seen is not None else None
    if seen is not None and rule.enabled:
        open_ = replace(open_, value=seen.value, note=seen.note or open_.note, threshold=rule.threshold)
    if open_.state is State.PENDING:
        return _fired_if_due(open_, rule, now) if breached else None
    good = seen is None or not rule.enabled or definition.cleared(seen.value, rule)
    return _resolved_if_due(replace(open_, severity=rule.severity), rule, now, breached=breached, good=good)


def _begun(subject: Subject, seen: Measured, rule: Rule, now: datetime) -> Incident:
    begun = Incident(subject, State.PENDING, now, seen.value, rule.threshold, rule.severity, seen.note)
    return _fired_if_due(begun, rule, now)


def _fired_if_due(pending: Incident, rule: Rule, now: datetime) -> Incident:
    if now - pending.since < timedelta(seconds=rule.for_s):
        return pending
    return replace(pending, state=State.FIRING, fired_at=now, severity=rule.severity)


def _resolved_if_due(firing: Incident, rule: Rule, now: datetime, *, breached: bool, good: bool) -> Incident:
    if breached or not good:
        # Between the lines it has not begun to be good; what had begun is not undone by less than a breach.
        return replace(firing, good_since=None) if breached else firing
    since = firing.good_since or now
    if now - since < timedelta(seconds=rule.clear_s):
        return replace(firing, good_since=since)
    return replace(firing, state=State.RESOLVED, resolved_at=now, good_since=since)
