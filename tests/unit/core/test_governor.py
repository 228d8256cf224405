"""Whether speculation pays, in plain steps of 1 s."""

import random

import pytest

from k3svc.core.governor import Governor


def governed_steps(governor: Governor, num_steps: int, *, num_samples: int, tokens: int, seconds: float) -> int:
    """Steps with drafts of a run in which a plain step takes 1 s and one with drafts gives so much."""
    speculated = 0
    for _ in range(num_steps):
        if governor.pays(num_samples):
            speculated += 1
            governor.observe(num_samples, tokens, seconds, 1.0)
    return speculated


@pytest.mark.parametrize(
    ("num_samples", "tokens", "seconds"), [(1, 1, 1.1), (1, 1, 2.0), (1, 2, 5.0), (4, 6, 2.0), (16, 20, 1.4)]
)
def test_what_speculation_loses_is_a_share_of_the_time(num_samples: int, tokens: int, seconds: float) -> None:
    num_steps = 10000
    speculated = governed_steps(Governor(), num_steps, num_samples=num_samples, tokens=tokens, seconds=seconds)
    lost = speculated * (seconds - tokens / num_samples)
    # What there was at the start is lost too, and one step may take all that is left.
    assert lost <= Governor.SHARE * num_steps + Governor.MOST_CREDIT + seconds
    assert lost > 0.8 * Governor.SHARE * num_steps, "it is tried again and again"


def test_speculation_that_pays_makes_way_for_4_plain_steps_in_68() -> None:
    assert governed_steps(Governor(), 6800, num_samples=16, tokens=30, seconds=1.4) == 6400


def test_one_slow_step_is_forgiven_and_a_run_of_losses_is_not() -> None:
    governor = Governor()
    governed_steps(governor, 20, num_samples=1, tokens=3, seconds=2.0)
    governor.observe(1, 1, 1000.0, 1.0)
    assert not governor.is_resting(1)
    for _ in range(10):
        governor.observe(1, 1, 3.0, 1.0)
    assert not governor.pays(1) and governor.is_listening(1)


def test_text_that_drafts_suit_goes_on_over_steps_that_come_to_nothing() -> None:
    """Of chat, half of the steps give 8 tokens for the time of 3.6 plain steps, and a quarter give 1."""
    draws, rests = random.Random(7), 0
    for _ in range(100):
        governor = Governor()
        for _ in range(40):
            if governor.pays(1):
                governor.observe(1, draws.choice((8, 8, 4, 1)), 3.6, 1.0)
        rests += governor.is_listening(1)
    assert rests <= 5


def test_what_other_text_has_gained_is_not_for_new_text_to_lose() -> None:
    governor = Governor()
    governed_steps(governor, 50, num_samples=1, tokens=8, seconds=2.0)
    governor.renew(1)
    lost = 0
    while not governor.is_listening(1):
        governor.observe(1, 1, 3.0, 1.0)
        lost += 2
    assert lost == Governor.MOST_CREDIT


def test_each_load_is_judged_by_itself_and_few_samples_rest_with_an_ear_open() -> None:
    governor = Governor()
    governor.rest(16)
    governor.rest(2)
    assert not governor.pays(16) and [governor.pays(32) for _ in range(5)] == [False] * 4 + [True]
    assert governor.would_try(2) and not governor.would_try(16), "nothing has been earned yet"
    assert governor.is_resting(2), "the text that has been there goes on without drafts"
    governor.renew(2)
    governor.renew(16)
    assert [governor.is_listening(num_samples) for num_samples in (1, 2, 16)] == [False, True, False]
    assert not governor.is_resting(2) and not governor.pays(2), "drafters hear of it, and nobody waits for them"
    governor.trust(2)
    assert governor.pays(2) and not governor.is_listening(2)


def test_text_is_listened_to_for_long_and_no_longer() -> None:
    governor = Governor()
    governor.rest(1)
    governor.renew(1)
    for _ in range(Governor.LISTEN_STEPS):
        assert governor.is_listening(1)
        governor.observe(1, 1, 1.1, 1.0)
        assert not governor.pays(1)
    assert governor.is_resting(1) and governor.would_try(1), "the next text may be another one"
    assert not governor.pays(1), "what would have been earned went into listening"


def test_drafts_that_lose_are_listened_to_again_among_few_samples() -> None:
    for num_samples in (1, 16):
        governor = Governor()
        governor.renew(num_samples)
        governor.trust(num_samples)
        for _ in range(20):
            governor.observe(num_samples, num_samples, 3.0, 1.0)
        assert governor.is_listening(num_samples) == (num_samples == 1)
        assert governor.is_resting(num_samples) == (num_samples == 16)


def test_a_new_stack_listens_to_its_first_text_before_it_waits() -> None:
    governor = Governor()
    assert governor.would_try(1)
    governor.renew(1)
    assert governor.is_listening(1)
    governor.trust(1)
    paid = [governor.pays(1) for _ in range(6)]
    assert paid == [False] * 4 + [True] * 2, "what plain steps take is not known yet"


@pytest.mark.parametrize("seconds", [1.01, 1.05, 1.3])
def test_listening_uses_up_what_was_earned_and_makes_no_debts(seconds: float) -> None:
    governor = Governor()
    governor.rest(1)
    for step in range(2000):
        if step % 128 == 0:
            governor.renew(1)
        assert not governor.pays(1)
        governor.observe(1, 1, seconds, 1.0)
    governor.trust(1)
    assert governor.pays(1), "it may lose what trust gives"
    spent = 0
    while not governor.is_listening(1):
        governor.observe(1, 1, 2.0, 1.0)
        spent += 1
    assert Governor.TRUST <= spent <= Governor.TRUST + 1


def test_trust_that_was_misplaced_is_earned_back() -> None:
    """Each text promises much and gives nothing."""
    governor, lost = Governor(), 0.0
    num_steps = 20000
    for step in range(num_steps):
        if step % 128 == 0:
            governor.renew(1)
        if governor.is_listening(1):
            governor.trust(1)
        if governor.pays(1):
            lost += 2.0
            governor.observe(1, 1, 3.0, 1.0)
    most = Governor.SHARE * num_steps + Governor.MOST_CREDIT + Governor.TRUST + 2.0
    assert 0.8 * Governor.SHARE * num_steps < lost <= most


def test_text_that_is_trusted_may_begin_badly() -> None:
    governor = Governor()
    governor.rest(1)
    governor.renew(1)
    assert not governor.pays(1)
    governor.trust(1)
    for _ in range(3):
        governor.observe(1, 1, 3.5, 1.0)
    assert governor.pays(1) and not governor.is_listening(1)
    governor.observe(1, 1, 3.5, 1.0)
    assert governor.is_listening(1)


def test_a_rest_ends_when_all_has_been_earned_again() -> None:
    governor = Governor()
    governor.rest(1)
    waited = next(step for step in range(1000) if governor.pays(1))
    assert waited == pytest.approx(Governor.MOST_CREDIT / Governor.SHARE, abs=1)
