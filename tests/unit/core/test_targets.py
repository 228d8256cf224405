import random
from collections import Counter
from collections.abc import Mapping

import pytest

from k3svc.core.targets import LEAST_ROOM, Affinity, Report, WeightedTurns, ranked, room

AFFINITY = Affinity(num_blocks=4, block_tokens=16, bound=1.25)
NAMES = [f"10.0.0.{index}:50061" for index in range(1, 9)]


def prompt(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(1 << 17) for _ in range(size)]


def choose(key: bytes, work: Mapping[str, int], tokens: int) -> str:
    return AFFINITY.choose(key, work, tokens)[0]


def test_whole_leading_blocks_decide_and_nothing_else():
    rng = random.Random(1)
    first = prompt(rng, 64)
    assert AFFINITY.key(first) == AFFINITY.key(first + prompt(rng, 50)) == AFFINITY.key(tuple(first))
    assert AFFINITY.key(first[:47]) == AFFINITY.key(first[:32]) != AFFINITY.key(first[:48])
    assert AFFINITY.key(first[:15]) == AFFINITY.key([]) == b""
    assert Affinity(num_blocks=0).key(first) == b""
    assert AFFINITY.key([*first[:63], first[63] + 1]) != AFFINITY.key(first)
    # 256 and 1 would be the same bytes in another order if ids ran into each other.
    assert AFFINITY.key([256] + [0] * 15) != AFFINITY.key([1] + [0] * 15)


def test_the_order_of_a_key_does_not_depend_on_how_targets_are_listed():
    assert ranked(b"k", NAMES) == ranked(b"k", NAMES[::-1])
    assert {tuple(ranked(bytes([k]), NAMES[:3])) for k in range(64)} == {
        (a, b, c) for a in NAMES[:3] for b in NAMES[:3] for c in NAMES[:3] if len({a, b, c}) == 3
    }


@pytest.mark.parametrize("count", [2, 3, 8])
def test_prefixes_are_spread_evenly(count: int):
    rng = random.Random(count)
    idle = dict.fromkeys(NAMES[:count], 0)
    shares = Counter(choose(AFFINITY.key(prompt(rng, 64)), idle, 64) for _ in range(4000))
    assert set(shares) == set(idle)
    # Six standard deviations of a binomial.
    for share in shares.values():
        assert abs(share - 4000 / count) < 6 * (4000 / count) ** 0.5


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_new_target_takes_its_share_and_moves_nothing_else(count: int):
    rng = random.Random(count)
    keys = [AFFINITY.key(prompt(rng, 64)) for _ in range(3000)]
    few, more = dict.fromkeys(NAMES[:count], 0), dict.fromkeys(NAMES[: count + 1], 0)
    before = [choose(key, few, 64) for key in keys]
    after = [choose(key, more, 64) for key in keys]
    moved = [(was, now) for was, now in zip(before, after, strict=True) if was != now]
    assert {now for _, now in moved} == {NAMES[count]}, "a prefix moves to the new target only"
    expected = len(keys) / (count + 1)
    assert abs(len(moved) - expected) < 6 * expected**0.5


def test_no_target_has_more_than_the_bound_and_one_prompt():
    """A thousand prompts with one prefix, and prompts that end at random: the worst that affinity can meet."""
    rng = random.Random(3)
    key = AFFINITY.key(prompt(rng, 64))
    work = dict.fromkeys(NAMES[:5], 0)
    under_way: list[tuple[str, int]] = []
    chosen: Counter[str] = Counter()
    for _ in range(1000):
        tokens = rng.choice((64, 500, 4000, 30000))
        name = choose(key, work, tokens)
        limit = AFFINITY.bound * (sum(work.values()) + tokens) / len(work)
        assert work[name] <= limit
        for earlier in ranked(key, work):
            if earlier == name:
                break
            assert work[earlier] > limit, "the first in the order that is within the bound"
        work[name] += tokens
        under_way.append((name, tokens))
        chosen[name] += 1
        while under_way and rng.random() < 0.45:
            done, size = under_way.pop(rng.randrange(len(under_way)))
            work[done] -= size
    assert len(chosen) >= 4, "with a bound of 1.25, no less than four fifths of the targets share one prefix"


def test_a_lone_prompt_stays_with_its_favourite_and_a_second_one_of_its_size_too():
    key = AFFINITY.key(range(64))
    favourite, other = ranked(key, NAMES[:2])
    assert choose(key, {favourite: 0, other: 0}, 1000) == favourite
    assert choose(key, {favourite: 1000, other: 0}, 1000) == favourite
    assert choose(key, {favourite: 2000, other: 0}, 1000) == other
    assert choose(key, {favourite: 30_000, other: 0}, 100) == other
    assert AFFINITY.choose(key, {favourite: 0, other: 0}, 1) == (favourite, "prefix")
    assert AFFINITY.choose(key, {favourite: 9, other: 0}, 1) == (other, "bound")
    assert AFFINITY.choose(b"", {favourite: 9, other: 0}, 1) == (other, "load")


def test_a_prompt_without_a_prefix_goes_where_least_is_to_do():
    assert choose(b"", {"a": 5, "b": 3, "c": 3}, 10) == "b"
    assert choose(b"", {"c": 3, "a": 5, "b": 3}, 10) == "c"


def test_turns_are_those_of_the_weights():
    turns = WeightedTurns()
    assert "".join(turns.next(dict.fromkeys("abcd", 1.0)) for _ in range(12)) == "abcdabcdabcd"
    turns = WeightedTurns()
    chosen = [turns.next({"a": 5.0, "b": 1.0, "c": 1.0}) for _ in range(70)]
    assert Counter(chosen) == {"a": 50, "b": 10, "c": 10}
    for start in range(0, 70, 7):
        assert Counter(chosen[start : start + 7]) == {"a": 5, "b": 1, "c": 1}, "spread, not in a run"


def test_one_that_was_away_does_not_make_up_for_it():
    turns = WeightedTurns()
    for _ in range(100):
        turns.next({"a": 1.0})
    assert Counter(turns.next({"a": 1.0, "b": 1.0}) for _ in range(10)) == {"a": 5, "b": 5}


def test_many_callers_with_the_same_view_do_not_run_to_one_target():
    """Each sends twenty requests on one report, which says that one target is nearly full."""
    view = {"full": room(Report(serving=True, free_share=0.1), 0), "empty": room(Report(serving=True), 0)}
    sent: Counter[str] = Counter()
    for _ in range(50):
        turns = WeightedTurns()
        sent.update(turns.next(view) for _ in range(22))
    assert sent == {"full": 100, "empty": 1000}


def test_room():
    assert room(None, 7) == 1.0
    assert room(Report(serving=True, free_share=0.5), 3) == 0.5
    assert room(Report(serving=True, free_share=0.5, total_slots=8), 2) == 0.25
    assert room(Report(serving=True, free_share=0.5, total_slots=8), 9) == LEAST_ROOM
    assert room(Report(serving=True, free_share=0.0, waiting=3), 0) == LEAST_ROOM / 4
