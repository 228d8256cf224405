"""An event loop on virtual time: sleeping costs nothing, and a deadlock is an error instead of a hang."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class _InstantSelector(selectors.SelectSelector):
    """Never waits; hands the time that would have been waited to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: no task can run and no timer is set")
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and jumps to the next timer when nothing else can run. No threads, no sockets."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now


def run_virtual(main: Coroutine[None, None, Result]) -> Result:
    """Runs `main` to its end on a fresh VirtualLoop. Tasks that it leaves behind are an error."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(main)
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        if left:
            raise RuntimeError(f"tasks left over: {left}")
        return result
    finally:
        loop.close()
