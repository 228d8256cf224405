"""What is heard of a sample, compared with what comes out of it."""

from collections.abc import Sequence

import pytest

from k3svc.core.speculation import Acceptance
from k3svc.engine.listening import FIRST_PERIOD, LAST_PERIOD, Listening
from k3svc.engine.ports import DraftProposal

PROMPT_LEN = 10


def proposal(base_len: int, tokens: Sequence[int]) -> DraftProposal:
    return DraftProposal(key="a", attempt=1, base_len=base_len, tokens=tokens)


def test_a_proposal_is_judged_at_its_first_wrong_token_or_its_end():
    acceptance = Acceptance()
    listening = Listening(acceptance=acceptance)
    # The anchor at base 10 is output token 0, so these are meant for output tokens 1, 2 and 3.
    listening.hear(proposal(PROMPT_LEN, (1, 2, 3)))
    assert not listening.compare([0, 1, 2], PROMPT_LEN) and listening.num_heard == 0
    assert listening.compare([0, 1, 2, 3], PROMPT_LEN) and listening.num_heard == 1
    assert not listening.compare([0, 1, 2, 3, 4], PROMPT_LEN), "it is judged once"
    right = acceptance.survivals(3, ())
    listening.hear(proposal(PROMPT_LEN + 3, (4, 9, 9)))
    assert listening.compare([0, 1, 2, 3, 4, 5], PROMPT_LEN) and listening.num_heard == 2
    wrong = acceptance.survivals(3, ())
    assert wrong[0] > right[0] and wrong[1] < right[1], "one of three was right"


def test_after_a_verdict_text_is_judged_anew_and_less_often():
    acceptance = Acceptance()
    listening = Listening(acceptance=acceptance)
    hope = Acceptance().survivals(2, ())
    for base in range(PROMPT_LEN, PROMPT_LEN + 8):
        listening.hear(proposal(base, (99, 99)))
    assert listening.compare(list(range(10)), PROMPT_LEN) and listening.num_heard == 8
    assert acceptance.survivals(2, ())[0] < 0.5
    listening.doubt()
    assert acceptance.survivals(2, ()) == hope and listening.num_heard == 0
    assert listening.period == 2 * FIRST_PERIOD
    for _ in range(9):
        listening.doubt()
    assert listening.period == LAST_PERIOD


@pytest.mark.parametrize("period", [4, 16])
def test_a_wish_is_due_once_a_period(period: int):
    listening = Listening(acceptance=Acceptance(), period=period)
    wishes = [listening.may_wish(4) for _ in range(9)]
    assert wishes == ([True] * 9 if period == 4 else [True, False, False, False] * 2 + [True])


def test_rows_are_taken_when_none_is_missing():
    listening = Listening(acceptance=Acceptance())
    for data in (b"ab", b"cd"):
        listening.rows += data
        listening.num_rows += 1
    assert listening.take(3) is None and listening.take(2) is None, "what is incomplete is given up"
    listening.rows += b"ef"
    listening.num_rows += 1
    assert bytes(listening.take(1) or b"") == b"ef"
    assert listening.take(0) is None
