"""The arithmetic of speculation against values worked out by hand."""

import itertools
import random

import pytest

from k3svc.core.speculation import (
    Acceptance,
    HealthWatch,
    ReplyTimes,
    StepTimes,
    Tally,
    Usable,
    survivals,
    usable_part,
    verify_lengths,
)


def usable(
    tokens: list[int], *, base_len: int, output: list[int], confidences: tuple[float, ...] = ()
) -> Usable | None:
    return usable_part(
        tokens,
        confidences,
        base_len=base_len,
        output=output,
        prompt_len=10,
        vocab_size=100,
        longest=5,
        mask_token_id=50,
    )


def test_a_fresh_proposal_is_used_whole() -> None:
    # Ten prompt tokens, output 1, 2: the anchor is 2, at position 11.
    assert usable([3, 4, 5], base_len=11, output=[1, 2]) == Usable(first=0, tokens=(3, 4, 5), confidences=())
    kept = usable([3, 4], base_len=11, output=[1, 2], confidences=(0.5, 0.25))
    assert kept == Usable(first=0, tokens=(3, 4), confidences=(0.5, 0.25))


def test_a_late_proposal_is_salvaged_as_far_as_it_was_right() -> None:
    late = usable([2, 3, 4], base_len=10, output=[1, 2, 3], confidences=(0.9, 0.8, 0.7))
    assert late == Usable(first=2, tokens=(4,), confidences=(0.7,))
    assert usable([2, 3, 4], base_len=10, output=[1, 2, 9]) is None, "another token came out"
    assert usable([2, 3], base_len=10, output=[1, 2, 3]) is None, "all of it has come out"


@pytest.mark.parametrize("base_len", [-5, 0, 9, 12, 1 << 62])
def test_a_proposal_for_no_base_of_the_sample_is_dropped(base_len: int) -> None:
    assert usable([3, 4], base_len=base_len, output=[1, 2]) is None


def test_ids_that_no_token_may_have_end_a_proposal() -> None:
    for bad in (-1, 100, 1 << 40, 50):
        assert usable([3, bad, 4], base_len=11, output=[1, 2]) == Usable(first=0, tokens=(3,), confidences=())
        assert usable([bad, 3], base_len=11, output=[1, 2]) is None
    assert usable([1] * 6, base_len=11, output=[1, 2]) is None, "longer than any proposal"
    assert usable([], base_len=11, output=[1, 2]) is None


@pytest.mark.parametrize("confidences", [(float("nan"), 0.5), (0.5,), (2.0, 0.5), (-0.1, 0.5), (0.5,) * 9])
def test_confidences_that_are_none_are_ignored(confidences: tuple[float, ...]) -> None:
    found = usable([3, 4], base_len=11, output=[1, 2], confidences=confidences)
    assert found == Usable(first=0, tokens=(3, 4), confidences=())


def best_by_force(chances: dict[str, list[float]], num_rows: int, plain_s: float, times: StepTimes) -> float:
    """The most tokens a second of any lengths."""
    best = num_rows / plain_s
    for lengths in itertools.product(*(range(len(values) + 1) for values in chances.values())):
        rows = sum(lengths)
        if rows:
            tokens = num_rows + sum(
                sum(values[:length]) for values, length in zip(chances.values(), lengths, strict=True)
            )
            best = max(best, tokens / times.seconds(num_rows + rows))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_lengths_give_the_most_tokens_a_second(seed: int) -> None:
    rng = random.Random(seed)
    chances = {name: survivals([rng.random() for _ in range(4)]) for name in "abc"}
    times = StepTimes({1: 1.0, 4: 1.0 + rng.random(), 8: 2.0 + rng.random(), 16: 3.0 + 3 * rng.random()})
    lengths = verify_lengths(chances, num_rows=5, plain_s=1.2, verify_s=times.seconds)
    tokens = 5 + sum(sum(chances[name][:count]) for name, count in lengths.items())
    rows = sum(lengths.values())
    rate = tokens / times.seconds(5 + rows) if rows else 5 / 1.2
    assert rate == pytest.approx(best_by_force(chances, 5, 1.2, times), rel=1e-12)


def test_no_draft_is_verified_where_rows_cost_what_they_bring() -> None:
    chances = {"a": [0.5, 0.25]}
    assert verify_lengths(chances, num_rows=1, plain_s=1.0, verify_s=float) == {"a": 0}
    assert verify_lengths(chances, num_rows=1, plain_s=1.0, verify_s=lambda _rows: 1.0) == {"a": 2}


def test_what_has_gone_by_anyway_makes_more_drafts_worth_their_rows() -> None:
    chances = {"a": [0.6, 0.36, 0.2]}
    lengths = [
        verify_lengths(chances, num_rows=1, plain_s=1.0, verify_s=lambda rows: 0.7 + 0.3 * rows, beside_s=beside_s)["a"]
        for beside_s in (0.0, 1.0, 9.0)
    ]
    # 1 + 0.6 + 0.36 + 0.2 tokens in 1, 1.3, 1.6, 1.9 seconds and those that have gone by.
    assert lengths == [1, 2, 3]


def test_a_step_up_in_time_does_not_hide_what_lies_behind_it() -> None:
    """Measured times are a staircase: the first draft alone does not pay, both together do."""
    times = {2: 1.9, 3: 1.9}
    assert verify_lengths({"a": [0.89, 0.85]}, num_rows=1, plain_s=1.0, verify_s=times.__getitem__) == {"a": 2}


def test_step_times_lie_between_their_points_and_learn() -> None:
    times = StepTimes({1: 1.0, 4: 4.0, 2: 1.5})
    assert [times.seconds(rows) for rows in (1, 2, 3, 4, 8)] == [1.0, 1.5, 2.75, 4.0, 8.0]
    for _ in range(200):
        times.observe(3, 3.5)
    assert times.seconds(3) == pytest.approx(3.5, rel=0.01)
    assert times.seconds(1) == 1.0
    times.observe(1, 1000.0)
    assert times.seconds(1) <= 1.2, "one step that hung says little"


def test_noise_of_a_measurement_is_not_believed() -> None:
    assert StepTimes({1: 5.0, 2: 1.0, 4: 3.0, 8: 2.0}).points == {1: 1.0, 2: 1.0, 4: 2.0, 8: 2.0}


def test_the_deadline_follows_the_replies_up_to_what_they_gain() -> None:
    replies = ReplyTimes(shortest_s=0.0003, longest_s=0.05, first_s=0.002)
    for _ in range(200):
        replies.observe(0.002)
    assert replies.deadline_s(1.0) == pytest.approx(0.002, rel=0.01), "they do not vary"
    for index in range(400):
        replies.observe(0.001 if index % 2 else 0.003)
    assert replies.deadline_s(1.0) == pytest.approx(0.002 + 3 * 0.001, rel=0.1)
    assert replies.deadline_s(0.0032) == 0.0032, "no longer than they gain"
    assert replies.deadline_s(0.002) == replies.deadline_s(-1.0) == 0.0, "it does not pay"
    for _ in range(300):
        replies.observe(10.0)
    assert replies.deadline_s(100.0) <= 0.05


def test_a_drafter_that_misses_half_of_its_deadlines_is_slow_until_three_probes_hit() -> None:
    watch = HealthWatch()
    for step in range(32):
        assert watch.may_wait()
        watch.observe(in_time=step % 2 == 0)
    assert watch.is_slow
    waits = [watch.may_wait() for _ in range(16)]
    assert waits == [False] * 15 + [True]
    watch.observe(in_time=False)
    for probe in range(3):
        while not watch.may_wait():
            pass
        assert watch.is_slow, probe
        watch.observe(in_time=True)
    assert not watch.is_slow and watch.may_wait()


def test_acceptance_follows_what_comes_out() -> None:
    good, bad = Acceptance(), Acceptance()
    assert good.survivals(2, ()) == pytest.approx([0.8, 0.64])
    for _ in range(60):
        good.observe(4, 4, 2.0)
        bad.observe(4, 0, 2.0)
    assert good.survivals(4, ()) == pytest.approx([1.0] * 4, abs=0.01)
    assert bad.survivals(4, ()) == pytest.approx([0.0] * 4, abs=0.01)
    # Twice as many drafts were accepted as their confidences promised.
    assert good.scale == pytest.approx(2.0, abs=0.05) and bad.scale == 0.5
    assert good.survivals(2, (0.4, 0.5)) == pytest.approx([0.4 * good.scale, 0.2 * good.scale])
    bad.hope(0.4)
    assert bad.survivals(2, ()) == pytest.approx([0.4, 0.16])


def test_acceptance_is_that_of_each_place() -> None:
    """Half of the blocks are right to the end, and half from the start not: no power of one chance says that."""
    rng, acceptance, means = random.Random(1), Acceptance(), []
    for step in range(3000):
        acceptance.observe(4, rng.choice((0, 4)), 0.0)
        if step >= 100:
            means.append(acceptance.survivals(4, ()))
    for place in zip(*means, strict=True):
        assert sum(place) / len(place) == pytest.approx(0.5, abs=0.02)


def test_drafts_that_were_not_verified_are_expected_to_fare_as_before() -> None:
    rng, acceptance, means = random.Random(2), Acceptance(), []
    for step in range(6000):
        right = sum(rng.random() < 0.9 for _ in range(1)) and (4 if rng.random() < 0.5 else 2)
        cut = rng.choice((1, 2, 4))
        acceptance.observe(cut, min(cut, right), 0.0)
        if step >= 100:
            means.append(acceptance.survivals(4, ()))
    found = [sum(place) / len(place) for place in zip(*means, strict=True)]
    assert found == pytest.approx([0.9, 0.9, 0.45, 0.45], abs=0.06)


def test_a_tally_counts_by_length_and_position() -> None:
    tally = Tally()
    for drafts, accepted in ((0, 0), (3, 2), (1, 1), (3, 0)):
        tally.step(drafts, accepted)
    stats = tally.stats()
    assert (stats.steps, stats.steps_with_drafts, stats.proposed, stats.accepted) == (4, 3, 7, 3)
    assert stats.steps_by_length == (1, 0, 2) and stats.accepted_by_position == (2, 1, 0)
    assert stats.acceptance_length == 2.0
    assert Tally().stats().acceptance_length is None
