"""OpenTelemetry traces: one trace a request, over client, decode and prefill. Needs the extra k3svc[otel].

A service has one span for each call (`server_span`), below it what the request went through: phases that are known when
they have ended (`record`), and the engine's steps that it had part in (`step`, for ids that `follow` named). The parent
comes with the call's metadata (W3C traceparent) and goes on with the calls made for it (`outgoing`); a client that has
OpenTelemetry set up and a span open passes it on without more.

Off, which is the default, nothing of OpenTelemetry is imported, and each of these is one comparison.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from k3svc.config import TracingSection
from k3svc.errors import ConfigError

TRACEPARENT = "traceparent"
MAX_STEPS = 1024
"""Steps of one call that get a span; a long output has more."""

Attributes = Mapping[str, str | int | float | bool]


class _Tracing:
    """The tracer of this process and the calls whose steps are told."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace  # noqa: PLC0415  only where it is wanted

        self.api = trace
        self.provider = provider
        self.tracer = provider.get_tracer("k3svc")
        self.calls: dict[str, _Call] = {}


class _Call:
    """A call under way."""

    def __init__(self, span: Any) -> None:
        self.span = span
        self.ids: list[str] = []
        self.num_steps = 0


_tracing: _Tracing | None = None
_call: ContextVar[_Call | None] = ContextVar("call", default=None)


def configure_tracing(role: str, section: TracingSection) -> None:
    """Starts tracing in this process where the configuration has a place for it. Raises ConfigError when the package is
    missing or the file cannot be written.
    """
    if not (section.endpoint or section.file):
        return
    try:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  only where it is wanted
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "tracing.endpoint and tracing.file need OpenTelemetry: pip install 'k3svc[otel]'", key="tracing"
        ) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"k3svc-{role}", "service.instance.id": str(os.getpid())}),
        sampler=ParentBasedTraceIdRatio(section.sample_ratio),
    )
    if section.endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        exporter = OTLPSpanExporter(endpoint=section.endpoint, insecure=not section.endpoint.startswith("https://"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
    if section.file:
        provider.add_span_processor(BatchSpanProcessor(_file_exporter(Path(section.file)), schedule_delay_millis=500))
    set_provider(provider)


def set_provider(provider: Any) -> None:
    """Traces with this TracerProvider from then on; None: no longer."""
    global _tracing  # noqa: PLW0603  logging has one configuration a process, too
    _tracing = None if provider is None else _Tracing(provider)


def flush() -> None:
    """Gives away what has been recorded; returns when it has been taken, or after some seconds."""
    if _tracing is not None:
        _tracing.provider.force_flush(5000)


@contextmanager
def server_span(method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Iterator[None]:
    """The span of a call, current while the block runs. An exception makes it an error."""
    if _tracing is None:
        yield
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    carrier = {key: value for key, value in metadata if key == TRACEPARENT and isinstance(value, str)}
    parent = TraceContextTextMapPropagator().extract(carrier)
    service, _, name = method.removeprefix("/").partition("/")
    span = _tracing.tracer.start_as_current_span(
        method.removeprefix("/"),
        context=parent,
        kind=_tracing.api.SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
    )
    calls = _tracing.calls
    with span as opened:
        call = _Call(opened)
        token = _call.set(call)
        try:
            yield
        finally:
            _call.reset(token)
            for request_id in call.ids:
                calls.pop(request_id, None)


def follow(request_id: str, **attributes: str | int) -> None:
    """Names the request of the current call: the steps that it has part in become spans below the call's."""
    call = _call.get()
    if _tracing is None or call is None or not request_id:
        return
    call.span.set_attributes({"k3svc.request_id": request_id, **attributes})
    if call.span.is_recording():
        call.ids.append(request_id)
        _tracing.calls[request_id] = call


def record(name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
    """A phase of the current call that has ended; times of time.monotonic()."""
    call = _call.get()
    if _tracing is not None and call is not None:
        _child(_tracing, call, name, start, end, attributes)


def step(name: str, keys: Iterator[str], compute_s: float, attributes: Attributes) -> None:
    """A step of the engine that ends now, below the calls of `keys`: REQUEST_ID#N each."""
    if _tracing is None or not _tracing.calls:
        return
    end = time.monotonic()
    for request_id in {key.rpartition("#")[0] for key in keys}:
        call = _tracing.calls.get(request_id)
        if call is not None and call.num_steps < MAX_STEPS:
            call.num_steps += 1
            _child(_tracing, call, name, end - compute_s, end, attributes)


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata that makes a call part of the current span's trace; empty without one."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple((key, value) for key, value in carrier.items() if key == TRACEPARENT)


def _child(tracing: _Tracing, call: _Call, name: str, start: float, end: float, attributes: Attributes | None) -> None:
    # Spans have the time of day; the difference to the monotonic clock is taken anew, since the former is corrected.
    offset_ns = time.time_ns() - time.monotonic_ns()
    span = tracing.tracer.start_span(
        name,
        context=tracing.api.set_span_in_context(call.span),
        start_time=int(start * 1e9) + offset_ns,
        attributes=attributes,
    )
    span.end(end_time=int(max(start, end) * 1e9) + offset_ns)


def _file_exporter(path: Path) -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult  # noqa: PLC0415

    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"tracing.file: cannot write {path}: {error.strerror}", key="tracing.file") from error

    class FileExporter(SpanExporter):
        """One JSON object a line. Processes may share a file: each batch is one write to its end."""

        def export(self, spans: Sequence[Any]) -> Any:
            os.write(file, "".join(span.to_json(indent=None) + "\n" for span in spans).encode())
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            os.close(file)

    return FileExporter()
