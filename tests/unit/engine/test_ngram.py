from k3svc.core.request import SamplingParams
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
