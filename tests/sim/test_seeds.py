"""A few seeds of the simulation with every run of the tests; `make sim SEEDS=2000` for more.

Each seed of REGRESSIONS shows a mistake that was once made, or that tests/mutants makes on purpose.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from k3svc.testing.sim import draw_faults, run_seed
from k3svc.text.tokenizer import Tokenizer

REGRESSIONS = {
    "page freed twice": 36,
    "slot reused while a step of decode may write": 2,
    "slot reused while a step of prefill may write": 1,
    "frame of another request accepted": 32,
    "requests forgotten when a service stops": 27,
    "queue unbounded": 61,
}
NUM_SEEDS = 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[2] / "models" / "k3-nano")


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_invariant_breaks(tokenizer: Tokenizer, seed: int) -> None:
    outcome = run_seed(seed, tokenizer)
    assert sum(count for name, count in outcome.counts.items() if name.startswith("request ")) == 14


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_mistake_is_not_made_again(tokenizer: Tokenizer, name: str) -> None:
    run_seed(REGRESSIONS[name], tokenizer)


def test_a_seed_is_the_whole_run(tokenizer: Tokenizer) -> None:
    assert run_seed(3, tokenizer) == run_seed(3, tokenizer)
    assert run_seed(3, tokenizer).virtual_s != run_seed(4, tokenizer).virtual_s


def test_each_fault_is_off_in_some_seeds_and_on_in_others() -> None:
    drawn = [draw_faults(random.Random(seed)) for seed in range(100)]
    for name in ("crash_weight", "partition_weight", "drain_weight", "upgrade_weight", "step_failure_probability"):
        assert len({getattr(faults, name) for faults in drawn}) == 2, name
    for name in vars(drawn[0].links):
        if "probability" in name:
            assert len({getattr(faults.links, name) for faults in drawn}) == 2, name


@pytest.mark.slow
def test_every_kind_of_trouble_is_met(tokenizer: Tokenizer) -> None:
    """A fault that never happens tests nothing."""
    seen: Counter[str] = Counter()
    for seed in range(100, 160):
        seen += run_seed(seed, tokenizer).counts
    met = {
        *("crashes", "partitions", "drained", "drained late", "upgrades", "resumed", "preempted"),
        *("request finished", "request cancelled", "request aborted", "request expired", "request EngineFault"),
        *("HANDOFF_CRC", "HANDOFF_CORRUPT", "HANDOFF_FOREIGN", "HANDOFF_SILENT", "HANDOFF_TAKEN_OVER"),
        *("QUEUE_FULL", "SLOW_READER", "DRAINING", "STOPPED"),
        *("drafts accepted", "drafts rejected", "drafts salvaged", "steps ahead"),
        *("prefix hits", "prefix evictions"),
        *("prefill released", "prefill expired", "prefill superseded", "prefill failed", "prefill rejected"),
    }
    assert not met - seen.keys()
