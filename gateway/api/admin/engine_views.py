"""What the admin API shows of engines: their numbers, their pools page by page, the adapters in their memories."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from stencilpress.engine.messages import AdapterSeen, PageOwner, Pages
from stencilpress.gateway.api.admin.tables import Table
from stencilpress.gateway.catalog.digests import Owner
from stencilpress.gateway.catalog.series import Axis
from stencilpress.gateway.engine_reader import EngineNow, Seen
from stencilpress.gateway.usage.engine_sums import COUNTERS, DISTRIBUTIONS, GAUGES, EngineSum

Tier = Literal["disk", "fetching", "host", "loading", "hbm"]


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine now; counters are since its start. `up` is false for one that does not answer: the rest is 0 then.

    `adapters_per_step` and `requests_per_step` count steps by how many distinct adapters and requests they ran.
    """

    engine: int
    up: bool
    seen_s: float | None
    generation: int | None
    base: str | None
    max_model_len: int | None
    max_lora_rank: int | None
    open_requests: int
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_kv: int = 0
    pages_cached: int = 0
    pages_adapter: int = 0
    adapters_hbm: int = 0
    adapters_host: int = 0
    adapter_host_bytes: int = 0
    max_loras: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_failures: int = 0
    adapter_hits: int = 0
    adapter_misses: int = 0
    adapters_per_step: dict[str, int] = {}
    requests_per_step: dict[str, int] = {}

    @classmethod
    def of(cls, now: EngineNow) -> EngineView:
        stats, welcome = now.stats, now.welcome
        numbers = {} if stats is None else msgspec.structs.asdict(stats)
        numbers.pop("id", None)
        for name in ("adapters_per_step", "requests_per_step"):
            numbers[name] = {str(value): count for value, count in numbers.get(name, {}).items()}
        return cls(
            engine=now.engine,
            up=stats is not None,
            seen_s=None if now.seen_s is None else round(now.seen_s, 1),
            generation=None if welcome is None else welcome.generation,
            base=None if welcome is None else welcome.base_id,
            max_model_len=None if welcome is None else welcome.max_model_len,
            max_lora_rank=None if welcome is None else welcome.max_lora_rank,
            open_requests=now.open_requests,
            **numbers,
        )


class EnginesView(msgspec.Struct, frozen=True):
    """All engines of this server, by number."""

    data: list[EngineView]


class PageOwnerView(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds pages. `kind` is `free`, `quarantined`, `cached`, `kv` (of a `tenant`) or `adapter`.

    An adapter is named after the tenant that used it last; `shared` counts other versions with the same content.
    """

    kind: str
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None
    digest: str | None = None
    pinned: bool = False
    shared: int = 0


class PagesView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, page by page: `runs` has pairs, an index of `owners` and how many pages in a row it holds.

    `version` changes with the picture. Sent as `since`, it gets an answer without `runs` and `owners` (null) while
    nothing has changed.
    """

    engine: int
    version: str
    total: int
    owners: list[PageOwnerView] | None
    runs: list[int] | None


def pages_version(pages: Pages) -> str:
    """Tells two pictures of a pool apart."""
    digest = hashlib.blake2b(pages.runs, digest_size=8)
    digest.update(msgspec.msgpack.encode(pages.owners))
    return digest.hexdigest()


def owner_view(
    one: PageOwner, tenants: Mapping[int, str], names: Mapping[str, Sequence[Owner]], seen: Mapping[str, AdapterSeen]
) -> PageOwnerView:
    """The owner of pages with its name; what is no longer in the catalog has its digest alone."""
    if one.kind == "kv":
        return PageOwnerView(kind="kv", tenant=tenants.get(int(one.name)))
    if one.kind != "adapter":
        return PageOwnerView(kind=one.kind)
    activity = seen.get(one.name)
    owners = names.get(one.name, ())
    owner = named(owners, activity.tenant if activity is not None else 0)
    return PageOwnerView(
        kind="adapter",
        tenant=owner.tenant if owner is not None else None,
        adapter=owner.adapter if owner is not None else None,
        version=owner.version if owner is not None else None,
        digest=one.name,
        pinned=activity is not None and activity.pinned,
        shared=max(len(owners) - 1, 0),
    )


def named(owners: Sequence[Owner], tenant_id: int) -> Owner | None:
    """Of the versions with one content that of a tenant, one that is shared with it, or else the first."""
    mine = [one for one in owners if one.tenant_id == tenant_id]
    lent = [one for one in owners if tenant_id in one.guests]
    return next(iter([*mine, *lent, *owners]), None)


class ResidencyView(msgspec.Struct, frozen=True, kw_only=True):
    """One version in one engine. `hits` are requests that found it in the pool, `misses` those that it was loaded for.

    `read_s` and `copy_s` are what all its loads took, from disk and from host memory. Counts are since the engine's
    start, and of all who use this content. For what is not in the catalog any more names are empty.
    """

    engine: int
    tenant: str
    adapter: str
    version: int
    digest: str
    tier: Tier
    pinned: bool
    pages: int
    host_bytes: int
    waiting: int
    active: int
    hits: int
    misses: int
    hit_rate: float | None
    evictions: int
    reads: int
    read_s: float
    copies: int
    copy_s: float
    error: str

    @classmethod
    def of(cls, seen: Seen, owner: Owner | None) -> ResidencyView:
        one = seen.adapter
        uses = one.hits + one.misses
        return cls(
            engine=seen.engine,
            tenant=owner.tenant if owner is not None else "",
            adapter=owner.adapter if owner is not None else "",
            version=owner.version if owner is not None else 0,
            digest=one.digest,
            tier=msgspec.convert(one.tier, Tier),
            pinned=one.pinned,
            pages=one.pages,
            host_bytes=one.host_bytes,
            waiting=one.waiting,
            active=one.active,
            hits=one.hits,
            misses=one.misses,
            hit_rate=round(one.hits / uses, 6) if uses else None,
            evictions=one.evictions,
            reads=one.reads,
            read_s=round(one.read_s, 6),
            copies=one.copies,
            copy_s=round(one.copy_s, 6),
            error=one.error,
        )


class ResidenciesView(msgspec.Struct, frozen=True):
    """A part of the list. `next` goes into `after` to get the following one; null at the end."""

    data: list[ResidencyView]
    next: str | None

    def table(self) -> Table:
        names = ResidencyView.__struct_fields__
        return Table("residency", names, ([getattr(row, name) for name in names] for row in self.data))


class EngineLines(msgspec.Struct, frozen=True, kw_only=True):
    """One value a point; null where no engine answered. Of all engines together gauges are means of each, added up.

    Rates are over the whole step.
    """

    running: list[float | None]
    waiting: list[float | None]
    pages_total: list[float | None]
    pages_free: list[float | None]
    pages_kv: list[float | None]
    pages_cached: list[float | None]
    pages_adapter: list[float | None]
    adapters_hbm: list[float | None]
    adapters_host: list[float | None]
    adapter_host_bytes: list[float | None]
    steps: list[int]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    preemptions: list[int]
    adapter_loads: list[int]
    adapter_evictions: list[int]
    adapter_failures: list[int]
    adapter_hits: list[int]
    adapter_misses: list[int]
    adapters_per_step: list[float | None]
    requests_per_step: list[float | None]
    down: list[float]


class EngineSeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """What engines did: point `i` is of the `step_s` seconds from `times[i]` on.

    Counters are those of a step, `adapters_per_step` and `requests_per_step` means over its steps, `down` the share of
    samples that an engine did not answer. The distributions count all steps of the span.
    """

    start: datetime
    end: datetime
    step_s: int
    times: list[datetime]
    lines: EngineLines
    adapters_per_step: dict[str, int]
    requests_per_step: dict[str, int]

    @classmethod
    def of(cls, axis: Axis, engines: Sequence[Sequence[EngineSum]]) -> EngineSeriesView:
        """``engines`` has the steps of each."""
        steps = []
        for parts in zip(*engines, strict=True):
            one = EngineSum()
            for part in parts:
                one.merge(part)
            steps.append(one)
        gauges: dict[str, Any] = {
            name: [_gauge(parts, name) for parts in zip(*engines, strict=True)] for name in GAUGES
        }
        counters: dict[str, Any] = {name: [one.counters.get(name, 0) for one in steps] for name in COUNTERS}
        means: dict[str, Any] = {name: [_mean(getattr(one, name)) for one in steps] for name in DISTRIBUTIONS}
        whole = EngineSum()
        for one in steps:
            whole.merge(one)
        return cls(
            start=axis.start,
            end=axis.end,
            step_s=axis.step_s,
            times=axis.times,
            lines=EngineLines(
                **gauges,
                **counters,
                **means,
                down=[round(one.down / max(one.down + one.samples, 1), 4) for one in steps],
            ),
            adapters_per_step=_distribution(whole.adapters_per_step),
            requests_per_step=_distribution(whole.requests_per_step),
        )


def _gauge(engines: Sequence[EngineSum], name: str) -> float | None:
    """Each engine's mean, added up."""
    means = [one.gauges.get(name, 0) / one.samples for one in engines if one.samples]
    return round(sum(means), 3) if means else None


def _mean(counts: Mapping[int, int]) -> float | None:
    steps = sum(counts.values())
    return round(sum(value * count for value, count in counts.items()) / steps, 3) if steps else None


def _distribution(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(counts.items())}
