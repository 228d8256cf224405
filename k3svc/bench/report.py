"""One HTML page of a load test or a sweep: nothing else has to be there to read it. Needs plotly (`k3svc[report]`).

The panels over time are those of the Grafana dashboard in deploy/monitoring, as far as a caller can see.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3svc.bench.export import phases
from k3svc.bench.figures import LATENCIES, Objectives, latencies_ms, text_table, tokens_per_second
from k3svc.bench.load import LoadResult, Record, Sample
from k3svc.bench.sweep import Point, best_within_objectives, knee, sweep_table

MAX_CURVE_POINTS = 1000
MAX_TIMELINE_ROWS = 300
PHASE_COLOURS = {
    "queue": "#bab0ac",
    "prefill": "#4e79a7",
    "hand-off tail": "#e15759",
    "decode": "#59a14f",
    "failed": "#000000",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin: 1.6em 0 0.4em; } p.note { color: #666; }
table { border-collapse: collapse; } td { padding: 0.1em 1.2em 0.1em 0; vertical-align: top; }
td:first-child { color: #666; }
pre { background: #f6f6f6; padding: 0.8em; overflow-x: auto; font-size: 13px; line-height: 1.35; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 0.5em; } .wide { grid-column: 1 / 3; }
@media (max-width: 900px) { .grid { grid-template-columns: 1fr; } .wide { grid-column: 1; } }
"""


def write_load_report(
    path: Path, result: LoadResult, settings: Mapping[str, Any], figures: Mapping[str, Any], objectives: Objectives
) -> None:
    """The page of one load test."""
    done = [record for record in result.records if record.is_success and record.stamps]
    bounds = {"ttft": objectives.ttft_ms, "tpot": objectives.tpot_ms, "e2el": objectives.e2el_ms}
    curves = [
        _cdf(LATENCIES[name], samples, bounds.get(name)) for name, samples in latencies_ms(done).items() if samples
    ]
    sections = [
        ("Latencies", "Share of samples that are at most so long; dashed: the objective.", curves),
        (
            "Time lines of requests",
            f"The first {MAX_TIMELINE_ROWS} requests, one row each, from when they were due.",
            [_timeline(result.records[:MAX_TIMELINE_ROWS])],
        ),
        ("The service over time", "As its decode services report it every second.", _service_panels(result, done)),
    ]
    title = f"Load test of {settings['model_id']} on {settings['device']}"
    _write(path, title, settings, text_table(figures), sections)


def write_sweep_report(path: Path, points: Sequence[Point], settings: Mapping[str, Any], unit: str) -> None:
    """The page of a sweep."""
    throughput = [point.throughput for point in points]
    levels = [point.level for point in points]
    plots = [_tradeoff(points, throughput, name, LATENCIES[name], unit) for name in ("ttft", "tpot", "e2el")]
    plots.insert(
        0, _lines({"output tokens/s": (levels, throughput)}, unit, "output tokens/s", title="Throughput", markers=True)
    )
    chosen, best = knee(points), best_within_objectives(points)
    found = [f"knee at {chosen.level:g}"] if chosen else []
    found += [f"highest level within objectives: {best.level:g}"] if best else []
    note = f"Levels are {unit}; {', '.join(found) or 'no knee'}."
    title = f"Sweep over {unit} of {settings['model_id']} on {settings['device']}"
    _write(path, title, settings, sweep_table(points, unit), [("Throughput and latency", note, plots)])


def _cdf(title: str, samples: Sequence[float], bound: float | None) -> Any:
    shares = np.linspace(0, 100, min(MAX_CURVE_POINTS, max(2, len(samples))))
    figure = go.Figure(go.Scatter(x=np.percentile(samples, shares), y=shares, mode="lines", name=title))
    if bound is not None:
        figure.add_vline(x=bound, line_dash="dash", line_color="#e15759")
    return _styled(figure, "ms", "% of samples", title=title)


def _timeline(records: Sequence[Record]) -> Any:
    figure = go.Figure()
    for name, colour in PHASE_COLOURS.items():
        bars = [(record.index, phase) for record in records for phase in phases(record) if phase.name == name]
        if bars:
            figure.add_bar(
                orientation="h",
                name=name,
                y=[index for index, _ in bars],
                base=[phase.start_s for _, phase in bars],
                x=[phase.end_s - phase.start_s for _, phase in bars],
                marker_color=colour,
                marker_line_width=0,
                hovertemplate="request %{y}, " + name + ": %{x:.3f} s<extra></extra>",
            )
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_yaxes(autorange="reversed")
    return _styled(figure, "seconds from the start", "request", height=min(900, 220 + 6 * len(records)))


def _service_panels(result: LoadResult, done: Sequence[Record]) -> list[Any]:
    made = tokens_per_second(done)
    panels = [_lines({"received": (list(range(len(made))), made)}, "s", "output tokens/s", title="Output tokens/s")]
    by_endpoint: dict[str, list[Sample]] = {}
    for sample in result.samples:
        by_endpoint.setdefault(sample.endpoint, []).append(sample)
    several = len(by_endpoint) > 1

    def series(names: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
        return {
            f"{name} ({endpoint})" if several else name: (
                [sample.at_s for sample in samples],
                [value(sample.load) for sample in samples],
            )
            for endpoint, samples in by_endpoint.items()
            for name, value in names.items()
        }

    requests = {
        "running": lambda load: load.running,
        "waiting": lambda load: load.waiting,
        "in transfer": lambda load: load.in_transfer,
    }
    panels.append(_lines(series(requests), "s", "requests", title="Requests"))
    use = {
        "pages": lambda load: 100 * (1 - load.free_pages / max(1, load.total_pages)),
        "slots": lambda load: 100 * (1 - load.free_slots / max(1, load.total_slots)),
    }
    panels.append(_lines(series(use), "s", "% in use", title="Pools"))
    tails = [record.timings.handoff_tail_ms for record in done if record.timings is not None]
    if tails:
        panels.append(_cdf("Hand-off tail", tails, None))
    return panels


def _tradeoff(points: Sequence[Point], throughput: Sequence[float], name: str, title: str, unit: str) -> Any:
    figure = go.Figure()
    for quantile in ("median", "p99"):
        figure.add_scatter(
            x=throughput,
            y=[point.figures[f"{quantile}_{name}_ms"] for point in points],
            mode="lines+markers+text" if quantile == "median" else "lines+markers",
            text=[f"{point.level:g}" for point in points],
            textposition="top left",
            name=quantile,
        )
    return _styled(figure, f"output tokens/s (labels: {unit})", "ms", title=title)


def _lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_title: str,
    y_title: str,
    *,
    title: str | None = None,
    markers: bool = False,
) -> Any:
    figure = go.Figure()
    for name, (x, y) in series.items():
        figure.add_scatter(x=x, y=y, mode="lines+markers" if markers else "lines", name=name)
    figure.update_yaxes(rangemode="tozero")
    return _styled(figure, x_title, y_title, title=title)


def _styled(figure: Any, x_title: str, y_title: str, *, title: str | None = None, height: int = 340) -> Any:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 50 if title else 20, "b": 45},
        xaxis_title=x_title,
        yaxis_title=y_title,
        title={"text": title, "font": {"size": 15}} if title else None,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 1.0, "xanchor": "right"},
    )
    return figure


def _write(
    path: Path,
    title: str,
    settings: Mapping[str, Any],
    table: str,
    sections: Sequence[tuple[str, str, Sequence[Any]]],
) -> None:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in settings.items()
    )
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        f"<h2>Figures</h2><pre>{html.escape(table)}</pre>",
    ]
    is_first = True
    for heading, note, plots in sections:
        parts.append(f'<h2>{html.escape(heading)}</h2><p class="note">{html.escape(note)}</p><div class="grid">')
        for plot in plots:
            drawn = plot.to_html(full_html=False, include_plotlyjs=is_first, config={"displayModeBar": False})
            parts.append(f'<div class="{"wide" if len(plots) == 1 else "plot"}">{drawn}</div>')
            is_first = False
        parts.append("</div>")
    parts.append(f"<h2>Settings</h2><table>{rows}</table></body></html>\n")
    path.write_text("\n".join(parts))
