"""What drafts promise, against values worked out by hand."""

import pytest

from k3svc.core.prospects import LONGEST_OVERHEAD_S, Prospects
from k3svc.core.speculation import ReplyTimes, StepTimes, VerifyTimes


def prospects(*, reply_s: float = 0.002) -> Prospects:
    """A plain step takes 4 ms for one row, one with drafts 1 ms a row and 3 ms more; 0.5 ms go by between steps."""
    times = VerifyTimes(plain=StepTimes({1: 0.004, 16: 0.019}), verify=StepTimes({2: 0.005, 8: 0.011, 64: 0.067}))
    return Prospects(times, ReplyTimes(first_s=reply_s))


def test_the_promise_is_the_speed_against_plain_steps_with_the_reply_waited_for():
    # Three sure drafts: 4 tokens in 7 + 0.5 + 2 ms, against one in 4.5.
    assert prospects().promise({"a": [1.0, 1.0, 1.0]}, 1) == pytest.approx(4 * 4.5 / 9.5)
    assert prospects(reply_s=0.012).promise({"a": [1.0, 1.0, 1.0]}, 1) == pytest.approx(4 * 4.5 / 19.5)
    assert prospects().promise({"a": [0.01]}, 1) < 1.0


def test_no_draft_is_worth_its_row_that_brings_less_than_it_takes():
    # The first row of drafts takes 1 ms more than a plain step of 4.
    assert prospects().is_worth([0.3], 1) and not prospects().is_worth([0.2], 1)
    assert prospects().lengths({"a": [0.9, 0.1]}, 1, 0.0) == {"a": 1}
    assert prospects().lengths({"a": [0.9, 0.25]}, 1, 0.02) == {"a": 2}, "what was waited for is to bring something"


def test_a_wait_gains_what_plain_steps_would_take_longer():
    # 1 + 0.9 + 0.8 tokens: plain steps take 4.5 ms each, one with 3 rows 6 + 0.5 ms. Unlikely drafts are left out.
    assert prospects().gain_s([[0.9, 0.8, 0.1]], 1) == pytest.approx(2.7 * 0.0045 - 0.0065)
    assert prospects().gain_s([], 1) < 0.0


def test_steps_are_learned_from():
    here = prospects()
    for _ in range(50):
        here.observe_plain(1, 0.006)
        here.observe_overhead(1.0)
        here.observe_verify(8, 0.022)
    assert here.plain_s(1) == pytest.approx(0.006 + LONGEST_OVERHEAD_S, rel=0.02)
    assert here.times.verify.seconds(8) == pytest.approx(0.022, rel=0.02)
