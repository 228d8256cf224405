#!/usr/bin/env python3
"""Writes the Grafana dashboard of deploy/monitoring, one line of expressions a panel.

scripts/grafana_dashboard.py [--check]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "deploy" / "monitoring" / "grafana" / "dashboards" / "k3svc.json"
WIDTH, HEIGHT = 8, 8
PANELS_A_ROW = 3

Panel = tuple[str, str, dict[str, str]]
"""(title, unit, legend → expression)."""


def rate(metric: str, by: str = "") -> str:
    """Per second, summed over instances and all labels but `by`."""
    labels = f" by ({by})" if by else ""
    return f'sum{labels} (rate(k3svc_{metric}{{instance=~"$instance"}}[$__rate_interval]))'


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """The median, p90 and p99 of a histogram, by `by`."""
    labels = f"le, {by}" if by else "le"
    suffix = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{100 * q:g}{suffix}": f"histogram_quantile({q:g}, {rate(f'{metric}_bucket', labels)})"
        for q in (0.5, 0.9, 0.99)
    }


def mean(metric: str, by: str = "") -> str:
    return f"{rate(f'{metric}_sum', by)} / {rate(f'{metric}_count', by)}"


def gauge(metric: str) -> str:
    return f'sum by (job) (k3svc_{metric}{{instance=~"$instance"}})'


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        (
            "Requests",
            "short",
            {
                f"{word} {{{{job}}}}": gauge(f"num_requests_{word.replace(' ', '_')}")
                for word in ("running", "waiting", "in transfer")
            },
        ),
        (
            "Tokens per second",
            "short",
            {"output": rate("generation_tokens_total"), "prompt": rate("prompt_tokens_total")},
        ),
        ("Requests ended", "reqps", {"{{job}} {{outcome}}": rate("requests_total", "job, outcome")}),
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
        ("End-to-end latency", "s", quantiles("e2e_request_latency_seconds")),
        ("Queue time", "s", quantiles("request_queue_time_seconds", "job")),
        (
            "Tokens of a request",
            "short",
            {"prompt": mean("request_prompt_tokens"), "output": mean("request_generation_tokens")},
        ),
        (
            "Calls by code",
            "reqps",
            {
                "{{grpc_method}} {{grpc_code}}": "sum by (grpc_method, grpc_code) "
                '(rate(grpc_server_handled_total{instance=~"$instance"}[$__rate_interval]))'
            },
        ),
    ],
    "Pools": [
        ("Pages in use", "percentunit", {"{{instance}}": 'k3svc_kv_cache_usage_perc{instance=~"$instance"}'}),
        ("Slots in use", "percentunit", {"{{instance}}": 'k3svc_state_usage_perc{instance=~"$instance"}'}),
        ("Preemptions", "ops", {"preemptions": rate("num_preemptions_total")}),
    ],
    "Hand-off": [
        ("Hand-off bytes", "Bps", {"{{job}}": rate("handoff_bytes_total", "job")}),
        ("Hand-off tail", "s", quantiles("handoff_tail_seconds")),
        (
            "Hand-off tail, share of time to first token",
            "percentunit",
            {"share": f"{rate('handoff_tail_seconds_sum')} / {rate('time_to_first_token_seconds_sum')}"},
        ),
        ("Hand-off speed while it lands", "short", {"GB/s": mean("handoff_speed_gb_s")}),
        ("Prefill time", "s", quantiles("request_prefill_time_seconds", "job")),
        ("Failed attempts", "ops", {"{{reason}}": f"{rate('handoff_failures_total', 'reason')} or vector(0)"}),
    ],
    "Engine": [
        ("Step time", "s", quantiles("engine_step_seconds", "kind")),
        ("Tokens of a step", "short", {"{{kind}}": mean("engine_step_tokens", "kind")}),
        ("Event loop lag", "s", quantiles("event_loop_lag_seconds", "job")),
    ],
    "Speculation": [
        (
            "Acceptance length",
            "short",
            {
                "tokens a step": f"1 + {rate('spec_decode_num_accepted_tokens_total')} "
                f"/ {rate('spec_decode_num_drafts_total')}"
            },
        ),
        (
            "Acceptance by position",
            "percentunit",
            {
                "{{position}}": f"{rate('spec_decode_num_accepted_tokens_per_pos_total', 'position')} "
                f"/ on () group_left () {rate('spec_decode_num_drafts_total')} or vector(0)"
            },
        ),
        (
            "Late proposals",
            "ops",
            {"late": rate("spec_decode_late_total"), "salvaged": rate("spec_decode_salvaged_total")},
        ),
    ],
    "Processes": [
        ("Memory", "bytes", {"{{instance}}": 'process_resident_memory_bytes{instance=~"$instance"}'}),
        (
            "Processor",
            "short",
            {"{{instance}}": 'rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])'},
        ),
        (
            "What runs",
            "short",
            {"{{role}} {{version}} {{model}} {{device}}": 'k3svc_build_info{instance=~"$instance"}'},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, contents in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": row,
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(contents):
            x = WIDTH * (index % PANELS_A_ROW)
            place = {"x": x, "y": y + HEIGHT * (index // PANELS_A_ROW), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += HEIGHT * -(-len(contents) // PANELS_A_ROW)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": "k3svc",
        "uid": "k3svc",
        "tags": ["k3svc", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": source,
                    "query": {"query": "label_values(k3svc_build_info, instance)", "refId": "instance"},
                    "definition": "label_values(k3svc_build_info, instance)",
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    title, unit, expressions = panel
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries",
        "title": title,
        "id": number,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {
            "tooltip": {"mode": "multi", "sort": "desc"},
            "legend": {"showLegend": True, "placement": "bottom"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(expressions.items())
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not current")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run scripts/grafana_dashboard.py")


if __name__ == "__main__":
    main()
