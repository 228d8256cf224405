"""An event loop on virtual time: sleeping costs nothing, and a deadlock is an error instead of a hang."""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and jumps to the next timer when nothing else can run. No threads, no sockets.

    `after_turn` is called after every turn; what it raises ends the run. With `rng`, what is ready in one turn runs in
    an order that rng draws, so that no code can rely on it. What tasks and callbacks leave unhandled ends the run too.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)
        self._rng = rng
        self._unhandled: list[BaseException] = []
        self.after_turn: Callable[[], None] = lambda: None
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._instant.now

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Runs `main` to its end and closes the loop. Tasks that it leaves behind are an error."""
        try:
            result = self.run_until_complete(main)
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            if left:
                raise RuntimeError(f"tasks left over: {left}")
            return result
        finally:
            self._abandon()
            self.close()

    def _abandon(self) -> None:
        """Ends what a failed run left behind, quietly."""
        self.after_turn = lambda: None
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _run_once(self) -> None:
        if self._rng is not None and len(self._ready) > 1:  # type: ignore[attr-defined]
            self._rng.shuffle(self._ready)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]
        self.after_turn()
        if self._unhandled:
            raise self._unhandled.pop()

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._unhandled.append(error if isinstance(error, BaseException) else RuntimeError(context["message"]))


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` to its end on a fresh VirtualLoop. Tasks that it leaves behind are an error."""
    return VirtualLoop().run(main)
