"""What a webhook gets: Alertmanager's body, version 4, signed as Standard Webhooks says. Pure.

Body: https://prometheus.io/docs/alerting/latest/configuration/#webhook_config. Signature:
https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from stencilpress.gateway.alerts.incidents import Incident, State
from stencilpress.gateway.alerts.rules import Kind
from stencilpress.gateway.alerts.words import ITEM_NAMES, alert_name, description, summary

MAX_ALERTS = 50
"""Of one notification; how many more there were stands in ``truncatedAlerts``."""
SECRET_PREFIX = "whsec_"  # noqa: S105 - marks a secret in base64
_NEVER = "0001-01-01T00:00:00Z"


def notifications(incidents: Iterable[Incident], tenants: Mapping[int, str], receiver: str) -> list[dict[str, Any]]:
    """The bodies that tell of these incidents, one for each kind and tenant. ``tenants`` are names by id."""
    groups: defaultdict[tuple[Kind, int | None], list[Incident]] = defaultdict(list)
    for incident in incidents:
        groups[incident.subject.kind, incident.subject.tenant_id].append(incident)
    return [
        _body(kind, tenants.get(tenant_id) if tenant_id is not None else None, group, receiver)
        for (kind, tenant_id), group in groups.items()
    ]


def trial(receiver: str, now: datetime) -> dict[str, Any]:
    """A body that tells of nothing, to see whether it arrives."""
    labels = {"alertname": "StencilpressTest", "severity": "info"}
    words = {"summary": "A test of this webhook", "description": "Nothing is wrong. Alerts will arrive like this."}
    alert = {"status": "firing", "labels": labels, "annotations": words, "startsAt": _time(now), "endsAt": _NEVER}
    alert |= {"generatorURL": "", "fingerprint": "0" * 16}
    return _group(receiver, {"alertname": "StencilpressTest"}, [alert], 0)


def signed(secret: str, message_id: str, sent_at: datetime, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks; without a secret there is no signature. ``message_id`` stays over retries."""
    timestamp = str(int(sent_at.timestamp()))
    headers = {"webhook-id": message_id, "webhook-timestamp": timestamp}
    if secret:
        text = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.new(_key_of(secret), text, hashlib.sha256).digest()
        headers["webhook-signature"] = "v1," + base64.b64encode(digest).decode()
    return headers


def _key_of(secret: str) -> bytes:
    """A secret with the prefix is base64, as the libraries take it; any other is its own bytes."""
    if secret.startswith(SECRET_PREFIX):
        try:
            return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        except binascii.Error:
            pass
    return secret.encode()


def _body(kind: Kind, tenant: str | None, incidents: Sequence[Incident], receiver: str) -> dict[str, Any]:
    labels = {"alertname": alert_name(kind)} | ({"tenant": tenant} if tenant is not None else {})
    shown = [_alert(one, tenant) for one in incidents[:MAX_ALERTS]]
    return _group(receiver, labels, shown, max(0, len(incidents) - MAX_ALERTS))


def _group(receiver: str, labels: dict[str, str], alerts: list[dict[str, Any]], truncated: int) -> dict[str, Any]:
    matchers = ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    firing = any(alert["status"] == State.FIRING for alert in alerts)
    return {
        "version": "4",
        "groupKey": "{}:{" + matchers + "}",
        "truncatedAlerts": truncated,
        "status": (State.FIRING if firing else State.RESOLVED).value,
        "receiver": receiver,
        "groupLabels": labels,
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": "",
        "alerts": alerts,
    }


def _alert(incident: Incident, tenant: str | None) -> dict[str, Any]:
    subject = incident.subject
    labels = {"alertname": alert_name(subject.kind), "severity": incident.severity.value}
    if tenant is not None:
        labels["tenant"] = tenant
    if subject.adapter:
        labels["adapter"] = subject.adapter
    if subject.item:
        labels[ITEM_NAMES.get(subject.kind, "item")] = subject.item
    return {
        "status": incident.state.value,
        "labels": labels,
        "annotations": {"summary": summary(incident, tenant), "description": description(incident)},
        "startsAt": _time(incident.fired_at or incident.since),
        "endsAt": _NEVER if incident.resolved_at is None else _time(incident.resolved_at),
        "generatorURL": "",
        "fingerprint": subject.fingerprint,
    }


def _common(all_: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first = all_[0]
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in all_)}


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
