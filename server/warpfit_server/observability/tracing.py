"""OpenTelemetry traces of calls, made if ``--tracing`` asks for them (extra ``tracing``).

A call becomes a span of kind server, a child of the caller's span if the metadata have a Trace
Context, and each stage of an answered call becomes a child of that. Spans are made after the call
has ended, from the times that are measured anyway, so that they do not delay it.
"""

import time
from importlib.metadata import version
from typing import Any, Final

from warpfit.errors import UnavailableError
from warpfit_server.observability.measurements import CALL_STAGES, CallRecord

_SERVICE: Final = "warpfit.v1.Evaluator"


class SpanTracer:
    """Makes the spans of calls by a tracer provider of the OpenTelemetry SDK."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._api = trace
        self._provider = provider
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("warpfit", version("warpfit"))

    def record(self, call: CallRecord) -> None:
        """Make the spans of a call that has ended."""
        to_wall = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{_SERVICE}/{call.method}",
            context=self._propagator.extract(call.trace),
            kind=self._api.SpanKind.SERVER,
            start_time=call.started + to_wall,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": _SERVICE,
                "rpc.method": call.method,
                "rpc.grpc.status": call.status,
                "warpfit.request_id": call.request_id,
                "warpfit.tenant": call.tenant,
                "warpfit.programs": call.programs,
                "warpfit.tokens": call.tokens,
            },
        )
        if call.status in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"):
            span.set_status(self._api.StatusCode.ERROR, call.status)
        self._record_stages(span, call, to_wall)
        span.end(call.ended + to_wall)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _record_stages(self, parent: Any, call: CallRecord, to_wall: int) -> None:
        """Make a span of each stage, one after the other, so that `finished` ends the kernel's."""
        if call.timings is None:
            return
        named = dict(zip(CALL_STAGES, call.stages(call.timings), strict=True))
        encode = named.pop("encode")
        start = call.finished - sum(named.values()) + to_wall
        context = self._api.set_span_in_context(parent)
        for name, nanoseconds in (*named.items(), ("encode", encode)):
            stage = self._tracer.start_span(name, context=context, start_time=start)
            start += nanoseconds
            stage.end(start)


def make_tracer(kind: str) -> SpanTracer | None:
    """Make the tracer that ``--tracing`` asks for; the OTEL_* variables say where spans go.

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
