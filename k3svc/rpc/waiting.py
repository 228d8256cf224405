"""Waiting for something for a bounded time.

asyncio.wait_for will not do: before Python 3.12 it returns normally when its caller is cancelled in the turn in which
the result comes (bpo-37658), and who waits for the end of a cancelled task then waits for ever.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


async def within(timeout_s: float, work: Awaitable[Result]) -> Result:
    """The result of `work`. Raises asyncio.TimeoutError when there is none in time, and CancelledError whenever the
    caller is cancelled; either way `work` is cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    is_late = True
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        is_late = not task.done()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if is_late and task.cancelled():
        raise asyncio.TimeoutError
    return task.result()
