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


def test_a_long_prompt_is_read_piece_by_piece_the_newest_first(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(3)
    known = [rng.randrange(6) for _ in range(400)]
    patient = NgramDrafter(num_proposals=4)
    patient.open([opened(*known)])
    monkeypatch.setattr(ngram, "READ_AT_ONCE", 100)
    hasty = NgramDrafter(num_proposals=4)
    hasty.open([opened(*known)])
    assert hasty._texts["a"].unread == 400 - 101
    assert hasty._texts["a"].places != patient._texts["a"].places
    for step in range(5):
        commit = DraftCommit(key="a", attempt=1, base_len=400 + step, tokens=(rng.randrange(6),), want=4)
        patient.commit([commit])
        hasty.commit([commit])
    assert hasty._texts["a"].places == patient._texts["a"].places
    assert tokens(hasty) == tokens(patient) != ()


def test_an_ending_is_found_before_the_rest_of_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ngram, "READ_AT_ONCE", 8)
    drafter = NgramDrafter(num_proposals=2)
    drafter.open([opened(*range(100, 200), 1, 2, 7, 9, 1, 2)])
    assert tokens(drafter) == (7, 9)
