import pytest

from k3svc.client import AsyncClient
from k3svc.client.retry import RetryPolicy
from k3svc.errors import Unavailable
from tests.unit.client.fake_decode import Step, running

POLICY = RetryPolicy(attempts=6, backoff_s=0.1, max_backoff_s=0.5, max_retry_after_s=3.0)


def test_the_wait_doubles_up_to_its_bound_and_jitter_halves_it_at_most():
    assert [POLICY.delay_s(failures, None, 1.0) for failures in range(1, 6)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    assert POLICY.delay_s(2, None, 0.0) == pytest.approx(0.1)


def test_what_the_service_asks_for_is_the_least():
    assert POLICY.delay_s(1, 2.0, 0.0) == pytest.approx(2.0)
    assert POLICY.delay_s(1, 2.0, 1.0) == pytest.approx(2.1)
    assert POLICY.delay_s(1, 0.0, 0.0) == pytest.approx(0.0)


def test_giving_up():
    assert POLICY.delay_s(6, None, 0.0) is None
    assert POLICY.delay_s(1, 3.1, 0.0) is None
    assert RetryPolicy(attempts=1).delay_s(1, None, 0.0) is None


async def test_a_row_of_failures_is_told_once_and_the_next_row_again(caplog: pytest.LogCaptureFixture):
    gone = Step(error=Unavailable("draining"))
    fast = RetryPolicy(attempts=4, backoff_s=0.01, max_backoff_s=0.02)
    async with (
        running(gone, gone, gone, Step(break_after=1), gone, gone) as fake,
        AsyncClient(fake.endpoint, retry=fast) as client,
    ):
        result = await client.generate(tokens=(1, 2, 3), max_tokens=4).result()
    assert result.attempts == 7
    assert [record.message.split(": ")[1] for record in caplog.records if "tried again" in record.message] == [
        "draining",
        "draining",
    ]
