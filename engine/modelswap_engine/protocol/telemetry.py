"""Traces: one swap as operator and engine see it, joined by the W3C header ``traceparent`` of control calls.

OpenTelemetry is optional: without its API, and without an SDK behind that, everything here does nothing. So that both
installations are one to the type checker, its modules are loaded by name, and only here.
It refuses to know where spans go, and which there are.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import Any, Final

Attributes = Mapping[str, str | int | float | None]
OPERATION: Final = "modelswap.operation.id"
"""Attribute by which spans are found that belong to one swap, in whatever trace they are."""
EXPORTER_VARIABLE: Final = "OTEL_TRACES_EXPORTER"

_log: Final = logging.getLogger("modelswap.telemetry")


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None


_trace: Final = _load("opentelemetry.trace")
_context: Final = _load("opentelemetry.context")
_w3c: Final = _load("opentelemetry.trace.propagation.tracecontext")
_tracer: Any = _trace.get_tracer("modelswap") if _trace is not None else None


class Span:
    """A span, or nothing. Attributes that say nothing are left out."""

    def __init__(
        self, name: str, attributes: Attributes, *, parent: "Span | None" = None, client: bool = False
    ) -> None:
        self.inside: Any = None
        if _tracer is not None:
            kind = _trace.SpanKind.CLIENT if client else _trace.SpanKind.INTERNAL
            context = _trace.set_span_in_context(parent.inside) if parent is not None else None
            self.inside = _tracer.start_span(name, context=context, kind=kind, attributes=_said(attributes))

    def note(self, attributes: Attributes) -> None:
        """Add facts."""
        if self.inside is not None:
            self.inside.set_attributes(_said(attributes))

    def end(self, *, failure: str = "") -> None:
        """End it, as failed for a reason or well."""
        if self.inside is not None:
            if failure:
                self.inside.set_status(_trace.StatusCode.ERROR, failure)
            self.inside.end()


@contextlib.contextmanager
def within(span: Span) -> Iterator[None]:
    """Make this the current span while the context lasts, then end it; an error's code is the reason of its failure."""
    with contextlib.ExitStack() as stack:
        if span.inside is not None:
            token = _context.attach(_trace.set_span_in_context(span.inside))
            stack.callback(_context.detach, token)
        try:
            yield
        except BaseException as error:
            span.end(failure=str(getattr(error, "code", "") or type(error).__name__))
            raise
        span.end()


@contextlib.contextmanager
def call(name: str, attributes: Attributes) -> Iterator[None]:
    """Give a call to another process a span, where it is part of something that has one: questions have none."""
    if not under_way():
        yield
        return
    with within(Span(name, attributes, client=True)):
        yield


def under_way() -> bool:
    """Say whether there is a current span, of this process or of a caller."""
    return _trace is not None and bool(_trace.get_current_span().get_span_context().is_valid)


def send(headers: MutableMapping[str, str]) -> None:
    """Add what tells the receiver of a call which span it belongs to."""
    if _w3c is not None:
        _w3c.TraceContextTextMapPropagator().inject(headers)


@contextlib.contextmanager
def received(headers: Mapping[str, str]) -> Iterator[None]:
    """Take the caller's span for the current one while the context lasts, and in tasks that are begun in it."""
    if _w3c is None:
        yield
        return
    token = _context.attach(_w3c.TraceContextTextMapPropagator().extract(headers))
    try:
        yield
    finally:
        _context.detach(token)


def add_ids(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put the current span's ids into a log line (a processor of structlog)."""
    if under_way():
        found = _trace.get_current_span().get_span_context()
        event["trace_id"], event["span_id"] = f"{found.trace_id:032x}", f"{found.span_id:016x}"
    return event


def export(service: str) -> None:
    """Have spans sent as the environment says (``OTEL_TRACES_EXPORTER`` and the SDK's other variables).

    Without that variable, or where a provider was set already (``opentelemetry-instrument``), nothing is done. A
    package that is missing is told; it keeps nobody from working.
    """
    wanted = [name.strip() for name in os.environ.get(EXPORTER_VARIABLE, "").split(",")]
    wanted = [name for name in wanted if name not in ("", "none")]
    if not wanted or (_trace is not None and not isinstance(_trace.get_tracer_provider(), _trace.ProxyTracerProvider)):
        return
    sdk, exporting = _load("opentelemetry.sdk.trace"), _load("opentelemetry.sdk.trace.export")
    exporters = {name: entry_points(group="opentelemetry_traces_exporter", name=_entry(name)) for name in wanted}
    missing = [name for name, found in exporters.items() if not found]
    if sdk is None or missing:
        _log.warning(
            "no traces are exported: %s=%s needs the packages opentelemetry-sdk and, for otlp, "
            "opentelemetry-exporter-otlp-proto-http",
            EXPORTER_VARIABLE,
            ",".join(wanted),
        )
        return
    os.environ.setdefault("OTEL_SERVICE_NAME", service)
    provider = sdk.TracerProvider()
    for found in exporters.values():
        (entry, *_) = found
        provider.add_span_processor(exporting.BatchSpanProcessor(entry.load()()))
    _trace.set_tracer_provider(provider)
    _log.info("traces are exported by %s", ",".join(wanted))


def _said(attributes: Attributes) -> dict[str, str | int | float]:
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _entry(name: str) -> str:
    """Return the name by which an exporter's package offers it."""
    if name != "otlp":
        return name
    grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf") == "grpc"
    return "otlp_proto_grpc" if grpc else "otlp_proto_http"
