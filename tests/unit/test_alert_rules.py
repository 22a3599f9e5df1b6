"""Alerts without a database: rules and who may change them, hysteresis, notifications, addresses."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import promql_parser
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stencilpress.gateway.alerts.addresses import check_url, is_public
from stencilpress.gateway.alerts.evaluate import MAX_OF_KIND, MAX_OPEN, Readings, evaluate
from stencilpress.gateway.alerts.incidents import Incident, Measured, Moves, State, Subject, advance
from stencilpress.gateway.alerts.notification import MAX_ALERTS, notifications, signed
from stencilpress.gateway.alerts.prometheus import QUERIES, rules_file
from stencilpress.gateway.alerts.rules import (
    DEFINITIONS,
    Kind,
    Place,
    Rule,
    RuleChange,
    Rules,
    Scope,
    Severity,
    Unit,
    check_change,
)
from stencilpress.gateway.alerts.traffic import Loads, Past, Traffic, TrafficJudge
from stencilpress.gateway.alerts.words import TITLES, description, quantity, summary
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.usage.histogram import bucket_of

ROOT = Path(__file__).parents[2]
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
BUILT_IN = Rules({})
LOW = Subject(Kind.HIT_RATE_LOW, 7, "pirate")
SLOW = Subject(Kind.FIRST_TOKEN_SLOW, 7, "pirate")


def played(subject: Subject, values: list[float | None], rule: Rule, step_s: float = 30) -> list[Incident | None]:
    """What one incident is after each look."""
    now, incident, seen = NOON, None, []
    for value in values:
        incident = advance(incident, subject, None if value is None else Measured(value), rule, now)
        seen.append(incident)
        now += timedelta(seconds=step_s)
    return seen


def states(incidents: list[Incident | None]) -> list[str]:
    return ["-" if one is None else one.state.value for one in incidents]


def test_an_alert_fires_after_a_while_and_is_resolved_after_another() -> None:
    rule = replace(DEFINITIONS[Kind.FIRST_TOKEN_SLOW].rule, threshold=100, for_s=60, clear_s=60)
    seen = played(SLOW, [99, 101, 150, 120, 130, 85, 85, 85, 85], rule)
    assert states(seen) == ["-", "pending", "pending", "firing", "firing", "firing", "firing", "resolved", "-"]
    assert seen[3] is not None
    assert seen[3].fired_at == NOON + timedelta(seconds=90)
    assert seen[7] is not None
    assert (seen[7].since, seen[7].resolved_at) == (NOON + timedelta(seconds=30), NOON + timedelta(seconds=210))


def test_between_the_lines_nothing_changes() -> None:
    """Just under the threshold is not well yet; and a pending one that has come back came to nothing."""
    rule = replace(DEFINITIONS[Kind.HIT_RATE_LOW].rule, threshold=0.7, for_s=30, clear_s=0)
    assert states(played(LOW, [0.6, 0.71, 0.6, 0.6, 0.71, 0.75, 0.76, 0.78], rule)) == [
        "pending", "-", "pending", "firing", "firing", "firing", "firing", "resolved"
    ]  # fmt: skip


def test_nothing_to_judge_is_as_good_as_a_good_value_and_a_rule_that_is_off_ends_its_alerts() -> None:
    rule = replace(DEFINITIONS[Kind.FIRST_TOKEN_SLOW].rule, threshold=100, for_s=0, clear_s=30)
    assert states(played(SLOW, [200, None, None], rule)) == ["firing", "firing", "resolved"]
    firing = played(SLOW, [200], rule)[0]
    off = replace(rule, enabled=False, clear_s=0)
    after = advance(firing, SLOW, Measured(200), off, NOON)
    assert after is not None
    assert after.state is State.RESOLVED
    assert advance(None, SLOW, Measured(200), off, NOON) is None


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=80),
    st.floats(0.05, 0.95),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_no_alert_flaps_faster_than_its_rule_allows(
    values: list[float | None], threshold: float, for_s: int, clear_s: int
) -> None:
    """Against the definition: it fires only after an unbroken breach of ``for_s``, is resolved only while well, and
    between two firings lies a resolution."""
    rule = replace(DEFINITIONS[Kind.ERRORS_HIGH].rule, threshold=threshold, for_s=for_s, clear_s=clear_s)
    subject = Subject(Kind.ERRORS_HIGH, 7, "pirate")
    seen = played(subject, values, rule)
    breached = [value is not None and value > threshold for value in values]
    for i, now in enumerate(seen):
        before = seen[i - 1] if i else None
        was, state = (before.state if before else None), (now.state if now else None)
        if state is State.FIRING and was is not State.FIRING:
            assert was in (None, State.PENDING, State.RESOLVED)
            assert all(breached[i - for_s // 30 : i + 1]) or for_s == 0
            assert breached[i]
        if state is State.RESOLVED:
            assert was is State.FIRING
            value = values[i]
            assert value is None or value <= threshold * 0.9
            assert now is not None
            assert now.resolved_at is not None
            assert now.good_since is not None
            assert now.resolved_at - now.good_since >= timedelta(seconds=clear_s)
        if was is State.FIRING:
            assert state in (State.FIRING, State.RESOLVED)
        if was is None and state is not None:
            assert breached[i]
    fired = [one.fired_at for one in seen if one is not None and one.state is State.FIRING and one.fired_at]
    assert all(a <= b for a, b in pairwise(fired))


def test_the_narrowest_change_decides_each_field() -> None:
    rules = Rules(
        {
            (Place(), Kind.FIRST_TOKEN_SLOW): RuleChange(threshold=900, for_s=0),
            (Place(7), Kind.FIRST_TOKEN_SLOW): RuleChange(threshold=800, severity=Severity.CRITICAL),
            (Place(7, "pirate"), Kind.FIRST_TOKEN_SLOW): RuleChange(enabled=False),
        }
    )
    built_in = DEFINITIONS[Kind.FIRST_TOKEN_SLOW].rule
    assert rules.of(Kind.FIRST_TOKEN_SLOW, Place(8)) == replace(built_in, threshold=900, for_s=0)
    assert rules.of(Kind.FIRST_TOKEN_SLOW, Place(7, "pirate")) == replace(
        built_in, threshold=800, for_s=0, severity=Severity.CRITICAL, enabled=False
    )
    assert rules.of(Kind.ERRORS_HIGH, Place(7)) == DEFINITIONS[Kind.ERRORS_HIGH].rule


@pytest.mark.parametrize(
    ("kind", "place", "change", "param"),
    [
        (Kind.ENGINE_DOWN, Place(7), RuleChange(for_s=1), "kind"),
        (Kind.QUOTA_NEAR, Place(7, "pirate"), RuleChange(threshold=0.5), "kind"),
        (Kind.ENGINE_DOWN, Place(), RuleChange(threshold=0.5), "threshold"),
        (Kind.HIT_RATE_LOW, Place(), RuleChange(threshold=1.5), "threshold"),
        (Kind.HIT_RATE_LOW, Place(), RuleChange(threshold=0), "threshold"),
        (Kind.HIT_RATE_LOW, Place(), RuleChange(threshold=float("nan")), "threshold"),
        (Kind.QUOTA_NEAR, Place(), RuleChange(min_requests=5), "min_requests"),
        (Kind.HIT_RATE_LOW, Place(), RuleChange(min_requests=0), "min_requests"),
        (Kind.HIT_RATE_LOW, Place(), RuleChange(for_s=-1), "for_s"),
        (Kind.HIT_RATE_LOW, Place(), RuleChange(clear_s=90_000), "clear_s"),
    ],
)
def test_a_change_that_cannot_be_is_refused(kind: Kind, place: Place, change: RuleChange, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_change(kind, place, change)
    assert refused.value.param == param


def traffic(requests: int, failures: int = 0, cold_starts: int = 0, ttft_ms: float = 100.0) -> Traffic:
    return Traffic(requests, failures, cold_starts, {bucket_of(ttft_ms): requests}, {bucket_of(20_000): cold_starts})


Seen = dict[tuple[int, str], Traffic]


def looked_at(
    seen: Seen, rules: Rules, open_: dict[Subject, Incident] | None = None, past: Past | None = None
) -> Moves:
    """What one evaluation makes of traffic."""
    judge = TrafficJudge(rules, open_ or {}, past or {})
    for (tenant_id, adapter), one in seen.items():
        judge.take(tenant_id, adapter, one)
    return evaluate(open_ or {}, Readings(judge.found()), rules, NOON)


def fired(seen: Seen, rules: Rules = BUILT_IN, past: Past | None = None) -> set[tuple[str, str]]:
    """Kinds and adapters that fire when a rule needs no patience."""
    eager = {(Place(), kind): RuleChange(for_s=0) for kind in Kind}
    moves = looked_at(seen, Rules({**eager, **rules._overrides}), past=past)
    return {(one.subject.kind.value, one.subject.adapter) for one in moves.fired}


def test_adapters_and_tenants_are_judged_by_their_requests() -> None:
    seen = {
        (7, "pirate"): traffic(100, failures=9, cold_starts=50),
        (7, "base"): traffic(1000, ttft_ms=9000),
        (8, "rare"): traffic(49, failures=49, cold_starts=9),
    }
    assert fired(seen) == {
        ("errors_high", "pirate"),
        ("hit_rate_low", "pirate"),
        ("hit_rate_low", ""),  # the base alone is always loaded and does not count
        ("cold_start_slow", "pirate"),
        ("cold_start_slow", ""),
        ("first_token_slow", "base"),
    }  # of tenant 7 as a whole too few requests fail, and 8 has too few


def test_a_hit_rate_falls_from_what_it_was_in_the_day_before() -> None:
    def kinds(cold_starts: int, past: Past) -> set[str]:
        return {kind for kind, _ in fired({(7, "pirate"): traffic(100, cold_starts=cold_starts)}, past=past)}

    well, always_poor, young = Loads(9000, 180), Loads(9000, 4500), Loads(99, 0)
    assert "hit_rate_falling" in kinds(25, {(7, "pirate"): well})  # from 98 % to 75 %, which is not low
    assert kinds(25, {(7, "pirate"): well}) & {"hit_rate_low"} == set()
    assert "hit_rate_falling" not in kinds(20, {(7, "pirate"): well})
    assert "hit_rate_falling" not in kinds(50, {(7, "pirate"): always_poor})
    assert "hit_rate_falling" not in kinds(50, {(7, "pirate"): young})
    assert "hit_rate_falling" not in kinds(50, {(8, "pirate"): well})
    assert "hit_rate_falling" not in kinds(50, {})
    of = looked_at({(7, "pirate"): traffic(100, cold_starts=25)}, BUILT_IN, past={(7, "pirate"): well}).changed
    incident = of[Subject(Kind.HIT_RATE_FALLING, 7, "pirate")]
    assert incident.value == pytest.approx(0.23)
    assert incident.note == "100 requests in ten minutes, 75% after 98% in the day before"
    assert Subject(Kind.HIT_RATE_FALLING, 7) in of  # the tenant as a whole


def test_what_was_wrong_and_is_well_again_is_seen() -> None:
    """Only what breaks a rule is kept of the traffic, and what is open."""
    subject = Subject(Kind.ERRORS_HIGH, 7, "pirate")
    firing = Incident(subject, State.FIRING, NOON, 0.4, 0.05, Severity.CRITICAL, fired_at=NOON)
    again = looked_at({(7, "pirate"): traffic(100, failures=1)}, BUILT_IN, {subject: firing}).changed[subject]
    assert (again.value, again.good_since) == (0.01, NOON)


def test_an_objective_is_an_adapters_own() -> None:
    seen = {(7, "pirate"): traffic(100, ttft_ms=400), (7, "poet"): traffic(100, ttft_ms=400)}
    rules = Rules({(Place(7, "poet"), Kind.FIRST_TOKEN_SLOW): RuleChange(threshold=300, for_s=0)})
    assert fired(seen) == set()
    assert fired(seen, rules) == {("first_token_slow", "poet")}


def test_what_cannot_be_read_stays_as_it_is() -> None:
    subject = Subject(Kind.DISK_BYTES_LOW)
    firing = Incident(subject, State.FIRING, NOON, 1.0, 2.0, Severity.CRITICAL, fired_at=NOON)
    later = NOON + timedelta(hours=1)
    assert (
        evaluate({subject: firing}, Readings(unknown=frozenset({Kind.DISK_BYTES_LOW})), BUILT_IN, later).resolved == ()
    )
    moves = evaluate({subject: firing}, Readings(), BUILT_IN, later)
    assert moves.resolved == ()  # it has only begun to be well
    assert moves.changed[subject].good_since == later


def test_of_ten_thousand_the_worst_are_kept_and_an_open_one_is_never_displaced() -> None:
    many = {(7, f"a{i:05}"): traffic(100, failures=10 + i % 50) for i in range(10_000)}
    rules = Rules({(Place(), Kind.ERRORS_HIGH): RuleChange(for_s=0)})
    moves = looked_at(many, rules)
    assert len(moves.fired) == MAX_OPEN
    assert Subject(Kind.ERRORS_HIGH, 7) in moves.changed  # the tenant as a whole
    assert {one.value for one in moves.fired if one.subject.adapter} == {0.59}
    spread = {(tenant, f"a{i}"): traffic(100, failures=50) for tenant in range(1, 101) for i in range(20)}
    assert len(looked_at(spread, rules).fired) == MAX_OF_KIND
    mild = Subject(Kind.ERRORS_HIGH, 7, "a00000")
    kept = {mild: Incident(mild, State.FIRING, NOON, 0.1, 0.05, Severity.CRITICAL, fired_at=NOON)}
    again = looked_at(many, rules, kept)
    assert mild not in {one.subject for one in again.resolved}


def test_a_value_that_is_about_the_same_is_not_written_again() -> None:
    rules = Rules({(Place(), Kind.ERRORS_HIGH): RuleChange(for_s=0)})
    subject = Subject(Kind.ERRORS_HIGH, 7, "pirate")

    def looked(open_: dict[Subject, Incident], failures: int) -> dict[Subject, Incident]:
        seen = {(7, "pirate"): traffic(1000, failures=failures), (7, "base"): traffic(9000)}
        return dict(looked_at(seen, rules, open_).changed)

    firing = looked({}, 400)
    assert firing[subject].value == 0.4
    assert looked(firing, 410) == {}
    assert looked(firing, 450)[subject].value == 0.45


def incident(adapter: str = "pirate", state: State = State.FIRING) -> Incident:
    return Incident(
        Subject(Kind.FIRST_TOKEN_SLOW, 7, adapter), state, NOON, 6200.0, 5000.0, Severity.WARNING, "80 requests",
        fired_at=NOON, resolved_at=NOON + timedelta(minutes=9) if state is State.RESOLVED else None,
    )  # fmt: skip


def test_a_notification_is_what_alertmanager_sends() -> None:
    """The fields of https://prometheus.io/docs/alerting/latest/configuration/#webhook_config."""
    (body,) = notifications([incident(), incident("poet", State.RESOLVED)], {7: "acme"}, "tenant/acme")
    assert body["version"] == "4"
    assert set(body) == {
        "version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels", "commonLabels",
        "commonAnnotations", "externalURL", "alerts",
    }  # fmt: skip
    assert body["groupKey"] == '{}:{alertname="StencilpressFirstTokenSlow", tenant="acme"}'
    assert body["status"] == "firing"
    assert body["commonLabels"] == {
        "alertname": "StencilpressFirstTokenSlow",
        "severity": "warning",
        "tenant": "acme",
    }
    first, second = body["alerts"]
    assert (first["labels"]["adapter"], second["labels"]["adapter"]) == ("pirate", "poet")
    assert (first["status"], first["startsAt"], first["endsAt"]) == (
        "firing", "2026-11-30T12:00:00.000Z", "0001-01-01T00:00:00Z",
    )  # fmt: skip
    assert (second["status"], second["endsAt"]) == ("resolved", "2026-11-30T12:09:00.000Z")
    assert re.fullmatch("[0-9a-f]{16}", first["fingerprint"])
    assert first["fingerprint"] != second["fingerprint"]
    assert first["annotations"] == {
        "summary": "First tokens are over their objective: acme/pirate",
        "description": "99th percentile of the time to the first token is 6.2 s, above 5 s (80 requests)",
    }


def test_a_notification_is_bounded() -> None:
    (body,) = notifications([incident(f"a{i}") for i in range(MAX_ALERTS + 5)], {7: "acme"}, "operator")
    assert (len(body["alerts"]), body["truncatedAlerts"]) == (MAX_ALERTS, 5)


@pytest.mark.parametrize("secret", ["a secret of the receiver's", "whsec_" + base64.b64encode(b"k" * 24).decode()])
def test_a_signature_is_the_one_of_standard_webhooks(secret: str) -> None:
    headers = signed(secret, "msg_1", NOON, b'{"a": 1}')
    key = b"k" * 24 if secret.startswith("whsec_") else secret.encode()
    mac = hmac.new(key, b'msg_1.1796040000.{"a": 1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1796040000",
        "webhook-signature": "v1," + base64.b64encode(mac).decode(),
    }
    assert "webhook-signature" not in signed("", "msg_1", NOON, b"")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",  # noqa: S104
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "192.0.2.1", "198.18.0.1", "",
        "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::a00:1", "fec0::1", "2001:0:7f00:1::", "192.0.0.8",
    ],
)  # fmt: skip
def test_an_address_inside_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_an_address_of_the_internet_is(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://hooks.example/", "file:///etc/passwd", "https://", "hooks.example", "//hooks.example/",
        "https://user:secret@hooks.example/", "https://hooks.example\\@127.0.0.1/", "https://hooks.example/ a",
        "https://hooks.example/\n", "http://127.0.0.1/", "http://127.1/", "http://0x7f000001/", "http://2130706433/",
        "http://0177.0.0.1/", "http://[::1]/", "http://[::ffff:10.0.0.1]/", "http://169.254.169.254/latest",
        "https://hooks.example:99999/", "https://h/" + "a" * 2000, "https://höoks.example/",
    ],
)  # fmt: skip
def test_a_url_that_leads_inside_or_nowhere_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_url(url, private=False)
    assert refused.value.param == "url"


def test_a_url_inside_is_taken_where_the_operator_allows_it() -> None:
    assert str(check_url("http://127.0.0.1:9000/x?y=1", private=True)) == "http://127.0.0.1:9000/x?y=1"
    assert check_url("https://hooks.example/alerts", private=False).host == "hooks.example"


def test_every_kind_has_words() -> None:
    assert set(TITLES) == set(Kind) == set(DEFINITIONS)
    values = ((0.125, Unit.SHARE), (850, Unit.MS), (2400, Unit.MS), (3 << 29, Unit.BYTES))
    assert [quantity(*given) for given in values] == ["12.5 %", "850 ms", "2.4 s", "1.5 GiB"]
    for kind in Kind:
        one = Incident(Subject(kind, None, "", "2"), State.FIRING, NOON, 1.0, 0.5, Severity.WARNING)
        assert summary(one, "acme").startswith(TITLES[kind])
        assert description(one)


METRIC = re.compile(r"\bstencilpress_[a-z_]+")


def documented_metrics() -> set[str]:
    text = (ROOT / "docs" / "api.md").read_text().partition("## Metrics")[2]
    names = set(re.findall(r"`((?:stencilpress_|vllm:)\w+)`", text))
    return names | {
        f"{name}_{part}" for name in names for part in ("bucket", "count", "sum") if name.endswith("_seconds")
    }


def test_the_rules_file_is_one_that_prometheus_takes() -> None:
    """As its documentation has it: groups of rules with an expression, a duration, labels and annotations."""
    (group,) = yaml.safe_load(rules_file(BUILT_IN))["groups"]
    assert group["name"] == "stencilpress"
    assert len(group["rules"]) == len(QUERIES) + 2
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
        assert re.fullmatch(r"\d+s", rule["for"])
        assert rule["labels"]["severity"] in set(Severity)
        assert set(rule["annotations"]) == {"summary", "description"}
        used = set(METRIC.findall(rule["expr"]))
        assert used
        assert used <= documented_metrics()
        promql_parser.parse(rule["expr"])


def test_the_file_in_the_repository_has_the_built_in_rules() -> None:
    assert (ROOT / "deploy" / "prometheus" / "stencilpress.rules.yml").read_text() == rules_file(BUILT_IN)


def test_what_is_changed_for_all_is_in_the_rules_file() -> None:
    changed = Rules(
        {
            (Place(), Kind.FIRST_TOKEN_SLOW): RuleChange(threshold=800, for_s=7),
            (Place(), Kind.ENGINE_DOWN): RuleChange(enabled=False),
            (Place(7), Kind.ERRORS_HIGH): RuleChange(threshold=0.5),
        }
    )
    rules = {rule["alert"]: rule for rule in yaml.safe_load(rules_file(changed))["groups"][0]["rules"]}
    assert "> 0.8 and" in rules["StencilpressFirstTokenSlow"]["expr"]
    assert rules["StencilpressFirstTokenSlow"]["for"] == "7s"
    assert "StencilpressEngineDown" not in rules
    assert "> 0.05 and" in rules["StencilpressErrorsHigh"]["expr"]


def test_kinds_of_the_installation_are_those_without_a_tenant() -> None:
    assert {kind for kind, one in DEFINITIONS.items() if one.scope is Scope.INSTALLATION} == {
        Kind.ENGINE_DOWN,
        Kind.DISK_SHARE_LOW,
        Kind.DISK_BYTES_LOW,
    }
