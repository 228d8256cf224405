"""A load test at one level after the other, and the knee of what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_GAIN = 1.03
"""Two levels in a row that bring less than this factor in throughput end a sweep."""
GOOD_SHARE = 0.9
"""Share of requests that must keep their objectives at the level that a sweep recommends."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One level of a sweep."""

    level: float
    """Concurrency, or requests per second."""
    figures: dict[str, Any]

    @property
    def throughput(self) -> float:
        return float(self.figures["output_throughput"])


def is_saturated(points: Sequence[Point]) -> bool:
    """Whether the last two levels brought next to nothing over what was best before them."""
    if len(points) < 4:
        return False
    best = max(point.throughput for point in points[:-2])
    return all(point.throughput < MIN_GAIN * best for point in points[-2:])


def knee(points: Sequence[Point]) -> Point | None:
    """The level beyond which throughput grows more slowly than load does: the point farthest above the chord of the
    curve of throughput over level, both scaled to [0, 1] (Kneedle, Satopää et al. 2011). None for fewer than three.
    """
    if len(points) < 3:
        return None
    ordered = sorted(points, key=lambda point: point.level)
    levels = np.array([point.level for point in ordered])
    rates = np.array([point.throughput for point in ordered])
    span = rates.max() - rates.min()
    if span <= 0:
        return ordered[0]
    height = (rates - rates.min()) / span - (levels - levels[0]) / (levels[-1] - levels[0])
    return ordered[int(height.argmax())]


def best_within_objectives(points: Sequence[Point]) -> Point | None:
    """The highest level at which GOOD_SHARE of the requests kept their objectives; None where none does, or where there
    are no objectives.
    """
    good = [point for point in points if point.figures.get("good_share", 0.0) >= GOOD_SHARE]
    return max(good, key=lambda point: point.level, default=None)


def sweep_table(points: Sequence[Point], unit: str) -> str:
    """One line a level; `unit` names the level."""
    chosen, best = knee(points), best_within_objectives(points)
    lines = [
        f"{unit:>12} {'req/s':>8} {'tok/s':>9} {'TTFT p50':>9} {'p99':>9} {'TPOT p50':>9} {'p99':>9} {'failed':>7}"
    ]
    for point in points:
        values = point.figures
        numbers = [values[f"{p}_{name}_ms"] for name in ("ttft", "tpot") for p in ("median", "p99")]
        shown = " ".join(f"{'-' if number is None else f'{number:.1f}':>9}" for number in numbers)
        notes = [text for text, which in (("knee", chosen), ("within objectives", best)) if which is point]
        line = f"{point.level:>12g} {values['request_throughput']:>8.2f} {point.throughput:>9.1f} {shown}"
        lines.append(f"{line} {values['failed']:>7}" + (f"  <- {', '.join(notes)}" if notes else ""))
    return "\n".join(lines)
