"""Rates that an engine measures of itself, for estimates of waiting time. Callers pass times in."""

from collections import deque

MIN_WAIT_S = 0.05
MAX_WAIT_S = 30.0
UNKNOWN_WAIT_S = 1.0


class BusyInterval:
    """Mean time between the last events of a busy period."""

    def __init__(self, size: int = 16) -> None:
        self._times: deque[float] = deque(maxlen=size)

    def add(self, now: float) -> None:
        self._times.append(now)

    def reset(self) -> None:
        """The busy period is over: what comes next says nothing about the time since the last event."""
        self._times.clear()

    def mean_s(self, now: float) -> float | None:
        """None before there are two events. A last event long ago counts."""
        if len(self._times) < 2:
            return None
        count = len(self._times) - 1
        return max((self._times[-1] - self._times[0]) / count, (now - self._times[0]) / (count + 1))


class Throughput:
    """Units a second, of the last few amounts of work."""

    def __init__(self, size: int = 16) -> None:
        self._work: deque[tuple[int, float]] = deque(maxlen=size)

    def add(self, units: int, seconds: float) -> None:
        self._work.append((units, seconds))

    def seconds_for(self, units: int) -> float | None:
        """Time that so many units take; None before anything was measured."""
        if not self._work:
            return None
        return units * sum(seconds for _, seconds in self._work) / max(1, sum(done for done, _ in self._work))


def retry_after_s(estimate_s: float | None) -> float:
    """What to tell a caller that is refused: the estimate, within bounds that make sense to him."""
    return UNKNOWN_WAIT_S if estimate_s is None else min(MAX_WAIT_S, max(MIN_WAIT_S, estimate_s))
