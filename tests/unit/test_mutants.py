from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, SIM, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_code_that_a_mutant_breaks_is_there_once(mutant: Mutant):
    """Without running any: `make mutants` takes long, and code moves on between two of its runs."""
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.found_by == SIM or (ROOT / mutant.found_by).is_file()


def test_mutants_have_names_of_their_own():
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
