"""Knees of curves that are known."""

from typing import Any

from k3svc.bench.sweep import Point, best_within_objectives, is_saturated, knee, sweep_table


def point(level: float, throughput: float, **changes: Any) -> Point:
    values = {"output_throughput": throughput, "request_throughput": throughput / 10, "failed": 0}
    values |= {f"{p}_{name}_ms": 10.0 for name in ("ttft", "tpot") for p in ("median", "p99")}
    return Point(level=level, figures=values | changes)


def saturating(limit: float) -> list[Point]:
    return [point(level, min(level, limit)) for level in (1, 2, 4, 8, 16, 32)]


def test_the_knee_is_where_throughput_stops_growing():
    for limit in (4, 8, 16):
        found = knee(saturating(limit))
        assert found is not None
        assert found.level == limit


def test_the_order_of_levels_does_not_matter():
    found = knee(list(reversed(saturating(8))))
    assert found is not None
    assert found.level == 8


def test_few_or_flat_points():
    assert knee(saturating(8)[:2]) is None
    flat = knee([point(level, 5.0) for level in (1, 2, 4)])
    assert flat is not None
    assert flat.level == 1


def test_a_sweep_ends_when_two_levels_bring_nothing():
    points = saturating(8)
    assert not is_saturated(points[:3])
    assert not is_saturated(points[:5]), "one level without gain may be chance"
    assert is_saturated(points)


def test_the_best_level_keeps_objectives_for_most_requests():
    points = [point(level, 1.0, good_share=share) for level, share in ((1, 1.0), (2, 0.95), (4, 0.9), (8, 0.89))]
    found = best_within_objectives(points)
    assert found is not None
    assert found.level == 4
    assert best_within_objectives(saturating(8)) is None


def test_the_table_marks_both():
    points = saturating(8)
    points[2] = point(4, 4.0, good_share=1.0, median_ttft_ms=None)
    lines = sweep_table(points, "concurrency").splitlines()
    assert lines[3].endswith("<- within objectives")
    assert "        -" in lines[3]
    assert lines[4].endswith("<- knee")
