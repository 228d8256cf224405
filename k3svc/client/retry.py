"""When and how often a call is tried again."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Bounds of trying again. Only UNAVAILABLE and RESOURCE_EXHAUSTED are tried again."""

    attempts: int = 8
    """Calls in a row that bring no new token before the last error is raised; 1: never try again."""
    backoff_s: float = 0.1
    """Wait after the first failure; doubled after each further one."""
    max_backoff_s: float = 2.0
    """Longest wait where the service asks for none."""
    max_retry_after_s: float = 30.0
    """Longest wait that a service may ask for; when it asks for more, the error is raised."""

    def delay_s(self, failures: int, retry_after_s: float | None, fraction: float) -> float | None:
        """Seconds to wait after the `failures`-th failure in a row, None to give up.

        `fraction` in [0, 1) is the jitter. The wait is never shorter than what the service asked for.
        """
        if failures >= self.attempts or (retry_after_s or 0.0) > self.max_retry_after_s:
            return None
        backoff_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** (failures - 1))
        if retry_after_s is not None:
            return retry_after_s + self.backoff_s * fraction
        return backoff_s * (0.5 + 0.5 * fraction)
