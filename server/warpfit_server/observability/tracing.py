"""OpenTelemetry traces of calls, if the extra ``tracing`` is installed and ``--tracing`` asks.

A call becomes a span of kind server, a child of the caller's if the metadata has a Trace Context,
and each stage of an answered call a child of that. Spans are made when the call has ended, from
the figures that are measured anyway, so that a call that nobody traces costs nothing.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any, Final

from warpfit.errors import UnavailableError
from warpfit_server.observability.calls import Request, stages
from warpfit_server.observability.measurements import STAGES

_SERVICE: Final = "warpfit.v1.Evaluator"


class SpanTracer:
    """Implements `requests.Tracer` over a tracer provider of the OpenTelemetry SDK."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._api = trace
        self._provider = provider
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("warpfit", version("warpfit"))

    def record(self, request: Request, status: str, ended: int) -> None:
        """Make the spans of a call that has ended."""
        to_wall = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{_SERVICE}/{request.method}",
            context=self._propagator.extract(request.trace),
            kind=self._api.SpanKind.SERVER,
            start_time=request.started + to_wall,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": _SERVICE,
                "rpc.method": request.method,
                "rpc.grpc.status": status,
                "warpfit.request_id": request.request_id,
                "warpfit.tenant": request.tenant,
                "warpfit.programs": request.programs,
                "warpfit.expressions.token_checks": request.tokens,
            },
        )
        if status in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"):
            span.set_status(self._api.StatusCode.ERROR, status)
        self._record_stages(span, request, to_wall)
        span.end(ended + to_wall)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _record_stages(self, parent: Any, request: Request, to_wall: int) -> None:
        """Make a span of each stage, one after the other; the kernel's end is known."""
        if request.timings is None:
            return
        named = dict(zip(STAGES, stages(request, request.timings), strict=True))
        encode = named.pop("encode")
        start = request.finished - sum(named.values()) + to_wall
        context = self._api.set_span_in_context(parent)
        for name, nanoseconds in (*named.items(), ("encode", encode)):
            stage = self._tracer.start_span(name, context=context, start_time=start)
            start += nanoseconds
            stage.end(start)


def make_tracer(kind: str) -> SpanTracer | None:
    """Make the tracer that ``--tracing`` asks for; where spans go is in the OTEL_* variables.

    Raises:
        UnavailableError: if OpenTelemetry is not installed.

    """
    if kind == "none":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UnavailableError(
            "--tracing needs OpenTelemetry", "NO_TRACING", "pip install 'warpfit[tracing]'"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "warpfit"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return SpanTracer(provider)
