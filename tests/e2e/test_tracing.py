"""One request, one trace and one name in the log, from the client over decode to prefill."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from k3svc.client import AsyncClient
from k3svc.obs import trace
from k3svc.obs.log import JsonFormatter
from k3svc.text.tokenizer import Tokenizer
from tests.e2e.rpc_stack import NANO, PROMPT, stack


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_provider(provider)
    yield made
    trace.set_provider(None)


async def until_ended(exporter: InMemorySpanExporter, name: str) -> None:
    """The stream ends a moment before its span does."""
    while all(span.name != name for span in exporter.get_finished_spans()):
        await asyncio.sleep(0.001)


async def test_a_request_is_one_trace_over_all_services(tokenizer: Tokenizer, exporter: InMemorySpanExporter):
    application = TracerProvider()
    application.add_span_processor(SimpleSpanProcessor(exporter))
    async with stack(tokenizer) as here, AsyncClient(here.decode.address) as client:
        with application.get_tracer("app").start_as_current_span("application"):
            done = await client.generate(tokens=PROMPT, max_tokens=5, request_id="r-1").result()
        await until_ended(exporter, "k3svc.v1.DecodeService/Generate")
        await until_ended(exporter, "k3svc.v1.PrefillService/Prefill")
    finished = [span for span in exporter.get_finished_spans() if "Release" not in span.name]
    found: dict[str, Any] = {span.name: span for span in finished}
    mine = [span for span in finished if span.context.trace_id == found["application"].context.trace_id]
    assert sorted(span.name for span in mine) == [
        "application",
        "decode",
        "hand-off",
        "k3svc.v1.DecodeService/Generate",
        "k3svc.v1.PrefillService/Prefill",
        "prefill",
        "queue",
        "queue",
        "transfer tail",
    ]
    generate, prefill = found["k3svc.v1.DecodeService/Generate"], found["k3svc.v1.PrefillService/Prefill"]
    assert generate.parent.span_id == found["application"].context.span_id
    assert prefill.parent.span_id == generate.context.span_id
    assert generate.attributes["k3svc.request_id"] == "r-1"
    assert prefill.attributes["k3svc.request_id"].startswith("d0.")
    assert prefill.attributes["attempt"] == 1
    assert found["decode"].attributes["tokens"] == len(done.token_ids) == 5
    assert found["hand-off"].attributes["handoff_bytes"] > 0
    assert generate.start_time <= found["hand-off"].start_time <= found["decode"].start_time
    assert found["decode"].end_time <= generate.end_time


async def test_without_a_span_of_the_caller_each_request_has_a_trace(
    tokenizer: Tokenizer, exporter: InMemorySpanExporter
):
    async with stack(tokenizer) as here, AsyncClient(here.decode.address) as client:
        for _ in range(2):
            await client.generate(tokens=PROMPT, max_tokens=2).result()
    calls = [span for span in exporter.get_finished_spans() if span.name.endswith("/Generate")]
    assert [span.parent for span in calls] == [None, None]
    assert len({span.context.trace_id for span in calls}) == 2


async def test_log_lines_of_prefill_name_the_request_of_the_client_and_the_attempt(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    lines: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter().format(record)))

    logger = logging.getLogger("k3svc")
    handler = Collect()
    logger.addHandler(handler)
    try:
        async with stack(tokenizer) as here, AsyncClient(here.decode.address) as client:
            # Prefill refuses what decode takes: the fingerprint differs.
            here.prefill_engine.fingerprint = replace(here.prefill_engine.fingerprint, model="another")
            with caplog.at_level(logging.INFO, "k3svc"), pytest.raises(Exception, match="fingerprint differs"):
                await client.generate(tokens=PROMPT, max_tokens=2, request_id="r-7").result()
    finally:
        logger.removeHandler(handler)
    refused = next(line for line in lines if "PrefillService/Prefill failed" in line["message"])
    assert refused["request_id"] == "r-7"
    assert refused["attempt"] == 1
    assert refused["handoff"].startswith("d0.")
    assert refused["reason"] == "FINGERPRINT_MISMATCH"
