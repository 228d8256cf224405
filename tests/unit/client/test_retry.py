import pytest

from k3svc.client.retry import RetryPolicy

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
