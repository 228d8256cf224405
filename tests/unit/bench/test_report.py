"""Pages that hold all they need."""

import re
from pathlib import Path
from typing import Any

import pytest

from k3svc.bench.figures import Objectives, figures
from k3svc.bench.report import write_load_report, write_sweep_report
from k3svc.bench.sweep import Point
from tests.unit.bench.records import failure, record, result

SETTINGS: dict[str, Any] = {"model_id": "<nano>", "device": "cpu", "input_len": 100}


def plots(page: str) -> list[str]:
    return re.findall(r'class="plotly-graph-div"', page)


def outside(page: str) -> list[str]:
    """What a browser would fetch."""
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    return re.findall(r'(?:src|href)="(?!data:)[^"]*"', without_scripts) + re.findall(r"<script[^>]* src=", page)


def test_the_page_of_a_load_has_every_plot_and_needs_nothing(tmp_path: Path):
    measured = result(*(record(index, due_s=0.1 * index) for index in range(20)), failure(20, "UNAVAILABLE"))
    objectives = Objectives(ttft_ms=90.0)
    write_load_report(tmp_path / "r.html", measured, SETTINGS, figures(measured, objectives), objectives)
    page = (tmp_path / "r.html").read_text()
    assert len(plots(page)) == 4 + 1 + 4
    assert outside(page) == []
    assert "&lt;nano&gt;" in page
    assert "<nano>" not in page
    assert "Median TTFT (ms):" in page
    for name in ("queue", "prefill", "hand-off tail", "decode", "failed"):
        assert f'"name":"{name}"' in page


def test_a_load_that_failed_has_a_page_too(tmp_path: Path):
    measured = result(failure(0, "UNAVAILABLE"))
    write_load_report(tmp_path / "r.html", measured, SETTINGS, figures(measured, Objectives()), Objectives())
    assert "UNAVAILABLE errors:" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("count", [1, 5])
def test_the_page_of_a_sweep_has_its_curves(tmp_path: Path, count: int):
    points = [
        Point(level=2.0**power, figures=figures(result(record(), duration_s=1 / min(power + 1, 3)), Objectives()))
        for power in range(count)
    ]
    write_sweep_report(tmp_path / "s.html", points, SETTINGS, "concurrency")
    page = (tmp_path / "s.html").read_text()
    assert len(plots(page)) == 4
    assert outside(page) == []
    assert ("knee at 4" in page) == (count == 5)
