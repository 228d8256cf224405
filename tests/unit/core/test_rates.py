"""Estimates of waiting time from what was measured."""

from k3svc.core.rates import BusyInterval, Throughput, retry_after_s


def test_the_interval_is_that_of_the_busy_period() -> None:
    interval = BusyInterval(size=4)
    assert interval.mean_s(5.0) is None
    for now in (0.0, 10.0, 12.0, 14.0, 16.0):
        interval.add(now)
    assert interval.mean_s(16.0) == 2.0, "the oldest event has left the window"
    assert interval.mean_s(30.0) == 5.0, "a queue that stands still waits longer"
    interval.reset()
    interval.add(100.0)
    assert interval.mean_s(100.0) is None


def test_throughput_is_work_by_time_not_a_mean_of_rates() -> None:
    throughput = Throughput()
    assert throughput.seconds_for(10) is None
    throughput.add(1000, 1.0)
    throughput.add(10, 1.0)
    assert throughput.seconds_for(505) == 1.0
    assert throughput.seconds_for(0) == 0.0


def test_a_retry_delay_is_bounded() -> None:
    assert [retry_after_s(value) for value in (None, 0.0, 2.5, 1e9)] == [1.0, 0.05, 2.5, 30.0]
