"""Figures of a load test, under the names of `vllm bench serve` where it has the same; times in milliseconds.

TTFT    from when a request was due to its first token
TPOT    mean time per output token after the first message of a request
ITL     between two messages of a request; several tokens may share a message
E2EL    from when a request was due to its last token
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3svc.bench.load import LoadResult, Record
from k3svc.errors import ConfigError

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Bounds that a good request keeps, in milliseconds; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @property
    def are_set(self) -> bool:
        return any(bound is not None for bound in (self.ttft_ms, self.tpot_ms, self.e2el_ms))

    def are_met(self, record: Record) -> bool:
        values = (record.ttft_s, record.tpot_s or 0.0, record.e2e_s)
        bounds = (self.ttft_ms, self.tpot_ms, self.e2el_ms)
        return all(bound is None or value * 1e3 <= bound for value, bound in zip(values, bounds, strict=True))


def parse_objectives(texts: Sequence[str]) -> Objectives:
    """Of `ttft:500`, `tpot:50` and `e2el:10000`. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not bounds[name] > 0:
            raise ConfigError(f"goodput: got {text!r}; allowed: ttft:MS, tpot:MS and e2el:MS")
    return Objectives(**{f"{name}_ms": value for name, value in bounds.items()})


def figures(result: LoadResult, objectives: Objectives, percentiles: Sequence[float] = PERCENTILES) -> dict[str, Any]:
    """One flat object. Latencies are None when nothing succeeded."""
    done = [record for record in result.records if record.is_success and record.stamps]
    num_output = sum(record.num_tokens for record in done)
    num_input = sum(record.usage.prompt_tokens for record in done if record.usage)
    duration_s = result.duration_s
    values: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(result.records) - len(done),
        "errors": dict(Counter(record.error_code for record in result.records if record.error_code)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(done),
        "max_concurrent_requests": _peak_running(done),
    }
    if objectives.are_set:
        values["request_goodput"] = sum(objectives.are_met(record) for record in done) / duration_s
        values["good_share"] = sum(objectives.are_met(record) for record in done) / max(1, len(result.records))
    for name, samples in latencies_ms(done).items():
        values |= distribution(name, samples, percentiles)
    return values | _service_figures(done, percentiles) | _generator_figures(result, done)


def latencies_ms(records: Sequence[Record]) -> dict[str, list[float]]:
    """All samples of each latency of `LATENCIES`."""
    return {
        "ttft": [record.ttft_s * 1e3 for record in records],
        "tpot": [record.tpot_s * 1e3 for record in records if record.tpot_s is not None],
        "itl": [
            (after - before) * 1e3
            for record in records
            for before, after in zip(record.stamps, record.stamps[1:], strict=False)
        ],
        "e2el": [record.e2e_s * 1e3 for record in records],
    }


def distribution(name: str, samples: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean_NAME_ms, median_NAME_ms, std_NAME_ms and pP_NAME_ms; None without samples."""
    values = np.asarray(samples, dtype=np.float64)
    has = len(values) > 0
    found: dict[str, float | None] = {
        f"mean_{name}_ms": float(values.mean()) if has else None,
        f"median_{name}_ms": float(np.median(values)) if has else None,
        f"std_{name}_ms": float(values.std()) if has else None,
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile)) if has else None
    return found


def _service_figures(done: Sequence[Record], percentiles: Sequence[float]) -> dict[str, Any]:
    """What the service reports of itself at the end of each stream."""
    timed = [(record, record.timings) for record in done if record.timings is not None]
    values: dict[str, Any] = {}
    for name in ("queue", "prefill", "handoff_tail"):
        values |= distribution(name, [getattr(timings, f"{name}_ms") for _, timings in timed], percentiles)
    handoff_bytes = sum(timings.handoff_bytes for _, timings in timed)
    handoff_s = sum(timings.handoff_ms for _, timings in timed) / 1e3
    ttft_s = sum(record.ttft_s for record, _ in timed)
    speculated = [record.speculation for record in done if record.speculation and record.speculation.steps_with_drafts]
    steps = sum(stats.steps_with_drafts for stats in speculated)
    told = [record.speculation for record in done if record.speculation]
    all_steps = sum(stats.steps for stats in told)
    return values | {
        "handoff_bytes_per_request": handoff_bytes / len(timed) if timed else None,
        "handoff_gb_s": handoff_bytes / handoff_s / 1e9 if handoff_s else None,
        "handoff_tail_share_of_ttft": (
            sum(timings.handoff_tail_ms for _, timings in timed) / 1e3 / ttft_s if ttft_s else None
        ),
        "preemptions": sum(timings.preemptions for _, timings in timed),
        "prefill_retries": sum(max(0, timings.prefill_attempts - 1) for _, timings in timed),
        "acceptance_length": 1 + sum(stats.accepted for stats in speculated) / steps if steps else None,
        "drafters": sorted({name for stats in told for name in stats.drafters}),
        "drafted_step_share": steps / all_steps if all_steps else None,
        "rested_step_share": sum(stats.rested for stats in told) / all_steps if all_steps else None,
        "draft_acceptance_rate": (
            sum(stats.accepted for stats in speculated) / sum(stats.proposed for stats in speculated)
            if speculated
            else None
        ),
    }


def _generator_figures(result: LoadResult, done: Sequence[Record]) -> dict[str, Any]:
    """Whether the load generator itself was in the way."""
    excess = [
        record.tpot_s * 1e3 - record.timings.tpot_ms
        for record in done
        if record.tpot_s is not None and record.timings is not None
    ]
    tokens = sum(sum(record.counts) for record in result.records)
    return {
        "generator_cpu_share": result.cpu_s / result.duration_s,
        "generator_cpu_ms_per_token": result.cpu_s * 1e3 / tokens if tokens else None,
        "generator_loop_lag_p99_ms": (
            float(np.percentile(result.loop_lags_s, 99)) * 1e3 if result.loop_lags_s else None
        ),
        "generator_tpot_excess_ms": float(np.median(excess)) if excess else None,
    }


def tokens_per_second(records: Sequence[Record]) -> list[int]:
    """Output tokens of each whole second of the load."""
    counts: Counter[int] = Counter()
    for record in records:
        for stamp, count in zip(record.stamps, record.counts, strict=True):
            counts[int(stamp)] += count
    return [counts[second] for second in range(max(counts, default=-1) + 1)]


def _peak_tokens_per_s(records: Sequence[Record]) -> int:
    return max(tokens_per_second(records), default=0)


def _peak_running(records: Sequence[Record]) -> int:
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def text_table(values: Mapping[str, Any], percentiles: Sequence[float] = PERCENTILES) -> str:
    """The figures as `vllm bench serve` prints them, with what it lacks below."""
    lines = [_title("Serving Benchmark Result", "=")]
    head = {
        "Successful requests:": values["completed"],
        "Failed requests:": values["failed"],
        "Benchmark duration (s):": values["duration"],
        "Total input tokens:": values["total_input_tokens"],
        "Total generated tokens:": values["total_output_tokens"],
        "Request throughput (req/s):": values["request_throughput"],
        "Request goodput (req/s):": values.get("request_goodput"),
        "Output token throughput (tok/s):": values["output_throughput"],
        "Peak output token throughput (tok/s):": values["max_output_tokens_per_s"],
        "Peak concurrent requests:": values["max_concurrent_requests"],
        "Total token throughput (tok/s):": values["total_token_throughput"],
    }
    lines += _rows(head)
    for name, title in LATENCIES.items():
        lines.append(_title(title, "-"))
        rows = {f"Mean {name.upper()} (ms):": values[f"mean_{name}_ms"]}
        rows[f"Median {name.upper()} (ms):"] = values[f"median_{name}_ms"]
        rows |= {f"P{p:g} {name.upper()} (ms):": values[f"p{p:g}_{name}_ms"] for p in percentiles if p != 50}
        lines += _rows(rows)
    lines.append(_title("Reported by the Service", "-"))
    lines += _rows(
        {
            "Median queue time (ms):": values["median_queue_ms"],
            "Median prefill time (ms):": values["median_prefill_ms"],
            "Median hand-off tail (ms):": values["median_handoff_tail_ms"],
            "Hand-off tail, share of TTFT (%):": _percent(values["handoff_tail_share_of_ttft"]),
            "Hand-off bytes per request:": values["handoff_bytes_per_request"],
            "Hand-off speed (GB/s):": values["handoff_gb_s"],
            "Preemptions:": values["preemptions"],
            "Acceptance length:": values["acceptance_length"],
            "Steps with drafts (%):": _percent(values["drafted_step_share"]) if values["drafters"] else None,
            "Steps at which drafts rested (%):": _percent(values["rested_step_share"]) or None,
        }
    )
    lines.append(_title("Load Generator", "-"))
    lines += _rows(
        {
            "Processor time, share of one core (%):": _percent(values["generator_cpu_share"]),
            "Processor time per token (ms):": values["generator_cpu_ms_per_token"],
            "Median TPOT minus the service's (ms):": values["generator_tpot_excess_ms"],
        }
    )
    lines += [f"{code + ' errors:':<41}{count:>10}" for code, count in sorted(values["errors"].items())]
    return "\n".join([*lines, "=" * 51])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _title(text: str, fill: str) -> str:
    return f" {text} ".center(51, fill) if fill == "=" else text.center(51, fill)


def _rows(rows: Mapping[str, Any]) -> list[str]:
    def shown(value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"

    return [f"{name:<41}{shown(value):>10}" for name, value in rows.items() if value is not None]
