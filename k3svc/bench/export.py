"""Single requests of a load test as files: JSON Lines, and the trace format of chrome://tracing and Perfetto."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3svc.bench.load import LoadResult, Record


def write_requests(path: Path, result: LoadResult) -> None:
    """One object a line; times in seconds from the start of the load."""
    with path.open("w") as file:
        for record in result.records:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def write_chrome_trace(path: Path, result: LoadResult) -> None:
    """One row a request, with its phases below it."""
    events = [event for record in result.records for event in _events(record)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a request's life; times in seconds from the start of the load."""

    name: str
    start_s: float
    end_s: float


def phases(record: Record) -> list[Phase]:
    """What a request waited for, one after the other, from what its service reported. The service's clock starts when
    the request reaches it; the way there counts to `queue`.
    """
    if not record.stamps or record.timings is None:
        return [Phase(name="failed", start_s=record.due_s, end_s=record.ended_s)]
    timings, first = record.timings, record.stamps[0]
    ends = {
        "queue": first - (timings.ttft_ms - timings.queue_ms) / 1e3,
        "prefill": first - timings.handoff_tail_ms / 1e3,
        "hand-off tail": first,
        "decode": record.stamps[-1],
    }
    found, start = [], record.due_s
    for name, end in ends.items():
        found.append(Phase(name=name, start_s=start, end_s=max(end, start)))
        start = found[-1].end_s
    return found


def _events(record: Record) -> Iterator[dict[str, Any]]:
    row = {"pid": 1, "tid": record.index}
    whole = {"name": f"request {record.index}", "ph": "X", "ts": record.due_s * 1e6, "cat": "request"}
    detail: dict[str, Any] = {"tokens": record.num_tokens, "error": record.error_code}
    if record.timings is not None:
        detail |= dataclasses.asdict(record.timings)
    yield {**row, **whole, "dur": (record.ended_s - record.due_s) * 1e6, "args": detail}
    for phase in phases(record):
        times = {"ts": phase.start_s * 1e6, "dur": (phase.end_s - phase.start_s) * 1e6}
        yield {**row, **times, "name": phase.name, "ph": "X", "cat": "phase"}
    for stamp, count in zip(record.stamps, record.counts, strict=True):
        yield {
            **row,
            "name": "tokens",
            "ph": "i",
            "s": "t",
            "ts": stamp * 1e6,
            "cat": "token",
            "args": {"tokens": count},
        }
