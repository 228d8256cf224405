"""Whether counts come from a law."""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)
CERTAINTY = 9.0
"""A true law is refused once in e^9, about 8,000 times."""
FEWEST = 5.0
"""Expected counts below it are taken together."""


def assert_follows(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> None:
    """χ² of the counts against the law, below what the bound of Laurent and Massart allows (Annals of Statistics 2000,
    lemma 1).
    """
    total = sum(counts.values())
    assert not set(counts) - set(law), f"outcomes that cannot be: {list(set(counts) - set(law))[:3]}"
    cells: list[tuple[float, float]] = []
    rare_expected = rare_count = 0.0
    for outcome, chance in law.items():
        expected, count = chance * total, counts.get(outcome, 0)
        if expected < FEWEST:
            rare_expected, rare_count = rare_expected + expected, rare_count + count
        else:
            cells.append((expected, count))
    if rare_expected >= FEWEST:
        cells.append((rare_expected, rare_count))
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    freedom = len(cells) - 1
    most = freedom + 2 * math.sqrt(freedom * CERTAINTY) + 2 * CERTAINTY
    assert statistic <= most, f"χ² is {statistic:.1f} with {freedom} degrees of freedom, allowed: {most:.1f}"
