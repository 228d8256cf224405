"""docs/ascend-traps.md leaves no trap out, and names tests and mutants that exist."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path("docs/ascend-traps.md")
COUNTS = {"0": 10, "b": 33, "c": 24, "e": 49, "x": 15}
"""Rows of each section: contracts, rules, risks and bug reports that are known, and what mutants add."""
ROW = re.compile(r"^\| (\w)\.(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, set[str], set[str], str]]:
    """(section, number, tests, mutants, last column)."""
    return [
        (section, number, set(re.findall(r"`(test_\w+)`", tests)), set(re.findall("“([^”]+)”", last)), last)
        for section, number, _, tests, last in ROW.findall(DOCUMENT.read_text())
    ]


@pytest.fixture(scope="module")
def mutants() -> dict[str, str]:
    """The test that notices each."""
    import npu_mutants  # type: ignore[import-not-found]

    return {mutant.name: mutant.test.split("::")[1].split("[")[0] for mutant in npu_mutants.MUTANTS}


def test_no_trap_is_left_out():
    found: dict[str, list[int]] = {}
    for section, number, *_ in rows():
        found.setdefault(section, []).append(int(number))
    assert found == {section: list(range(1, count + 1)) for section, count in COUNTS.items()}
    table_lines = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| \w\.", line)]
    assert len(table_lines) == sum(COUNTS.values())


def test_the_tests_that_rows_name_exist():
    sources = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", sources))
    named = {name for _, _, tests, _, _ in rows() for name in tests}
    assert len(named) > 80
    assert named <= defined


def test_each_row_has_a_test_or_says_why_not():
    for section, number, tests, found, last in rows():
        assert tests or not found, f"{section}.{number}"
        # Either names alone, or a reason.
        assert bool(found) != (last.strip() == re.sub("“[^”]+”(; )?", "", last).strip()), f"{section}.{number}"


def test_the_mutants_that_rows_name_exist_and_all_are_named(mutants: dict[str, str]):
    named = {name for _, _, _, found, _ in rows() for name in found}
    assert named == set(mutants)
    assert f"The adapters broken in {len(mutants)} ways" in Path("docs/ascend.md").read_text()


def test_each_mutant_changes_one_place_of_the_adapters():
    import npu_mutants

    for mutant in npu_mutants.MUTANTS:
        source = Path("k3svc/ops/npu", f"{mutant.file}.py").read_text()
        assert source.count(mutant.old) == 1, mutant.name
        assert mutant.new != mutant.old, mutant.name


def test_the_test_that_notices_a_mutant_stands_beside_it(mutants: dict[str, str]):
    beside = {(name, test) for _, _, tests, found, _ in rows() for name in found for test in tests}
    assert [name for name, test in mutants.items() if (name, test) not in beside] == []
