"""Settings of the gateway, read once from ``STENCILPRESS_*`` variables by ``engine.settings.read_settings``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stencilpress.engine.settings import MAX_ENGINES, LogFormat, Positive
from stencilpress.gateway.intake_records import Dtype

FailurePolicy = Literal["local", "allow", "refuse"]
"""See gateway/quota/guard.py."""
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set on a gateway; what follows ``engine_socket`` comes from the supervisor."""

    model_dir: str
    """Folder of the base model, for its tokenizer and chat template."""
    database_url: str
    """The catalog: ``sqlite:///path`` or ``postgresql://…``."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 4 << 20
    """Largest request body; a larger one is refused with 413 before it has arrived in full."""
    default_max_tokens: Positive = 4096
    """Longest answer of a request that sets no limit itself; never more than what is left of the context."""
    body_limit_s: Seconds = 60.0
    """How long a request body may take to arrive."""
    write_limit_s: Seconds = 30.0
    """How long a client may leave its stream unread once the buffers are full; then it is cut off."""
    request_limit_s: Seconds = 3600.0
    """From a request's arrival to the end of its answer; then it is ended with an error."""
    max_wait_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """How long a request may wait for its first step; then it is refused. 0 is as long as it takes."""
    resubmit_limit_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """A request whose engine is lost before its first token goes to another, or waits so long for one. 0: never."""
    cors_origins: str = ""
    """Origins whose pages may call the API, separated by commas; ``*`` is all."""
    tls_certificate: str = ""
    """Certificate chain in PEM; with it the port speaks TLS alone."""
    tls_key: str = ""
    """Its private key in PEM."""
    console_url: str = ""
    """Where browsers find the console if another server stands in front: ``https://press.example.com``."""
    trusted_proxies: Annotated[int, Meta(ge=0, le=8)] = 0
    """Servers in front that each add to ``X-Forwarded-For``: whom the console takes a visitor's address from."""
    oidc_issuer: str = ""
    """An OpenID Connect provider by which people may sign in to the console: ``https://login.example.com``."""
    oidc_client_id: str = ""
    oidc_client_secret: str = ""
    oidc_scope: str = "openid email"
    oidc_groups_claim: str = "groups"
    """The claim with a person's groups."""
    oidc_grants: str = ""
    """Groups whose members need no invitation: ``group=tenant:role``, separated by commas; the first one counts."""
    session_limit_s: Annotated[float, Meta(ge=60, le=365 * 86400)] = 7 * 86400.0
    """How long somebody stays signed in to the console."""
    session_idle_s: Annotated[float, Meta(ge=60, le=365 * 86400)] = 12 * 3600.0
    """How long a session of the console may rest; then it ends."""
    hang_limit_s: Annotated[float, Meta(ge=0)] = 0.0
    """The engines' setting too: longest time between two turns of the loop; 0 takes 30 s."""
    drain_s: Seconds = 2.5
    """From SIGTERM to the end of the streams that still run. The supervisor ends a gateway 0.9 s after that."""
    adapters_dir: str = ""
    """Folder of adapter blobs, the engine's; without it adapters cannot be managed over HTTP."""
    dtype: Dtype = "auto"
    """The engine's, for which images are built."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 64
    """The engine's: a larger rank is refused at intake."""
    intake_workers: Annotated[int, Meta(ge=1, le=64)] = 2
    """Uploads that are checked at once, each by a process of its own; of one tenant one at a time."""
    cold_store_url: str = ""
    """Object store that keeps the files of all versions: ``s3://``, ``gs://``, ``az://`` or ``file://``."""
    local_adapter_bytes: Annotated[int, Meta(ge=0)] = 0
    """With a cold store: blobs beyond this leave the disk, the longest unused first. 0 keeps all."""
    purge_grace_s: Annotated[float, Meta(ge=5, le=365 * 86400)] = 3600.0
    """How long a deleted adapter or version can be restored."""
    tenant_purge_days: Annotated[int, Meta(ge=0, le=3650)] = 0
    """How long a deleted tenant can be restored; then it is erased for good. 0: until somebody purges it."""
    upkeep_s: Seconds = 300.0
    """How often what was deleted is purged and unused blobs are removed."""
    pin: str = ""
    """Adapters that engines keep in memory: ``tenant/adapter`` or ``tenant/adapter@alias``, separated by commas."""
    preload: str = ""
    """Adapters that engines bring in at their start, likewise."""
    lora_load_dir: str = ""
    """Folder from which an operator's key may load adapters by vLLM's ``/v1/load_lora_adapter``; empty is off."""
    quota_store: str = ""
    """Valkey or Redis with the counts of all gateways, such as ``redis://host:6379/0``; empty: each counts its own."""
    quota_on_store_failure: FailurePolicy = "local"
    """What happens to limited tenants while the store does not answer."""
    usage_dir: str = ""
    """Folder of the usage spool, on a disk that outlives the process; empty: beside the engine's socket."""
    usage_spool_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    """Most bytes of the spool, 384 a request that the catalog has not taken yet; beyond them requests are refused."""
    usage_retention_days: Annotated[int, Meta(ge=32, le=36500)] = 90
    """How long the rows of single requests are kept."""
    max_loras: Annotated[int, Meta(ge=0)] = 16
    """The engines' setting, told to routers that place requests by adapter."""
    metrics_tenants: Annotated[int, Meta(ge=0, le=1000)] = 20
    """Tenants with series of their own in the metrics: those with the most tokens."""
    metrics_adapters: Annotated[int, Meta(ge=0, le=1000)] = 20
    """Adapters of each engine with series of their own in the metrics: those with the most requests."""
    alert_webhook_url: str = ""
    """Where all alerts are sent, in the format of Alertmanager's webhooks; empty: nowhere but to tenants' own."""
    alert_webhook_secret: str = ""
    """Signs what is sent there, as Standard Webhooks says."""
    alert_private_webhooks: bool = False
    """Whether tenants' webhooks may have addresses inside this network."""
    alert_every_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """How often alert rules are evaluated."""
    log_format: LogFormat = "text"
    otlp_endpoint: str = ""
    """Collector of traces that speaks OTLP over HTTP, such as ``http://collector:4318``."""
    trace_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of traces that are kept, unless the caller's trace says so already."""
    engines: Annotated[int, Meta(ge=1, le=MAX_ENGINES)] = 1
    """Engines behind this gateway."""
    engine_socket: str
    """Unix socket of the first engine; the others' are beside it."""
    http_fd: int
    """Listening TCP socket, inherited from the supervisor."""
    gateway: Positive = 1
    """The number of this gateway."""
    peers: str = ""
    """Names of the sockets at which all gateways tell their metrics, in order, separated by commas."""
    peer_fd: int = -1
    """Listening Unix socket of that kind, inherited from the supervisor."""
    heartbeat_fd: int = -1
    """Shared memory for the sign of life, inherited from the supervisor."""
    lifeline_fd: int = -1
    """Read end of a pipe that closes when the supervisor is gone."""

    @property
    def data_folder(self) -> Path:
        """Where adapters lie, or at least the engine's socket."""
        return Path(self.adapters_dir or self.engine_socket).parent

    @property
    def gateways(self) -> int:
        """Gateway processes on this port, this one included."""
        return len(self.peers.split(","))

    @property
    def warnings(self) -> list[str]:
        """What the settings let happen that an operator may not want."""
        if self.gateways == 1 or self.quota_store:
            return []
        count = self.gateways
        text = f"{count} gateways count quotas each for itself, so tenants get up to {count} times their limits"
        return [f"{text}: set STENCILPRESS_QUOTA_STORE to a Valkey or Redis that they share"]
