"""The trained model with every stub drafter: tokens, texts and bits of log-probabilities are those of plain decode."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from k3svc.core.events import SpeculationStats
from k3svc.core.request import GenerateRequest, StopParams
from k3svc.engine.ngram import NgramDrafter
from k3svc.engine.ports import Drafter, DraftOpen
from k3svc.testing.drafters import (
    DeadDrafter,
    FlakyDrafter,
    LiarDrafter,
    OracleDrafter,
    RandomDrafter,
    RepeatLastDrafter,
    SlowDrafter,
    StaleDrafter,
)
from tests.unit.engine.nano_engines import (
    FEATURE_WIDTH,
    GAMMA,
    MASK,
    VOCAB,
    Loaded,
    Outputs,
    draw_request,
    engine,
    load_nano,
    run_all,
)

PATIENCE_S = {"slow": 0.001, "very slow": 0.001}
"""The longest waits for drafters that are to be late."""


@pytest.fixture(scope="module", params=["reference", "cpu"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load_nano(request.param)


def drafters(plain: Outputs) -> dict[str, Callable[[], Drafter]]:
    def truth(opened: DraftOpen) -> Sequence[int]:
        return [*opened.known[:-1], *plain[opened.key].token_ids]

    def oracle(epsilon: float = 0.0) -> OracleDrafter:
        return OracleDrafter(truth, epsilon=epsilon, vocab_size=VOCAB, num_proposals=GAMMA, feature_width=FEATURE_WIDTH)

    return {
        "oracle": oracle,
        "often wrong": lambda: oracle(0.3),
        "random": lambda: RandomDrafter(vocab_size=VOCAB, num_proposals=GAMMA),
        "repeat-last": lambda: RepeatLastDrafter(num_proposals=GAMMA),
        "ngram": lambda: NgramDrafter(num_proposals=GAMMA),
        # The answers come while the next step runs, and some steps later.
        "slow": lambda: SlowDrafter(oracle(0.1), delay_s=0.004),
        "very slow": lambda: SlowDrafter(oracle(0.1), delay_s=0.15),
        "flaky": lambda: FlakyDrafter(oracle(0.1), seed=5),
        "liar": lambda: LiarDrafter(oracle(0.1), vocab_size=VOCAB, mask_token_id=MASK),
        "stale": lambda: StaleDrafter(oracle()),
        "dead": lambda: DeadDrafter(oracle(), commits=9),
        "dead and nobody knows": lambda: DeadDrafter(oracle(), commits=9, is_known=False),
    }


NAMES = tuple(drafters({}))


class Plain:
    """Plain decode of the first requests, computed once."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._outputs: dict[tuple[int, int], Outputs] = {}

    async def of(self, count: int, num_tokens: int) -> tuple[list[GenerateRequest], Outputs]:
        """num_tokens: of each output; 0: as drawn."""
        requests = [draw_request(index, self.loaded.tokenizer) for index in range(count)]
        if num_tokens:
            stop = StopParams(max_tokens=num_tokens, ignore_eos=True)
            requests = [replace(request, stop=stop) for request in requests]
        if (count, num_tokens) not in self._outputs:
            async with engine(self.loaded, None) as decode:
                self._outputs[count, num_tokens] = await run_all(decode, requests)
        return requests, self._outputs[count, num_tokens]


@pytest.fixture(scope="module")
def plain(loaded: Loaded) -> Plain:
    return Plain(loaded)


async def compare(
    plain: Plain, name: str, count: int, *, num_tokens: int = 0, num_pages: int = 160
) -> tuple[SpeculationStats, int]:
    """What speculation did, and how often somebody was preempted."""
    requests, expected = await plain.of(count, num_tokens)
    drafter, patience_s = drafters(expected)[name](), PATIENCE_S.get(name)
    async with engine(plain.loaded, drafter, num_pages=num_pages, patience_s=patience_s) as decode:
        assert await run_all(decode, requests) == expected
        assert decode.speculator is not None
        stats = decode.speculator.total.stats()
        assert stats.steps_with_drafts > 0 or name == "very slow", "nothing was verified"
        assert stats.late > 0 or name not in PATIENCE_S, "it was in time"
        return stats, decode.load().preemptions


@pytest.mark.parametrize("name", NAMES)
async def test_outputs_are_those_of_plain_decode(plain: Plain, name: str) -> None:
    await compare(plain, name, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
async def test_two_hundred_outputs_are_those_of_plain_decode(plain: Plain, name: str) -> None:
    """200 on the backend that is the default; some on the other one, which is slow."""
    count = 200 if plain.loaded.decode.ops.name == "cpu" else 50
    stats, _ = await compare(plain, name, count)
    assert stats.steps_with_drafts > count // 2 or name.startswith(("dead", "very slow"))
    if name == "slow":
        assert min(stats.late, stats.salvaged, stats.accepted) > count // 4
    if name == "oracle":
        assert stats.accepted == stats.proposed and (stats.acceptance_length or 0.0) > 3.0
    if name == "random":
        assert stats.accepted < 0.05 * stats.proposed


async def test_preemption_and_drafts_together_change_nothing(plain: Plain) -> None:
    stats, preemptions = await compare(plain, "often wrong", 5, num_tokens=60, num_pages=16)
    assert preemptions > 0 and stats.accepted > 0
