"""Traces for OpenTelemetry: one span a request, in the trace that the caller's ``traceparent`` names.

An optional extra, ``stencilpress[otel]``. Attributes follow OpenTelemetry's conventions for HTTP and generative AI as
far as they go; no text of a request or an answer is among them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.observation import Observation
from stencilpress.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

EXPORT_LIMIT_S = 2.0
"""How long a collector may take for one batch; what it does not take is lost."""
CLOSE_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class ActiveSpan:
    """A span in progress; ``began_ns`` is by the wall clock."""

    span: Span
    began_ns: int


class Tracing:
    """Makes spans and sends them to a collector, in batches and from a thread of its own. Full queues drop spans."""

    def __init__(self, endpoint: str, ratio: float, gateway: int) -> None:
        """Raises :class:`SettingsError` without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            text = f"needs the extra stencilpress[otel] ({error.name} is missing)"
            raise SettingsError(f"STENCILPRESS_OTLP_ENDPOINT {text}") from None
        resource = Resource.create({"service.name": "stencilpress", "service.instance.id": f"gateway-{gateway}"})
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBasedTraceIdRatio(ratio), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_LIMIT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("stencilpress.gateway")
        self._extract = TraceContextTextMapPropagator().extract

    def begin(self, name: str, headers: Mapping[str, str], observed: Observation) -> ActiveSpan:
        """A request has come; its log lines carry the trace's id from here on. ``headers`` know no case."""
        from opentelemetry.trace import SpanKind, format_trace_id

        began_ns = time.time_ns() - _since_arrival_ns(observed)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(name, context=self._extract(carrier), kind=SpanKind.SERVER, start_time=began_ns)
        observed.trace_id = format_trace_id(span.get_span_context().trace_id)
        return ActiveSpan(span, began_ns)

    def end(self, active: ActiveSpan, observed: Observation, **attributes: Any) -> None:
        """The request has been answered. The span has failed if that was our fault, not if it was the client's."""
        from opentelemetry.trace import StatusCode

        span = active.span
        span.set_attributes({**attributes, **_attributes(observed)})
        if observed.time_to_first_token_s:
            span.add_event("first_token", timestamp=active.began_ns + int(observed.time_to_first_token_s * 1e9))
        if observed.failed:
            span.set_status(StatusCode.ERROR)
        span.end(end_time=active.began_ns + _since_arrival_ns(observed))

    async def close(self) -> None:
        """Send what is left, within a second."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)  # the exit does not wait for it
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_LIMIT_S)


def tracing(settings: GatewaySettings) -> Tracing | None:
    """What the settings ask for. Raises :class:`SettingsError`."""
    endpoint = settings.otlp_endpoint
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise SettingsError(f"STENCILPRESS_OTLP_ENDPOINT: {endpoint!r} is no URL such as http://collector:4318")
    return Tracing(endpoint, settings.trace_ratio, settings.gateway)


def _since_arrival_ns(observed: Observation) -> int:
    """All times of a span are told by this clock, as that of the first token is: the wall's may be set meanwhile."""
    return int((time.perf_counter() - observed.arrived_at) * 1e9)


def _attributes(observed: Observation) -> dict[str, Any]:
    attributes: dict[str, Any] = {"stencilpress.request_id": observed.request_id}
    if observed.tenant:
        attributes["stencilpress.tenant"] = observed.tenant
    if observed.model:
        attributes |= {
            "gen_ai.response.model": observed.model,
            "gen_ai.usage.input_tokens": observed.prompt_tokens,
            "gen_ai.usage.output_tokens": observed.completion_tokens,
        }
    return attributes
