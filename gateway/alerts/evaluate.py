"""From readings to the incidents that they make. Pure: the clock, the rules and what is open are given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from stencilpress.gateway.alerts.incidents import Incident, Measured, Moves, State, Subject, advance
from stencilpress.gateway.alerts.rules import DEFINITIONS, Kind, Rules

MAX_OPEN = 50
"""Incidents of one kind and tenant that are open at once; of more the worst are kept: nobody reads ten thousand."""
MAX_OF_KIND = 500
"""Of one kind and all tenants."""
SAME = 0.05
"""A value that has changed by no more than this share is left as it was seen before."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What one evaluation looks at. Of traffic ``values`` need only have what breaks a rule or is open."""

    values: Mapping[Subject, Measured] = field(default_factory=dict)
    unknown: frozenset[Kind] = frozenset()
    """Kinds that could not be read this time: their incidents stay as they are."""


def evaluate(open_: Mapping[Subject, Incident], readings: Readings, rules: Rules, now: datetime) -> Moves:
    """What has come, fired, and gone. Every open incident and every reading is looked at once."""
    seen = _kept(readings.values, open_)
    changed: dict[Subject, Incident] = {}
    dropped: set[Subject] = set()
    fired, resolved = [], []
    for subject in {**open_, **seen}:
        if subject.kind in readings.unknown:
            continue
        before = open_.get(subject)
        after = advance(before, subject, seen.get(subject), rules.of(subject.kind, subject.place), now)
        if after is None:
            if before is not None:
                dropped.add(subject)
            continue
        if _is_news(before, after):
            changed[subject] = after
        was_firing = before is not None and before.state is State.FIRING
        if after.state is State.FIRING and not was_firing:
            fired.append(after)
        elif after.state is State.RESOLVED and was_firing:
            resolved.append(after)
    return Moves(changed, frozenset(dropped), tuple(fired), tuple(resolved))


def _kept(seen: Mapping[Subject, Measured], open_: Mapping[Subject, Incident]) -> dict[Subject, Measured]:
    """Without what would be new beyond :data:`MAX_OPEN` of a tenant and :data:`MAX_OF_KIND` of all, by kind."""
    of_tenants: defaultdict[tuple[Kind, int | None], list[Subject]] = defaultdict(list)
    for subject in seen:
        of_tenants[subject.kind, subject.tenant_id].append(subject)
    of_kinds: defaultdict[Kind, list[Subject]] = defaultdict(list)
    for (kind, _), subjects in of_tenants.items():
        of_kinds[kind] += _worst(subjects, MAX_OPEN, seen, open_)
    kept = [subject for subjects in of_kinds.values() for subject in _worst(subjects, MAX_OF_KIND, seen, open_)]
    return {subject: seen[subject] for subject in kept}


def _worst(
    subjects: Sequence[Subject], most: int, seen: Mapping[Subject, Measured], open_: Mapping[Subject, Incident]
) -> Sequence[Subject]:
    """Those of one kind that are open already, then the worst: a whole tenant's before its adapters'."""
    if len(subjects) <= most:
        return subjects
    falls = DEFINITIONS[subjects[0].kind].falls

    def order(subject: Subject) -> tuple[bool, bool, float]:
        value = seen[subject].value
        return subject not in open_, bool(subject.adapter), value if falls else -value

    already = sum(subject in open_ for subject in subjects)
    return sorted(subjects, key=order)[: max(most, already)]


def _is_news(before: Incident | None, after: Incident) -> bool:
    """Whether it is worth writing: anything but a value that is about the same."""
    if before is None or replace(after, value=before.value, note=before.note) != before:
        return True
    return abs(after.value - before.value) > SAME * abs(before.value)
