"""Spans of `tracing.file` as the trace format of chrome://tracing and Perfetto: one request's time line."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from k3svc.errors import ConfigError, NotFound

Span = Mapping[str, Any]
"""A span as OpenTelemetry's SDK writes it as JSON."""


def read_spans(paths: Iterable[Path]) -> list[Span]:
    """The spans of JSON Lines files. Raises ConfigError naming the place that is wrong."""
    spans: list[Span] = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                span = json.loads(line)
                _ = (span["context"]["trace_id"], span["start_time"], span["end_time"])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{path}:{number} is no span") from error
            spans.append(span)
    return spans


def request_ids(spans: Iterable[Span]) -> list[str]:
    """Of the requests of clients, in order of their start."""
    calls = [span for span in spans if span["attributes"].get("rpc.method") == "Generate"]
    return [
        str(span["attributes"]["k3svc.request_id"])
        for span in sorted(calls, key=lambda span: str(span["start_time"]))
        if "k3svc.request_id" in span["attributes"]
    ]


def chrome_trace(spans: Iterable[Span], request_id: str) -> dict[str, Any]:
    """All spans of the traces that the request has part in: one process a service, one row a call, its steps on a row
    of their own. Raises NotFound.
    """
    spans = list(spans)
    traces = {span["context"]["trace_id"] for span in spans if span["attributes"].get("k3svc.request_id") == request_id}
    if not traces:
        known = ", ".join(request_ids(spans)[-5:])
        raise NotFound(f"no span of request {request_id!r}; the last ones: {known or 'none'}", reason="UNKNOWN_REQUEST")
    mine = [span for span in spans if span["context"]["trace_id"] in traces]
    origin = min(_microseconds(span["start_time"]) for span in mine)
    services = {name: number for number, name in enumerate(sorted({_service(span) for span in mine}), 1)}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in services.items()
    ]
    for span in sorted(mine, key=lambda span: _microseconds(span["start_time"])):
        start, end = _microseconds(span["start_time"]), _microseconds(span["end_time"])
        events.append(
            {
                "name": span["name"],
                "ph": "X",
                "pid": services[_service(span)],
                "tid": 2 if span["name"].endswith(" step") else 1,
                "ts": start - origin,
                "dur": end - start,
                "args": dict(span["attributes"]),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _service(span: Span) -> str:
    return str(span["resource"]["attributes"].get("service.name", "?"))


def _microseconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1e6
