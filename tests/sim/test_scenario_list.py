"""docs/reliability.md names tests that exist, and leaves no scenario out."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING_FROM_THE_SOURCE = {3, 6, 9, 13, 16, 19, 24, 28, 31, 33, 36, 40, 42, 45, 47, 51, 55, 58, 61, 63, 66}
"""Numbers that the list of scenarios skips."""


def test_every_scenario_is_a_test_or_has_a_reason() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| (C\d\d) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [f"C{i:02}" for i in range(1, 69) if i not in MISSING_FROM_THE_SOURCE]
    for name, where in rows:
        cited = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", where)
        assert cited or where.startswith("–") or "`" in where, name
        for path, function in cited:
            assert f"def {function}(" in (ROOT / path).read_text(), f"{name}: {path}::{function}"
