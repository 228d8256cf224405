"""The stub drafters do what their names say."""

import asyncio
import statistics

import pytest

from k3svc.core.request import SamplingParams
from k3svc.engine.ports import DraftCommit, Drafter, DraftOpen, FeatureRows
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
from k3svc.testing.virtual import VirtualLoop

VOCAB, GAMMA = 50, 4
TRUTH = tuple((7 * i * i + 3 * i) % VOCAB for i in range(4000))


def opened(known: int = 5, attempt: int = 1) -> DraftOpen:
    return DraftOpen(
        key="r#0", attempt=attempt, known=TRUTH[:known], params=SamplingParams(), sample_index=0, ticket=""
    )


def committed(base: int, count: int, want: int = GAMMA) -> DraftCommit:
    return DraftCommit(key="r#0", attempt=1, base_len=base, tokens=TRUTH[base + 1 - count : base + 1], want=want)


def oracle(epsilon: float = 0.0, feature_width: int = 0) -> OracleDrafter:
    return OracleDrafter(lambda _: TRUTH, epsilon=epsilon, vocab_size=VOCAB, feature_width=feature_width)


def walk(drafter: Drafter, num_tokens: int = 3000) -> list[int]:
    """Accepted drafts of each step of a sample that verifies everything."""
    known, accepted = 5, []
    drafter.open([opened(known)])
    while known < num_tokens:
        proposal, count = drafter.proposal("r#0"), 0
        if proposal is not None and proposal.attempt == 1 and proposal.base_len == known - 1:
            while count < len(proposal.tokens) and proposal.tokens[count] == TRUTH[known + count]:
                count += 1
        accepted.append(count)
        known += count + 1
        drafter.commit([committed(known - 1, count + 1)])
    return accepted


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.5])
def test_the_oracle_has_the_acceptance_length_of_its_errors(epsilon: float):
    expected = sum((1 - epsilon) ** k for k in range(GAMMA + 1))
    assert 1 + statistics.mean(walk(oracle(epsilon))) == pytest.approx(expected, rel=0.05)


def test_who_knows_nothing_is_rarely_right():
    assert statistics.mean(walk(RandomDrafter(vocab_size=VOCAB))) < 0.1
    assert statistics.mean(walk(RepeatLastDrafter())) < 0.1


def test_stale_answers_fit_no_base_and_liars_seldom():
    assert sum(walk(StaleDrafter(oracle()))) == 0
    liar = LiarDrafter(oracle(), vocab_size=VOCAB, mask_token_id=VOCAB - 1)
    assert statistics.mean(walk(liar)) < 2
    assert liar.num_lies > 1000


def test_a_flaky_drafter_loses_about_as_much_as_it_is_told():
    answered = [count > 0 for count in walk(FlakyDrafter(oracle(), loss=0.4, down=0.0))]
    assert statistics.mean(answered) == pytest.approx(0.6, abs=0.05)


def test_a_dead_drafter_answers_until_it_dies():
    drafter = DeadDrafter(oracle(), commits=3)
    assert [drafter.num_proposals, len(walk(drafter, 18))] == [GAMMA, 3]
    assert (drafter.num_proposals, drafter.proposal("r#0")) == (0, None)


def test_a_slow_drafter_is_waited_for():
    async def scenario() -> None:
        drafter = SlowDrafter(oracle(), delay_s=0.5)
        drafter.open([opened()])
        assert drafter.proposal("r#0") is None
        assert not await drafter.wait(0.2)
        assert await drafter.wait(0.4)
        proposal = drafter.proposal("r#0")
        assert proposal is not None
        assert (proposal.base_len, tuple(proposal.tokens)) == (4, TRUTH[5:9])
        assert asyncio.get_running_loop().time() == pytest.approx(0.5)

    VirtualLoop().run(scenario())


def test_features_and_bases_are_checked():
    drafter = oracle(feature_width=8)
    drafter.open([opened()])
    drafter.push([FeatureRows(key="r#0", attempt=1, start=4, num_rows=2, data=memoryview(bytes(16)))])
    assert drafter.num_rows == 2
    with pytest.raises(AssertionError, match="rows from 5, base 4"):
        drafter.push([FeatureRows(key="r#0", attempt=1, start=5, num_rows=1, data=memoryview(bytes(8)))])
    with pytest.raises(AssertionError, match="base 9, is 5"):
        drafter.commit([committed(9, 1)])
    with pytest.raises(AssertionError, match="attempt 1 again"):
        drafter.open([opened()])
