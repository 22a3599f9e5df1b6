"""Alerts from rows to a receiver, on both databases: what is judged, who is told, and what a dead receiver does."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine, event, select

from stencilpress.engine.messages import AdapterSeen, Stats
from stencilpress.gateway.alerts.courier import Courier
from stencilpress.gateway.alerts.incidents import State
from stencilpress.gateway.alerts.rules import Kind, Place, RuleChange
from stencilpress.gateway.alerts.watch import Postman, Watch
from stencilpress.gateway.catalog import alert_outbox, alerts
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.alert_models import DeliveryRow
from stencilpress.gateway.catalog.alert_outbox import Webhook
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.lifecycle import delete_adapter
from stencilpress.gateway.catalog.records import NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import change_tenant, create_tenant
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.errors import ConflictError, NotFoundError
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.usage.record import UsageRow
from tests.integration.webhook_receiver import Receiver, webhook_receiver
from tests.usage import usage_row

SECRET = "a secret of the receiver"
NOW = datetime.now(UTC).replace(hour=12, minute=30, second=0, microsecond=0)
"""Midday, so that no test spans two days."""
EAGER = RuleChange(for_s=0, clear_s=0)


@dataclass
class SeenEngines:
    """What engines say; two of them, unless one is down."""

    up: list[bool] = field(default_factory=lambda: [True, True])
    errors: dict[str, str] = field(default_factory=dict)
    asked: int = 0

    async def stats(self) -> list[Stats | None]:
        zero = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        return [replace_failures(zero, len(self.errors)) if up else None for up in self.up]

    async def adapters(self) -> list[list[AdapterSeen] | None]:
        self.asked += 1
        seen = [seen_adapter(digest, error) for digest, error in self.errors.items()]
        return [seen if up else None for up in self.up]


def replace_failures(stats: Stats, failures: int) -> Stats:
    values = {name: getattr(stats, name) for name in Stats.__struct_fields__}
    return Stats(**{**values, "adapter_failures": failures})


def seen_adapter(digest: str, error: str) -> AdapterSeen:
    return AdapterSeen(digest, 1, "disk", 0, 0, False, 0, 0, 0, 1, 0, 1, 0.1, 0, 0.0, error)


async def here(work: Awaitable[Any]) -> Any:
    return await work


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    return await create_tenant(db, "acme")


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with webhook_receiver() as running:
        yield running


@pytest.fixture
async def courier() -> AsyncIterator[Courier]:
    async with Courier(private=True) as open_:
        yield open_


@pytest.fixture
def engines() -> SeenEngines:
    return SeenEngines()


@pytest.fixture
def watch(db: Database, engines: SeenEngines, tmp_path: Path) -> Watch:
    return Watch(db, cast("Engines", engines), tmp_path, operator=False, on_main=here)


def request(tenant: Tenant, number: int, **given: Any) -> UsageRow:
    admitted = given.pop("at", NOW - timedelta(minutes=2))
    return usage_row(admitted, **({"request_id": f"req_{number}", "tenant_id": tenant.id} | given))


async def served(db: Database, rows: list[UsageRow]) -> None:
    await insert_usage(db, rows)
    while await roll_up(db):
        pass


async def open_now(db: Database) -> dict[str, str]:
    """The states of what is open, by kind and what it is about."""
    found = await alerts.list_alerts(db, states=(State.PENDING, State.FIRING))
    subjects = [(one.incident.subject, one.incident.state.value) for one in found]
    return {f"{subject.kind} {subject.adapter}{subject.item}": state for subject, state in subjects}


async def test_failures_reach_the_receiver_once_and_so_does_their_end(
    db: Database, tenant: Tenant, watch: Watch, receiver: Receiver, courier: Courier
) -> None:
    await alert_outbox.set_webhook(db, tenant.id, receiver.url, SECRET)
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(tenant.id), RuleChange(for_s=60, clear_s=0))
    rows = [request(tenant, n, status="failed" if n % 3 else "completed", ttft_ms=None) for n in range(60)]
    await served(db, rows)
    await watch.look(NOW)
    assert await open_now(db) == {"errors_high pirate": "pending", "errors_high ": "pending"}
    postman = Postman(db, courier, None)
    assert await postman.deliver() == 0
    for seconds in (60, 90, 120):
        await watch.look(NOW + timedelta(seconds=seconds))
    assert await postman.deliver() == 1
    await watch.look(NOW + timedelta(minutes=20))  # the window is empty
    assert await open_now(db) == {}
    assert await postman.deliver() == 1
    fired, resolved = receiver.taken
    assert [(alert["labels"].get("adapter"), alert["status"]) for alert in fired.message["alerts"]] == [
        ("pirate", "firing"),
        (None, "firing"),
    ]
    assert fired.message["groupKey"] == resolved.message["groupKey"]
    assert (fired.message["status"], resolved.message["status"]) == ("firing", "resolved")
    assert fired.message["commonLabels"]["tenant"] == "acme"
    assert "66.7 %" in fired.message["alerts"][0]["annotations"]["description"]
    for taken in (fired, resolved):
        text = f"{taken.headers['webhook-id']}.{taken.headers['webhook-timestamp']}.".encode() + taken.body
        mac = base64.b64encode(hmac.new(SECRET.encode(), text, hashlib.sha256).digest()).decode()
        assert taken.headers["webhook-signature"] == f"v1,{mac}"
    history = await alerts.list_alerts(db, tenant_id=tenant.id)
    assert {one.incident.state for one in history} == {State.RESOLVED}


async def test_a_notification_outlives_its_gateway_and_keeps_its_id(
    db: Database, tenant: Tenant, watch: Watch, receiver: Receiver
) -> None:
    await alert_outbox.set_webhook(db, tenant.id, receiver.url, "")
    await alerts.set_rule(db, Kind.QUOTA_NEAR, Place(), EAGER)
    await change_tenant(db, "acme", {"tokens_per_day": 1000})
    await served(db, [request(tenant, n, prompt_tokens=70) for n in range(11)])  # 847 tokens
    await watch.look(NOW)
    receiver.answers += [500, 307]
    async with Courier(private=True) as first:
        assert await Postman(db, first, None).deliver() == 0
    (waiting,) = await alert_outbox.list_deliveries(db, tenant.id)
    assert (waiting.state, waiting.attempts, waiting.error) == ("waiting", 1, "HTTP status 500")
    async with Courier(private=True) as second:
        postman = Postman(db, second, None)
        assert await postman.deliver() == 0  # not due yet
        await alert_outbox.set_webhook(db, tenant.id, receiver.url, None)  # which makes it due
        assert await postman.deliver() == 0
        assert (await alert_outbox.list_deliveries(db, tenant.id))[0].error == "HTTP status 307"  # and not followed
        await alert_outbox.set_webhook(db, tenant.id, receiver.url, None)
        assert await postman.deliver() == 1
    assert len({taken.headers["webhook-id"] for taken in receiver.taken}) == 1
    assert len(receiver.taken) == 3
    assert "847 of 1,000 tokens of the day" in receiver.taken[0].message["alerts"][0]["annotations"]["description"]
    assert (await alert_outbox.list_deliveries(db, tenant.id))[0].state == "delivered"


async def test_a_dead_receiver_holds_up_nobody_and_is_given_up_after_a_day(
    db: Database, tenant: Tenant, watch: Watch, receiver: Receiver, courier: Courier
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    other = await create_tenant(db, "other")
    await alert_outbox.set_webhook(db, tenant.id, f"http://127.0.0.1:{port}/", "")
    await alert_outbox.set_webhook(db, other.id, receiver.url, "")
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(), EAGER)
    await served(db, [request(one, n, status="failed") for one in (tenant, other) for n in range(50)])
    await watch.look(NOW)
    assert await Postman(db, courier, Webhook(receiver.url, "", NOW)).deliver() == 1
    assert [taken.message["receiver"] for taken in receiver.taken] == ["tenant/other"]
    (waiting,) = await alert_outbox.list_deliveries(db, tenant.id)
    assert waiting.error == "it cannot be reached"
    await alert_outbox.put_off(db, replace(waiting, created_at=NOW - timedelta(days=2)), "still dead")
    (given_up,) = await alert_outbox.list_deliveries(db, tenant.id)
    assert (given_up.state, given_up.error) == ("failed", "still dead")
    await alert_outbox.purge_deliveries(db, datetime.now(UTC) + timedelta(seconds=1))
    assert await alert_outbox.list_deliveries(db, tenant.id) == ()


async def test_the_operators_webhook_is_told_of_all_and_is_sent_in_order(
    db: Database, tenant: Tenant, engines: SeenEngines, receiver: Receiver, courier: Courier, tmp_path: Path
) -> None:
    watch = Watch(db, cast("Engines", engines), tmp_path, operator=True, on_main=here)
    await alerts.set_rule(db, Kind.DISK_BYTES_LOW, Place(), RuleChange(threshold=float(1 << 50), clear_s=0))
    await add_version(db, tenant.id, "pirate", version("d"), BaseNames.of(("Acme/Small",)))
    engines.up, engines.errors = [True, False], {"d" * 64: "the file is cut short", "e" * 64: "nobody's"}
    await watch.look(NOW)
    await watch.look(NOW + timedelta(seconds=30))
    assert await open_now(db) == {
        "engine_down 2": "firing", "disk_bytes_low ": "firing", "adapter_corrupt pirate1": "firing"
    }  # fmt: skip
    engines.up, engines.errors = [True, True], {"d" * 64: ""}
    for seconds in (60, 90, 150):
        await watch.look(NOW + timedelta(seconds=seconds))
    assert await open_now(db) == {"disk_bytes_low ": "firing"}
    asked = engines.asked
    await watch.look(NOW + timedelta(seconds=180))
    assert engines.asked == asked  # nothing has failed since
    await Postman(db, courier, Webhook(receiver.url, "", NOW)).deliver()
    told = [(taken.message["groupLabels"]["alertname"], taken.message["status"]) for taken in receiver.taken]
    assert sorted(told[:2]) == [("StencilpressAdapterCorrupt", "firing"), ("StencilpressDiskBytesLow", "firing")]
    assert told[2:] == [
        ("StencilpressEngineDown", "firing"),
        ("StencilpressEngineDown", "resolved"),
        ("StencilpressAdapterCorrupt", "resolved"),
    ]
    corrupt = next(t.message for t in receiver.taken if t.message["commonLabels"]["alertname"].endswith("Corrupt"))
    assert corrupt["commonLabels"] | {"tenant": "acme", "adapter": "pirate", "version": "1"} == corrupt["commonLabels"]
    assert corrupt["commonAnnotations"]["description"] == "the file is cut short"


async def test_a_damaged_version_is_told_until_it_is_loaded_or_deleted(
    db: Database, tenant: Tenant, engines: SeenEngines, watch: Watch, tmp_path: Path
) -> None:
    """Neither an engine that is down, nor one that was started anew and has tried nothing yet, says that it is well."""
    for adapter, digest in (("pirate", "d"), ("poet", "c")):
        await add_version(db, tenant.id, adapter, version(digest), BaseNames.of(("Acme/Small",)))
    both = {"adapter_corrupt pirate1": "firing", "adapter_corrupt poet1": "firing"}
    seconds = 0

    async def looks(watch: Watch) -> dict[str, str]:
        nonlocal seconds
        for _ in range(4):
            seconds += 30
            await watch.look(NOW + timedelta(seconds=seconds))
        return {name: state for name, state in (await open_now(db)).items() if name in both}

    engines.errors = {"d" * 64: "the file is cut short", "c" * 64: "no such file"}
    assert await looks(watch) == both
    engines.up = [False, False]
    assert await looks(watch) == both
    engines.up, engines.errors = [True, True], {}
    assert await looks(watch) == both
    another = Watch(db, cast("Engines", engines), tmp_path, operator=False, on_main=here)  # of another gateway
    assert await looks(another) == both
    engines.errors = {"d" * 64: ""}
    await delete_adapter(db, tenant.id, "poet")
    assert await looks(another) == {}


async def test_two_gateways_that_look_at_once_tell_it_once(
    db: Database, database_url: str, tenant: Tenant, engines: SeenEngines, tmp_path: Path
) -> None:
    await alert_outbox.set_webhook(db, tenant.id, "https://hooks.example/", "")
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(), EAGER)
    await served(db, [request(tenant, n, status="failed") for n in range(50)])
    others = [Database(database_url) for _ in range(3)]
    watches = [Watch(one, cast("Engines", engines), tmp_path, operator=False, on_main=here) for one in others]
    for _ in range(2):
        await asyncio.gather(*(watch.look(NOW) for watch in watches))
    for one in others:
        await one.close()
    async with db.read() as session:
        assert len(list(await session.scalars(select(DeliveryRow)))) == 1


async def test_a_receiver_that_never_answers_is_given_its_time(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stencilpress.gateway.alerts.courier.LIMIT_S", 0.2)
    receiver.silent = True
    async with Courier(private=True) as courier:
        assert await courier.post(receiver.url, b"{}", {}) == "no answer within 0.2 s"


async def test_of_too_many_waiting_the_oldest_is_given_up(
    db: Database, tenant: Tenant, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_outbox, "MAX_WAITING", 2)
    await alert_outbox.set_webhook(db, tenant.id, "https://hooks.example/", "")
    await alerts.set_rule(db, Kind.QUOTA_NEAR, Place(), EAGER)
    await alerts.set_rule(db, Kind.QUOTA_ALMOST_SPENT, Place(), EAGER)
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(), EAGER)
    await change_tenant(db, "acme", {"tokens_per_month": 10})
    await served(db, [request(tenant, n, status="failed") for n in range(50)])
    await watch.look(NOW)
    found = await alert_outbox.list_deliveries(db, tenant.id)
    assert [one.state for one in found] == ["waiting", "waiting", "failed"]


@contextmanager
def counted() -> Iterator[list[str]]:
    """The statements of all databases meanwhile."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield seen
    event.remove(Engine, "before_cursor_execute", note)


async def test_an_evaluation_asks_the_same_few_questions_however_many_adapters_there_are(
    db: Database, tenant: Tenant, watch: Watch
) -> None:
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(), RuleChange(min_requests=1))
    asked = []
    for adapters in (2, 400):
        await served(db, [request(tenant, n, adapter=f"a{adapters}-{n}") for n in range(adapters)])
        with counted() as statements:
            await watch.look(NOW)
        asked.append(len([one for one in statements if one.startswith("SELECT")]))
    assert asked[1] <= asked[0]  # quotas and the day before are known for some minutes
    assert asked[0] < 10


async def test_a_hit_rate_that_falls_is_told_apart_from_one_that_was_always_low(
    db: Database, tenant: Tenant, watch: Watch
) -> None:
    def requests(adapter: str, at: datetime, count: int, cold: int) -> list[UsageRow]:
        return [
            request(tenant, n, adapter=adapter, at=at + timedelta(milliseconds=n), cold_start_ms=5.0 * (n < cold))
            for n in range(count)
        ]

    await alerts.set_rule(db, Kind.HIT_RATE_FALLING, Place(), EAGER)
    await alerts.set_rule(db, Kind.HIT_RATE_LOW, Place(), RuleChange(enabled=False))
    hours_ago, now = NOW - timedelta(hours=5), NOW - timedelta(minutes=2)
    await served(db, [*requests("pirate", hours_ago, 60, 3), *requests("poet", hours_ago, 60, 15)])
    await served(db, requests("pirate", NOW - timedelta(hours=26), 60, 60))  # not in the day before
    await served(db, [*requests("pirate", now, 60, 18), *requests("poet", now, 60, 18)])
    await watch.look(NOW)
    found = {one.incident.subject.adapter: one.incident for one in await alerts.list_alerts(db)}
    assert set(found) == {"pirate"}
    assert found["pirate"].value == pytest.approx(18 / 60 - 3 / 60)
    assert found["pirate"].note == "60 requests in ten minutes, 70% after 95% in the day before"


async def test_a_look_leaves_the_garbage_collector_little(db: Database, tenant: Tenant, watch: Watch) -> None:
    """A collection looks at everything alive while no thread runs, also none that serves streams: a look that held all
    of its rows at once would stop them for as long as it takes to look at each."""
    rows = [request(tenant, n, adapter=f"a{n % 500}", at=NOW - timedelta(minutes=1 + n // 500)) for n in range(4000)]
    await served(db, rows)
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(), RuleChange(min_requests=1))
    await watch.look(NOW)  # what it remembers from the first time on
    alive: list[int] = []

    def note(phase: str, found: dict[str, int]) -> None:
        if phase == "start" and found["generation"] == 0:
            alive.append(len(gc.get_objects()))

    del rows
    gc.collect()
    gc.freeze()  # what there is already is not counted again at each collection
    gc.callbacks.append(note)
    try:
        await watch.look(NOW)
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
    assert max(alive) < 5000  # rows, had they all been there, would be more alone


async def test_budgets_are_those_of_the_tenants_own_day(db: Database, watch: Watch) -> None:
    """Tokyo's day begins at 15:00 UTC of the day before."""
    tokyo = await create_tenant(db, "tokyo")
    await change_tenant(db, "tokyo", {"tokens_per_day": 100, "time_zone": "Asia/Tokyo"})
    before = NOW.replace(hour=14, minute=59) - timedelta(days=1)
    rows = [request(tokyo, 1, at=before, prompt_tokens=93), request(tokyo, 2, at=before + timedelta(minutes=1))]
    await served(db, [*rows, request(tokyo, 3, at=NOW, prompt_tokens=60)])
    await watch.look(NOW)
    (alert,) = await alerts.list_alerts(db, tenant_id=tokyo.id)
    assert (alert.incident.subject.kind, alert.incident.value) == (Kind.QUOTA_NEAR, 0.84)  # 17 + 67 of 100


async def test_acknowledging_is_for_what_fires_and_for_its_own_tenant(
    db: Database, tenant: Tenant, watch: Watch
) -> None:
    await alerts.set_rule(db, Kind.ERRORS_HIGH, Place(), RuleChange(for_s=0, clear_s=0))
    await served(db, [request(tenant, n, status="failed") for n in range(50)])
    await watch.look(NOW)
    assert await alerts.count_firing(db) == {"acme": 2, "": 2}
    alert = (await alerts.list_alerts(db))[0]
    with pytest.raises(NotFoundError):
        await alerts.acknowledge(db, alert.id, tenant_id=tenant.id + 1)
    seen = await alerts.acknowledge(db, alert.id, tenant_id=tenant.id)
    assert seen.acknowledged_by == "system"
    assert await alerts.acknowledge(db, alert.id) == seen
    assert await alerts.count_firing(db) == {"acme": 1, "": 1}
    assert (await list_audit(db))[0].action == "alert.acknowledge"
    await watch.look(NOW + timedelta(hours=1))
    with pytest.raises(ConflictError):
        await alerts.acknowledge(db, alert.id)
    assert await alerts.purge_incidents(db, NOW + timedelta(hours=2)) == 2


async def test_the_audit_log_never_holds_an_address_or_a_secret(db: Database, tenant: Tenant) -> None:
    await alert_outbox.set_webhook(db, tenant.id, "https://hooks.example/T0/B0/path-secret", SECRET)
    await alert_outbox.set_webhook(db, tenant.id, "https://hooks.example/T0/B0/path-secret", "another secret of it")
    await alert_outbox.remove_webhook(db, tenant.id)
    entries = [one for one in await list_audit(db) if one.action.startswith("alert_webhook")]
    assert [one.action for one in entries] == ["alert_webhook.remove", "alert_webhook.set", "alert_webhook.set"]
    assert entries[1].after == {"secret_changed": True}
    assert entries[2].after == {"host": "hooks.example", "signed": True, "secret_changed": True}
    assert "secret of" not in repr(entries)
    assert "path-secret" not in repr(entries)


def version(digest: str) -> NewVersion:
    return NewVersion(digest * 64, "Acme/Small", False, (8,), ("q_proj",), 1000, ("adapter_config.json",))
