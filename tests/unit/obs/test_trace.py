"""Spans of calls, phases and steps, and their export as a time line."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from k3svc.config import TracingSection
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow
from k3svc.engine.observer import UNOBSERVED
from k3svc.errors import ConfigError, NotFound
from k3svc.obs import trace
from k3svc.obs.chrome_trace import chrome_trace, read_spans, request_ids
from tests.unit.cli.test_commands import run_main

GENERATE = "/k3svc.v1.DecodeService/Generate"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_provider(provider)
    yield made
    trace.set_provider(None)


def spans(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_off_it_costs_an_import_of_nothing():
    code = (
        "import sys, k3svc.rpc.server, k3svc.client; from k3svc.obs import trace\n"
        "with trace.server_span('/a/b', ()): trace.record('x', 0, 1)\n"
        "assert trace.outgoing() == ()\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_call_continues_the_trace_of_its_caller(exporter: InMemorySpanExporter):
    with trace.server_span(GENERATE, [("traceparent", PARENT), ("authorization", "Bearer secret")]):
        trace.follow("r-1", attempt=2)
        ((name, value),) = trace.outgoing()
    span = spans(exporter)["k3svc.v1.DecodeService/Generate"]
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.kind is api.SpanKind.SERVER
    assert span.attributes["rpc.method"] == "Generate"
    assert span.attributes["k3svc.request_id"] == "r-1"
    assert span.attributes["attempt"] == 2
    assert name == "traceparent"
    assert value == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
    assert "secret" not in span.to_json()
    assert trace.outgoing() == ()


def test_a_garbled_parent_begins_a_trace_of_its_own(exporter: InMemorySpanExporter):
    for parent in ("", "00-zz-1-01", "x" * 500):
        with trace.server_span(GENERATE, [("traceparent", parent)]):
            pass
    assert [span.parent for span in exporter.get_finished_spans()] == [None] * 3


def test_an_error_of_the_call_is_one_of_the_span(exporter: InMemorySpanExporter):
    with pytest.raises(ValueError, match="broken"), trace.server_span(GENERATE, ()):
        raise ValueError("broken")
    assert spans(exporter)["k3svc.v1.DecodeService/Generate"].status.status_code is api.StatusCode.ERROR


def test_phases_lie_below_the_call_at_their_times(exporter: InMemorySpanExporter):
    now = time.monotonic()
    with trace.server_span(GENERATE, ()):
        trace.record("queue", now - 2.0, now - 1.5, {"tokens": 3})
    trace.record("outside", now, now)
    found = spans(exporter)
    assert set(found) == {"queue", "k3svc.v1.DecodeService/Generate"}
    queue = found["queue"]
    assert queue.parent.span_id == found["k3svc.v1.DecodeService/Generate"].context.span_id
    assert (queue.end_time - queue.start_time) / 1e9 == pytest.approx(0.5, abs=1e-3)
    assert queue.end_time / 1e9 == pytest.approx(time.time() - 1.5, abs=60.0)
    assert queue.attributes["tokens"] == 3


def test_steps_lie_below_the_calls_that_have_part_in_them(exporter: InMemorySpanExporter):
    prompt = ExtendRow(key="r-1#1", slot=1, block_table=[1], token_ids=[1, 2, 3], start=0, is_last=True)
    mine, other = (
        DecodeRow(key=key, slot=1, block_table=[1], token_id=1, position=1, sample=None) for key in ("r-1#0", "r-2#0")
    )
    with trace.server_span(GENERATE, ()):
        trace.follow("r-1")
        UNOBSERVED.step(ExtendBatch(rows=[prompt]), 0.25)
        UNOBSERVED.step(DecodeBatch(rows=[mine, other]), 0.01)
        UNOBSERVED.step(DecodeBatch(rows=[other]), 0.01)
    UNOBSERVED.step(DecodeBatch(rows=[mine]), 0.01)
    finished = exporter.get_finished_spans()
    assert [span.name for span in finished] == ["extend step", "decode step", "k3svc.v1.DecodeService/Generate"]
    assert [dict(span.attributes or {}) for span in finished[:2]] == [{"tokens": 3}, {"tokens": 2}]
    extend: Any = finished[0]
    assert (extend.end_time - extend.start_time) / 1e9 == pytest.approx(0.25, abs=1e-3)


def test_steps_of_one_call_are_bounded(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace, "MAX_STEPS", 3)
    with trace.server_span(GENERATE, ()):
        trace.follow("r")
        for _ in range(5):
            trace.step("decode step", iter(["r#0"]), 0.0, {})
    assert len(exporter.get_finished_spans()) == 3 + 1


def test_what_is_not_sampled_has_no_steps():
    provider = TracerProvider(sampler=ALWAYS_OFF)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_provider(provider)
    try:
        with trace.server_span(GENERATE, ()):
            trace.follow("r")
            trace.step("decode step", iter(["r#0"]), 0.0, {})
    finally:
        trace.set_provider(None)
    assert exporter.get_finished_spans() == ()


def test_without_the_package_the_configuration_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'k3svc\[otel\]'"):
        trace.configure_tracing("decode", TracingSection(file="spans.jsonl"))


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tracing\.file: cannot write"):
        trace.configure_tracing("decode", TracingSection(file=str(tmp_path / "none" / "spans.jsonl")))


@pytest.fixture
def spans_file(tmp_path: Path) -> Path:
    """Spans of one request at two services, and of another request."""
    path = tmp_path / "spans.jsonl"
    for role, method, request_id, phase in (
        ("decode", GENERATE, "r-1", "queue"),
        ("prefill", "/k3svc.v1.PrefillService/Prefill", "d0.1", "prefill"),
        ("decode", GENERATE, "r-2", "queue"),
    ):
        parent = PARENT if request_id != "r-2" else PARENT.replace("0af7", "1111")
        trace.configure_tracing(role, TracingSection(file=str(path)))
        with trace.server_span(method, [("traceparent", parent)]):
            trace.follow(request_id)
            now = time.monotonic()
            trace.record(phase, now - 0.5, now - 0.25)
            trace.step(f"{role} step", iter([f"{request_id}#0"]), 0.001, {"tokens": 1})
        trace.flush()
        trace.set_provider(None)
    return path


def test_a_time_line_has_the_request_at_every_service(spans_file: Path):
    read = read_spans([spans_file])
    assert len(read) == 9
    assert request_ids(read) == ["r-1", "r-2"]
    events = chrome_trace(read, "r-1")["traceEvents"]
    services = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert set(services) == {"k3svc-decode", "k3svc-prefill"}
    spans_of = {(event["pid"], event["name"]): event for event in events if event["ph"] == "X"}
    assert len(spans_of) == 6
    assert min(event["ts"] for event in spans_of.values()) == 0.0
    queue = spans_of[services["k3svc-decode"], "queue"]
    assert queue["dur"] == pytest.approx(250_000, rel=0.01)
    assert spans_of[services["k3svc-prefill"], "prefill step"]["tid"] != queue["tid"]
    with pytest.raises(NotFound, match="the last ones: r-1, r-2"):
        chrome_trace(read, "r-9")


def test_the_command_writes_the_last_request_or_the_one_asked_for(
    spans_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "t.json"
    status, _, err = run_main(["trace", str(spans_file), "--out", str(out)], monkeypatch, capsys)
    assert (status, "request r-2" in err) == (0, True)
    assert len(json.loads(out.read_text())["traceEvents"]) == 1 + 3
    status, text, _ = run_main(["trace", str(spans_file), "--request-id", "r-1"], monkeypatch, capsys)
    assert len(json.loads(text)["traceEvents"]) == 2 + 6
    spans_file.write_text('{"name": "x"}\n')
    status, _, err = run_main(["trace", str(spans_file)], monkeypatch, capsys)
    assert status == 2
    assert "spans.jsonl:1 is no span" in err
