"""Records of requests with round times."""

from typing import Any

from k3svc.bench.load import LoadResult, Record, Sample
from k3svc.client import ServiceLoad
from k3svc.core.events import SpeculationStats, Timings, Usage


def record(
    index: int = 0, *, due_s: float = 0.0, first_s: float = 0.1, gap_s: float = 0.02, n: int = 5, **changes: Any
):
    """A request due at `due_s`, whose first of `n` tokens came `first_s` later and the others every `gap_s`."""
    stamps = [due_s + first_s + gap_s * i for i in range(n)]
    values: dict[str, Any] = {
        "index": index,
        "due_s": due_s,
        "sent_s": due_s,
        "ended_s": stamps[-1],
        "stamps": stamps,
        "counts": [1] * n,
        "usage": Usage(prompt_tokens=100, completion_tokens=n, cached_tokens=0),
        "timings": Timings(
            queue_ms=10.0,
            prefill_ms=60.0,
            handoff_tail_ms=5.0,
            ttft_ms=first_s * 1e3 - 2.0,
            tpot_ms=gap_s * 1e3,
            handoff_bytes=4_000_000,
            preemptions=1,
            prefill_attempts=2,
            handoff_ms=40.0,
        ),
        "speculation": SpeculationStats(steps=n),
        **changes,
    }
    return Record(**values)


def failure(index: int, code: str) -> Record:
    return Record(index=index, due_s=0.0, sent_s=0.0, ended_s=0.5, error_code=code, error="no")


def result(*records: Record, duration_s: float = 10.0) -> LoadResult:
    load = ServiceLoad(
        running=3,
        waiting=3,
        in_transfer=3,
        num_tokens=3,
        handoff_bytes=3,
        resident_bytes=3,
        drafter="",
        speculation_rests=False,
        pool_bytes=0,
        preemptions=0,
        draft_steps=0,
        accepted_drafts=0,
        free_pages=6,
        total_pages=8,
        free_slots=1,
        total_slots=4,
        draining=False,
        outcomes={},
    )
    sample = Sample(at_s=1.0, endpoint="127.0.0.1:1", load=load)
    return LoadResult(records=records, duration_s=duration_s, cpu_s=0.5, loop_lags_s=[0.001, 0.002], samples=[sample])
