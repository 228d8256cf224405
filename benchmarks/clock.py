"""Time that a process has used."""

import resource
import time
from collections.abc import Callable


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds and CPU seconds of this process."""
    started, cpu = time.perf_counter(), cpu_s()
    work()
    return time.perf_counter() - started, cpu_s() - cpu
