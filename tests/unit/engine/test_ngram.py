import gc
import random

import pytest

from k3svc.core.request import SamplingParams
from k3svc.engine import ngram
from k3svc.engine.ngram import NgramDrafter
from k3svc.engine.ports import DraftCommit, DraftOpen


def opened(*known: int, attempt: int = 1) -> DraftOpen:
    return DraftOpen(key="a", attempt=attempt, known=known, params=SamplingParams(), sample_index=0, ticket="")


def tokens(drafter: NgramDrafter) -> tuple[int, ...]:
    proposal = drafter.proposal("a")
    assert proposal is not None
    return tuple(proposal.tokens)


def test_what_followed_the_longest_ending_is_proposed():
    drafter = NgramDrafter(num_proposals=3)
    drafter.open([opened(1, 2, 3, 4, 5, 9, 3, 4, 6, 7, 8, 2, 3, 4)])
    # "3 4" stood there last before 6, "2 3 4" before 5.
    assert tokens(drafter) == (5, 9, 3)
    proposal = drafter.proposal("a")
    assert proposal is not None and (proposal.base_len, proposal.attempt) == (13, 1)


def test_the_last_place_of_an_ending_counts():
    drafter = NgramDrafter(num_proposals=2)
    drafter.open([opened(1, 2, 7, 1, 2, 8, 1, 2)])
    assert tokens(drafter) == (8, 1)


def test_commits_extend_the_text():
    drafter = NgramDrafter(num_proposals=4)
    drafter.open([opened(1, 2, 3)])
    assert tokens(drafter) == ()
    drafter.commit([DraftCommit(key="a", attempt=1, base_len=5, tokens=(9, 1, 2), want=4)])
    assert tokens(drafter) == (3, 9, 1, 2)
    drafter.commit([DraftCommit(key="a", attempt=1, base_len=6, tokens=(3,), want=0)])
    assert tokens(drafter) == ()


def test_a_repetition_goes_on():
    drafter = NgramDrafter(num_proposals=7)
    drafter.open([opened(5, 1, 2, 3, 1, 2, 3, 1, 2)])
    assert tokens(drafter) == (3, 1, 2, 3, 1, 2, 3)


def test_closed_samples_are_forgotten():
    drafter = NgramDrafter(num_proposals=2)
    drafter.open([opened(1, 2, 1, 2)])
    drafter.close(["a", "b"])
    assert drafter.proposal("a") is None
    drafter.open([opened(1, 2, attempt=2)])
    assert tokens(drafter) == ()


def looked_up(text: list[int], count: int) -> tuple[int, ...]:
    """What followed the last time that the longest ending of `text`, of 4, 3 or 2 tokens, stood there before."""
    for size in (4, 3, 2):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                shown = text[end:]
                return tuple((shown * count)[:count])
    return ()


def test_a_long_prompt_is_read_piece_by_piece_the_newest_first(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(3)
    known = [1000, 1001, 1002, *(rng.randrange(24) for _ in range(400))]
    monkeypatch.setattr(ngram, "READ_AT_ONCE", 100)
    drafter = NgramDrafter(num_proposals=4)
    drafter.open([opened(*known)])
    differed = False
    for step, token_id in enumerate([1000, 1001, *(rng.randrange(24) for _ in range(200)), 1000, 1001]):
        known.append(token_id)
        drafter.commit([DraftCommit(key="a", attempt=1, base_len=403 + step, tokens=(token_id,), want=4)])
        unread = max(0, 403 - 101 - 100 * step)
        assert drafter._texts["a"].unread == unread
        read = known[unread:]
        assert tokens(drafter) == looked_up(read, 4)
        differed |= looked_up(read, 4) != looked_up(known, 4)
    assert differed


@pytest.mark.parametrize("num_kinds", [1, 2, 5, 60])
def test_proposals_are_what_a_search_through_the_text_finds(num_kinds: int):
    rng = random.Random(num_kinds)
    text = [rng.randrange(num_kinds) for _ in range(rng.randrange(1, 6))]
    drafter = NgramDrafter(num_proposals=5)
    drafter.open([opened(*text)])
    for _ in range(300):
        assert tokens(drafter) == looked_up(text, 5)
        new = tuple(rng.randrange(num_kinds) for _ in range(rng.randrange(1, 4)))
        text += new
        drafter.commit([DraftCommit(key="a", attempt=1, base_len=len(text) - 1, tokens=new, want=5)])


def test_what_is_known_of_a_text_is_no_work_for_the_garbage_collector():
    drafter = NgramDrafter(num_proposals=2)
    drafter.open([opened(*[1, 2, 3, 4, 5] * 9)])
    text = drafter._texts["a"]
    assert len(text._last) > 9 and text._before
    assert not gc.is_tracked(text._last) and not gc.is_tracked(text._before)


def test_an_ending_is_found_before_the_rest_of_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ngram, "READ_AT_ONCE", 8)
    drafter = NgramDrafter(num_proposals=2)
    drafter.open([opened(*range(100, 200), 1, 2, 7, 9, 1, 2)])
    assert tokens(drafter) == (7, 9)
